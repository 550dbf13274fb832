"""What DeepSpeed keeps and allocates around a model, at each stage of ZeRO.

Source: deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `fp16/unfused_optimizer.py`, `engine.py`), checked
tensor by tensor against real engines: `benchmarks/predictor.py` prints the errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.knobs import Columns, Floats
from autotune.predict.passes import BACKWARD, FORWARD, Pass, Trace
from autotune.problem.job import Job

# Bytes a parameter of optimizer states in 32 bits, beside the master weights.
STATE_BYTES = {"adamw": 8, "adam": 8, "fused_adam": 8, "lion": 4, "sgd": 4, "adagrad": 4}
REDUCE_ELEMENTS = 5e8  # stage 0 reduces in flat copies of at most so many elements (engine.py, allreduce_gradients)

SUMS = ("parameters", "gradients", "optimizer", "host")  # of a Bill: one entry a candidate
TABLES = ("buckets", "gathered", "temporaries", "activations")  # (moments, candidates)


@dataclass(frozen=True)
class Bill:
    """Bytes of one rank: arrays of one entry a candidate, or tables of (moments, candidates).

    A moment is a point of a step, or of the engine's initialisation, at which memory may peak.
    """

    parameters: Floats  # resident all the time, as are the next two
    gradients: Floats
    optimizer: Floats
    moments: tuple[str, ...]
    buckets: Floats  # (moments, candidates), as are the next three
    gathered: Floats  # whole parameters at stage 3
    temporaries: Floats  # gradients that backward holds, copies made by the optimizer's step
    activations: Floats  # what the model's own forward and backward hold
    host: Floats  # pinned and plain host memory of one rank

    def peaks(self) -> Floats:
        """(moments, candidates): bytes of live tensors on the device."""
        resident = self.parameters + self.gradients + self.optimizer
        return resident + self.buckets + self.gathered + self.temporaries + self.activations


class _Moments:
    """Collects the rows of a Bill's tables, one a moment."""

    def __init__(self, count: int) -> None:
        self.zero = np.zeros(count)
        self.names: list[str] = []
        self.rows: list[tuple[Floats, Floats, Floats, Floats]] = []

    def add(
        self, name: str, mine: Any, buckets: Floats, gathered: Floats, temporaries: Floats, activations: Floats
    ) -> None:
        """`mine` tells which candidates have this moment; the others get zeros."""
        self.names.append(name)
        parts = (buckets, gathered, temporaries, activations)
        self.rows.append(tuple(np.where(mine, part, 0.0) for part in parts))  # type: ignore[arg-type]

    def tables(self) -> tuple[Floats, Floats, Floats, Floats]:
        return tuple(np.array([row[i] for row in self.rows]) for i in range(4))  # type: ignore[return-value]


class _Terms:
    """Sizes, flags and buffers that several lines of the bill need; arrays hold one entry a candidate."""

    def __init__(self, job: Job, trace: Trace, columns: Columns) -> None:
        self.trace, self.columns, self.ranks = trace, columns, float(job.ranks)
        self.width = job.element_bytes
        self.copied_bytes = 0.0 if self.width == 4 else 4.0  # of 32-bit copies of 16-bit elements, for the step
        self.state_bytes = float(STATE_BYTES.get(job.optimizer_kind, 8))
        self.total = float(sum(trace.parameters))  # elements, as are the next two
        self.part, self.largest = self.total / self.ranks, float(trace.largest)
        self.whole = self.width * self.total  # bytes
        stage = columns.stage
        self.zero0, self.one, self.three = stage == 0, stage == 1, stage == 3
        self.two = self.one | (stage == 2)  # the stages of stage_1_and_2.py
        self.out = columns.offload_optimizer > 0
        self.parameters_out = self.three & (columns.offload_param > 0)
        self.contiguous = (columns.contiguous > 0) | (self.two & self.out)
        self.accumulates = columns.accumulation > 1
        self.bucket = self.width * columns.reduce_bucket
        # stage 3 allocates its bucket with the engine; stages 1 and 2 allocate theirs in backward
        self.standing = np.where(self.three & self.contiguous, self.bucket, 0.0)
        doubled = np.where(columns.overlap > 0, 2.0, 1.0)
        self.ipg = np.where(self.two & self.contiguous, self.bucket * doubled, 0.0)
        # between micro-batches: accumulated gradients, and at stage 1 the buckets, which are freed after the last one
        accumulated = np.select(
            [self.zero0 | self.one, self.two & ~self.out], [self.whole, self.width * self.part], 0.0
        )
        self.kept = np.where(self.accumulates, accumulated, 0.0)
        self.kept_buckets = self.standing + np.where(self.accumulates & self.one, self.ipg, 0.0)


