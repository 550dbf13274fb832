"""Whole parameters at ZeRO-3: those gathered at once, those always held, and those of a save.

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
    """Return the bytes of parameters that stage 3 holds whole at the turn from forward to backward, frozen ones included.

    Stage 3 keeps parameters that are used again within `max_reuse_distance` elements. `max_live_parameters` does not release
    them: it bounds prefetching alone (0 and 1e9 take the same with tiny-llama on CPU ranks). One prefetch runs ahead. The
    smallest parameters are never released. One rank copies nothing, as its partition is the whole parameter.
    """
    if ranks == 1:
        return np.zeros(len(c))
    sizes = trace.every_size
    total = float(sum(sizes))
    kept = kept_at_turn(trace, c)
    kept = np.minimum(kept + np.minimum(c.prefetch, np.maximum(c.max_live - kept, 0.0)), total)
    # The head, usually the largest parameter, is used again at once.
    at_least = np.where(c.max_reuse > 0, np.maximum(kept, np.minimum(total, max(sizes) + c.prefetch)), kept)
    return width * np.minimum(total, at_least + persistent(trace, c))


def kept_at_turn(trace: Trace, c: Columns) -> Floats:
    """Return the elements that stage 3 still holds when backward begins, so that it need not gather them again. They are used
    again within `max_reuse_distance`, half of which lies on either side of the turn."""
    return np.minimum(c.max_reuse / 2, float(sum(trace.every_size)))


def persistent(trace: Trace, c: Columns) -> Floats:
    """Return the elements of parameters that stage 3 always holds whole: those of at most
    `stage3_param_persistence_threshold` elements."""
    sizes = np.sort(np.array(trace.every_size, dtype=np.float64))
    upwards = np.concatenate([[0.0], np.cumsum(sizes)])
    return np.asarray(upwards[np.searchsorted(sizes, c.persistence, side="right")])


def saved_bytes(job: Job, trace: Trace, c: Columns) -> Floats:
    """Return (n,) bytes of main memory that a save of the weights takes on the first rank's machine, in addition to offload.

    Stage 3 gathers all weights there before it writes, frozen ones too (engine.py, `_zero3_consolidated_16bit_state_dict`).
    The user's own config can turn gathering off.
    """
    gathers = value_at(in_new_names(job.base_config), f"zero_optimization.{GATHER_ON_SAVE}") is not False
    whole = weights_bytes(sum(trace.parameters) + trace.frozen, job.element_bytes)
    return np.where((c.stage == 3) & gathers, whole, 0.0)
