"""What DeepSpeed keeps and allocates around a model, at each stage of ZeRO. Read from deepspeed 0.19.8
(`runtime/zero/stage_1_and_2.py`, `stage3.py`, `fp16/unfused_optimizer.py`, `engine.py`) and checked tensor by tensor
against real engines: `benchmarks/predictor.py` prints how closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.knobs import Columns, Floats
from autotune.predict.trace import BACKWARD, FORWARD, Pass, Trace
from autotune.problem.job import Job

# Bytes a parameter of optimizer states in 32 bits, beside the master weights.
STATE_BYTES = {"adamw": 8, "adam": 8, "fused_adam": 8, "lion": 4, "sgd": 4, "adagrad": 4}
REDUCE_ELEMENTS = 5e8  # stage 0 reduces in flat copies of so many elements (engine.py, allreduce_gradients)


SUMS = ("parameters", "gradients", "optimizer", "host")  # of a Bill: one entry a candidate
TABLES = ("buckets", "gathered", "temporaries", "activations")  # (moments, candidates)


@dataclass(frozen=True)
class Bill:
    """Bytes of one rank; one entry a candidate, or a table of (moments, candidates).

    A moment is a point of a step, or of the engine's making, at which memory may peak.
    """

    parameters: Floats  # resident, as are the next two
    gradients: Floats
    optimizer: Floats
    moments: tuple[str, ...]
    buckets: Floats  # (moments, candidates), as are the next three
    gathered: Floats  # whole parameters at stage 3
    temporaries: Floats  # gradients on their way, copies of a step
    activations: Floats  # what the model's own forward and backward hold
    host: Floats  # pinned and plain host memory of one rank

    def peaks(self) -> Floats:
        """(moments, candidates): bytes of live tensors on the device."""
        resident = self.parameters + self.gradients + self.optimizer
        return resident + self.buckets + self.gathered + self.temporaries + self.activations


class _Moments:
    """Collects the rows of the tables."""

    def __init__(self, count: int) -> None:
        self.zero = np.zeros(count)
        self.names: list[str] = []
        self.rows: list[tuple[Floats, Floats, Floats, Floats]] = []

    def add(
        self, name: str, mine: Any, buckets: Floats, gathered: Floats, temporaries: Floats, activations: Floats
    ) -> None:
        """`mine` says at which candidates the moment exists."""
        self.names.append(name)
        parts = (buckets, gathered, temporaries, activations)
        self.rows.append(tuple(np.where(mine, part, 0.0) for part in parts))  # type: ignore[arg-type]

    def tables(self) -> tuple[Floats, Floats, Floats, Floats]:
        return tuple(np.array([row[i] for row in self.rows]) for i in range(4))  # type: ignore[return-value]


def bill(job: Job, trace: Trace, columns: Columns) -> Bill:
    """Device and host bytes of every candidate, without context, allocator and communication library."""
    c, ranks = columns, float(job.ranks)
    width = job.element_bytes
    low = 0.0 if width == 4 else 1.0  # whether gradients are copied to 32 bits for the step
    states = float(STATE_BYTES.get(job.optimizer_kind, 8))
    total = float(sum(trace.parameters))
    part, largest, whole = total / ranks, float(trace.largest), width * total
    zero0, one, three = c.stage == 0, c.stage == 1, c.stage == 3
    two = one | (c.stage == 2)  # the stages of stage_1_and_2.py
    out, parameters_out = c.offload_optimizer > 0, three & (c.offload_param > 0)
    contiguous = (c.contiguous > 0) | (two & out)
    accumulates = c.accumulation > 1

    # -- resident ----------------------------------------------------------------------------------------------------
    frozen = width * trace.frozen
    parameters = np.where(three, np.where(parameters_out, 0.0, (whole + frozen) / ranks), whole + frozen)
    # stages 1 to 3 clone 32-bit master weights even of 32-bit parameters
    master = np.where(zero0, 4.0 * low, 4.0)
    optimizer = np.where(zero0, (master + states) * total, np.where(out, 0.0, (master + states) * part))
    # stage 3 keeps its partition's gradients in one buffer; stages 1 and 2 stage one parameter's on the way to the host
    gradients = np.where(three & ~out, width * part, np.where(two & out, width * largest, 0.0))
    bucket = width * c.reduce_bucket
    standing = np.where(three & contiguous, bucket, 0.0)  # made with the engine; stages 1 and 2 make theirs in backward
    ipg = np.where(two & contiguous, bucket * np.where(c.overlap > 0, 2.0, 1.0), 0.0)
    gathered = np.where(three, gathered_bytes(trace, c, width, ranks), 0.0)
    # between micro-batches: what accumulates, and at stage 1 the buckets, which only the boundary frees
    kept = np.where(accumulates, np.select([zero0 | one, two & ~out], [whole, width * part], 0.0), 0.0)
    kept_buckets = standing + np.where(accumulates & one, ipg, 0.0)

    # -- forward and backward ----------------------------------------------------------------------------------------
    moments = _Moments(len(c))
    every = np.ones(len(c), dtype=bool)
    for choice, run in ((0.0, trace.plain), (1.0, trace.of(True))):
        mine = c.checkpointing == choice
        for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
            for fixed, each, grads, used in _points(run, phase):
                held, buckets = _pending(job, c, grads, width, part, largest, bucket, ipg)
                held = held + bypassing(trace, c, width, grads, contiguous & one)
                moments.add(
                    name,
                    mine,
                    np.maximum(kept_buckets, standing + buckets),
                    np.where(three & (ranks > 1), np.maximum(gathered, used), 0.0),
                    np.maximum(kept, held),
                    np.maximum(0.0, fixed + each * c.micro_batch),
                )
    held, buckets = _pending(job, c, whole, width, part, largest, bucket, ipg, done=True)
    held = np.where(zero0, whole + np.minimum(whole, width * REDUCE_ELEMENTS), held)
    moments.add("backward", every, standing + buckets, gathered, held, moments.zero)

    # -- the optimizer's step, and its making ------------------------------------------------------------------------
    sub = np.minimum(part, np.maximum(c.sub_group, largest / ranks))
    copies = np.select(
        [zero0, two & ~out, three & ~out],
        [whole + low * 4 * total, 2 * width * part + low * 4 * part, (width + low * 4) * sub],
        0.0,
    )
    moments.add("step", every, kept_buckets, moments.zero, np.maximum(copies, kept), moments.zero)
    # stage 3 begins with a 32-bit gradient of the largest sub-group (initialize_optimizer_states)
    moments.add("init", three & ~out, moments.zero, moments.zero, np.maximum(0.0, 4 * sub - gradients), moments.zero)

    host = np.where(out & (c.offload_optimizer < 2), (4 + states) * part, 0.0)
    host = host + np.where(out, (width + 4.0) * part, 0.0) + np.where(out & two, width * largest, 0.0)
    host = host + np.where(out & accumulates & (c.stage == 2), width * part, 0.0)
    host = host + np.where(parameters_out, width * part, 0.0)
    return Bill(parameters, gradients, optimizer, tuple(moments.names), *moments.tables(), host)


def _points(run: Pass, phase: int) -> list[tuple[float, float, float, float]]:
    rows = zip(run.fixed, run.per_sequence, run.gradients, run.in_use, run.phase, strict=True)
    return [(fixed, each, grads, used) for fixed, each, grads, used, at in rows if at == phase]


def _pending(
    job: Job,
    c: Columns,
    grads: float,
    width: float,
    part: float,
    largest: float,
    bucket: Floats,
    ipg: Floats,
    done: bool = False,
) -> tuple[Floats, Floats]:
    """(gradients held, buckets) when backward has made `grads` bytes of gradients, `done` when it made all; no bucket
    exists before the first, and one that is copied flat is so when it is full or backward done."""
    nothing = np.zeros(len(c))
    if grads <= 0:
        return nothing, nothing
    ranks, out, stage = float(job.ranks), c.offload_optimizer > 0, c.stage
    contiguous = (c.contiguous > 0) | (((stage == 1) | (stage == 2)) & out)
    first = np.minimum(grads, bucket)  # what waits for the bucket to be full
    full = (grads >= bucket) | done
    own = np.minimum(grads, width * part)
    # offloaded, a gradient's norm is taken in 64 bits
    norm = np.where(out, 8.0 * min(largest, part), 0.0) if width < 4 else nothing
    accumulated = np.where((c.accumulation > 1) & ~out, width * part, 0.0)
    held = np.select(
        [stage == 0, (stage == 1) & contiguous, stage == 1, (stage == 2) & contiguous, stage == 2],
        [
            nothing + grads,
            own + norm,
            grads + norm,
            np.where(out, 0.0, own) + accumulated + norm,
            first + (grads - first) / ranks + accumulated + norm,
        ],
        np.where(contiguous, 0.0, first),
    )
    flat = np.select(
        [stage == 0, (stage < 3) & contiguous, ~full, stage < 3],
        [nothing, ipg, nothing, first],
        first * (1 + 1 / ranks),  # stage 3: the flat bucket, and what is scattered out of it
    )
    return held, flat


def bypassing(trace: Trace, c: Columns, width: float, grads: float, where: Any) -> Floats:
    """Gradients of parameters larger than the bucket: they are reduced in place, and stage 1 keeps them to the step."""
    sizes = np.sort(np.array(trace.parameters, dtype=np.float64))
    above = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0.0]])  # elements in parameters from each size upwards
    over = above[np.searchsorted(sizes, c.reduce_bucket, side="right")]
    return np.where(where, np.minimum(grads, width * over), 0.0)


def gathered_bytes(trace: Trace, c: Columns, width: float, ranks: float) -> Floats:
    """Parameters that stage 3 holds whole at the turn from forward to backward: those used again within
    `max_reuse_distance` elements are not let go, no more than `max_live_parameters` are held, one prefetch ahead.
    One rank's partition is the whole, and is not copied."""
    if ranks == 1:
        return np.zeros(len(c))
    total = float(sum(trace.parameters))
    kept = np.minimum(total, np.minimum(c.max_reuse / 2, c.max_live) + c.prefetch)
    return width * np.maximum(kept, np.minimum(total, trace.largest + c.prefetch))