def bill(job: Job, trace: Trace, columns: Columns) -> Bill:
    """Device and host bytes of every candidate, without CUDA's context, the allocator and communication libraries."""
    terms, moments = _Terms(job, trace, columns), _Moments(len(columns))
    parameters, gradients, optimizer = _resident(terms)
    _add_passes(terms, moments)
    _add_step(terms, moments, gradients)
    return Bill(parameters, gradients, optimizer, tuple(moments.names), *moments.tables(), _host(terms))


def _resident(t: _Terms) -> tuple[Floats, Floats, Floats]:
    """(parameters, gradients, optimizer): device bytes that are there all the time."""
    frozen = t.width * t.trace.frozen
    parameters = np.where(t.three, np.where(t.parameters_out, 0.0, (t.whole + frozen) / t.ranks), t.whole + frozen)
    # stages 1 to 3 clone 32-bit master weights even of 32-bit parameters
    master = np.where(t.zero0, t.copied_bytes, 4.0)
    partitioned = np.where(t.out, 0.0, (master + t.state_bytes) * t.part)
    optimizer = np.where(t.zero0, (master + t.state_bytes) * t.total, partitioned)
    # stage 3 keeps its partition's gradients in one buffer; stages 1 and 2 stage one parameter's on the way to the host
    staged = np.where(t.two & t.out, t.width * t.largest, 0.0)
    gradients = np.where(t.three & ~t.out, t.width * t.part, staged)
    return parameters, gradients, optimizer


def _add_passes(t: _Terms, moments: _Moments) -> None:
    """The moments of forward and backward."""
    c = t.columns
    every = np.ones(len(c), dtype=bool)
    gathered = np.where(t.three, gathered_bytes(t.trace, c, t.width, t.ranks), 0.0)
    for choice, run in ((0.0, t.trace.plain), (1.0, t.trace.of(True))):
        mine = c.checkpointing == choice
        for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
            for fixed, each, grads, used in _points(run, phase):
                held, buckets = _pending(t, grads)
                held = held + bypassing(t.trace, c, t.width, grads, t.contiguous & t.one)
                moments.add(
                    name,
                    mine,
                    np.maximum(t.kept_buckets, t.standing + buckets),
                    np.where(t.three & (t.ranks > 1), np.maximum(gathered, used), 0.0),
                    np.maximum(t.kept, held),
                    np.maximum(0.0, fixed + each * c.micro_batch),
                )
    held, buckets = _pending(t, t.whole, done=True)
    held = np.where(t.zero0, t.whole + np.minimum(t.whole, t.width * REDUCE_ELEMENTS), held)
    moments.add("backward", every, t.standing + buckets, gathered, held, moments.zero)


def _add_step(t: _Terms, moments: _Moments, gradients: Floats) -> None:
    """The moments of the optimizer's step and of its initialisation; `gradients` are the resident ones."""
    every = np.ones(len(t.columns), dtype=bool)
    sub_group = np.minimum(t.part, np.maximum(t.columns.sub_group, t.largest / t.ranks))
    of_all = t.whole + t.copied_bytes * t.total  # stage 0
    of_part = 2 * t.width * t.part + t.copied_bytes * t.part  # stages 1 and 2
    of_sub_group = (t.width + t.copied_bytes) * sub_group
    copies = np.select([t.zero0, t.two & ~t.out, t.three & ~t.out], [of_all, of_part, of_sub_group], 0.0)
    moments.add("step", every, t.kept_buckets, moments.zero, np.maximum(copies, t.kept), moments.zero)
    # stage 3 begins with a 32-bit gradient of the largest sub-group (initialize_optimizer_states)
    beyond = np.maximum(0.0, 4 * sub_group - gradients)
    moments.add("init", t.three & ~t.out, moments.zero, moments.zero, beyond, moments.zero)


