"""Whole parameters at ZeRO-3: how many of them a rank holds at once, which it never parts with, and a save of them all.

Source: deepspeed 0.19.8, `runtime/zero/partitioned_param_coordinator.py` and `stage3.py`.
"""

from __future__ import annotations

import numpy as np

from autotune.predict.knobs import Columns, Floats, value_at
from autotune.predict.passes import Trace
from autotune.problem.candidate import GATHER_ON_SAVE
from autotune.problem.checkpoint import weights_bytes
from autotune.problem.ds_file import in_new_names
from autotune.problem.job import Job


def gathered_bytes(trace: Trace, c: Columns, width: float, ranks: float) -> Floats:
    """Bytes of parameters that stage 3 holds whole at the turn from forward to backward, frozen ones among them.

    Those used again within `max_reuse_distance` elements are not released, whatever `max_live_parameters` says, which bounds
    prefetching alone (0 and 1e9 take the same with tiny-llama on CPU ranks); one prefetch runs ahead; the smallest are never
    released. With one rank the partition is the whole parameter, and
    nothing is copied.
    """
    if ranks == 1:
        return np.zeros(len(c))
    sizes = trace.every_size
    total = float(sum(sizes))
    kept = kept_at_turn(trace, c)
    kept = np.minimum(kept + np.minimum(c.prefetch, np.maximum(c.max_live - kept, 0.0)), total)
    # the head, mostly the largest, is used again at once
    at_least = np.where(c.max_reuse > 0, np.maximum(kept, np.minimum(total, max(sizes) + c.prefetch)), kept)
    return width * np.minimum(total, at_least + persistent(trace, c))


def kept_at_turn(trace: Trace, c: Columns) -> Floats:
    """Elements that stage 3 has kept when backward begins, and need not gather again: those used again within
    `max_reuse_distance`, half of it on either side of the turn."""
    return np.minimum(c.max_reuse / 2, float(sum(trace.every_size)))


def persistent(trace: Trace, c: Columns) -> Floats:
    """Elements of the parameters that stage 3 always holds whole: those of at most
    `stage3_param_persistence_threshold` elements."""
    sizes = np.sort(np.array(trace.every_size, dtype=np.float64))
    upwards = np.concatenate([[0.0], np.cumsum(sizes)])
    return np.asarray(upwards[np.searchsorted(sizes, c.persistence, side="right")])


def saved_bytes(job: Job, trace: Trace, c: Columns) -> Floats:
    """(n,) bytes of main memory that a save of the weights takes of the first rank's machine, beside what is offloaded: stage 3
    gathers all of them there before it writes (engine.py, `_zero3_consolidated_16bit_state_dict`), frozen ones too, unless the
    user's own config says that nothing is gathered."""
    gathers = value_at(in_new_names(job.base_config), f"zero_optimization.{GATHER_ON_SAVE}") is not False
    whole = weights_bytes(sum(trace.parameters) + trace.frozen, job.element_bytes)
    return np.where((c.stage == 3) & gathers, whole, 0.0)