def _host(t: _Terms) -> Floats:
    """Host bytes of one rank where something is offloaded."""
    c = t.columns
    host = np.where(t.out & (c.offload_optimizer < 2), (4 + t.state_bytes) * t.part, 0.0)
    host = host + np.where(t.out, (t.width + 4.0) * t.part, 0.0) + np.where(t.out & t.two, t.width * t.largest, 0.0)
    host = host + np.where(t.out & t.accumulates & (c.stage == 2), t.width * t.part, 0.0)
    return host + np.where(t.parameters_out, t.width * t.part, 0.0)


def _points(run: Pass, phase: int) -> list[tuple[float, float, float, float]]:
    """(fixed, per sequence, gradients, parameters in use) in bytes of every entry of one phase."""
    rows = zip(run.fixed, run.per_sequence, run.gradients, run.in_use, run.phase, strict=True)
    return [(fixed, each, grads, used) for fixed, each, grads, used, at in rows if at == phase]


def _pending(t: _Terms, grads: float, done: bool = False) -> tuple[Floats, Floats]:
    """(gradients held, buckets) in bytes once backward has made `grads` bytes of gradients; `done` after the last.

    No bucket exists before the first gradient. A bucket that is copied flat is copied when it is full, or at the end.
    """
    c = t.columns
    nothing = np.zeros(len(c))
    if grads <= 0:
        return nothing, nothing
    stage, contiguous = c.stage, t.contiguous
    first = np.minimum(grads, t.bucket)  # what waits until the bucket is full
    full = (grads >= t.bucket) | done
    own = np.minimum(grads, t.width * t.part)
    # offloaded (and then always contiguous), a gradient's norm is taken in 64 bits
    norm = np.where(t.out, 8.0 * min(t.largest, t.part), 0.0) if t.width < 4 else nothing
    accumulated = np.where(t.accumulates & ~t.out, t.width * t.part, 0.0)
    held = np.select(
        [t.zero0, t.one & contiguous, t.one, (stage == 2) & contiguous, stage == 2],
        [
            nothing + grads,
            own + norm,
            nothing + grads,
            np.where(t.out, 0.0, own) + accumulated + norm,
            first + (grads - first) / t.ranks + accumulated,
        ],
        np.where(contiguous, 0.0, first),
    )
    flat = np.select(
        [t.zero0, (stage < 3) & contiguous, ~full, stage < 3],
        [nothing, t.ipg, nothing, first],
        first * (1 + 1 / t.ranks),  # stage 3: the flat bucket, and what is scattered out of it
    )
    return held, flat


def bypassing(trace: Trace, c: Columns, width: float, grads: float, where: Any) -> Floats:
    """Bytes of gradients of parameters larger than the bucket, where `where` is true: they are reduced in place, and
    stage 1 keeps them until the step."""
    sizes = np.sort(np.array(trace.parameters, dtype=np.float64))
    above = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0.0]])  # elements in parameters from each size upwards
    over = above[np.searchsorted(sizes, c.reduce_bucket, side="right")]
    return np.where(where, np.minimum(grads, width * over), 0.0)


def gathered_bytes(trace: Trace, c: Columns, width: float, ranks: float) -> Floats:
    """Bytes of parameters that stage 3 holds whole at the turn from forward to backward.

    Those used again within `max_reuse_distance` elements are not released, no more than `max_live_parameters` are held,
    and one prefetch runs ahead. With one rank the partition is the whole parameter, and nothing is copied.
    """
    if ranks == 1:
        return np.zeros(len(c))
    total = float(sum(trace.parameters))
    kept = np.minimum(total, np.minimum(c.max_reuse / 2, c.max_live) + c.prefetch)
    return width * np.maximum(kept, np.minimum(total, trace.largest + c.prefetch))
