"""Bytes that DeepSpeed keeps and allocates around a model, at each stage of ZeRO.

Source: deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`, `fp16/unfused_optimizer.py` and
`fused_optimizer.py`, `engine.py`), checked tensor by tensor against real engines: `benchmarks/predictor.py` prints the
errors. `versions.py` holds the differences of older versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.gathered import gathered_bytes, persistent
from autotune.predict.knobs import Columns, Floats
from autotune.predict.optimizers import stepper
from autotune.predict.passes import BACKWARD, FORWARD, Pass, Trace
from autotune.predict.pinned import pinned_bytes
from autotune.predict.twin_flow import staying, sub_groups
from autotune.problem.job import Job

# Share of the bytes of frozen partitions. Published figures of LoRA at stage 3 exceed the allocated bytes by 31 and
# 30 % of these (QwenLM/Qwen, 72B on 4 GPUs; modelscope/ms-swift, 7B on 2).
HOLES = 0.3
# Share of the activations that a compiled model without checkpointing keeps. Outputs of pointwise operators (the
# 32-bit copies of norms, gates, rotations) are recomputed from the operands of products (torch,
# _functorch/partitioners.py, min_cut_rematerialization_partition). A Llama layer keeps 27 to 32 of 42 hidden sizes;
# its loss keeps all. Liger's kernels never keep more.
COMPILED_KEPT = 0.75
REDUCE_ELEMENTS = 5e8  # most elements of a flat copy in which stage 0 reduces (engine.py, allreduce_gradients)

# fields of a Bill with one entry per candidate
SUMS = ("parameters", "gradients", "optimizer", "host", "left", "holes")
TABLES = ("buckets", "gathered", "temporaries", "activations", "sent")  # fields of a Bill of (moments, candidates)


@dataclass(frozen=True)
class Bill:
    """Bytes of one rank: arrays of one entry per candidate, or tables of (moments, candidates).

    A moment is a point of a step, or of the engine's initialisation, at which memory may peak.
    """

    parameters: Floats  # resident all the time, like the next two
    gradients: Floats
    optimizer: Floats
    moments: tuple[str, ...]
    buckets: Floats  # (moments, candidates), like the next four
    gathered: Floats  # whole parameters at stage 3
    temporaries: Floats  # gradients during backward, copies made by the optimizer's step
    activations: Floats  # tensors of the model's own forward and backward
    sent: Floats  # included above: what FSDP gathers and reduces, in segments of the streams that do it
    host: Floats  # pinned and plain host memory of one rank
    # Blocks that the optimizer's step has freed and cannot reuse: flat 16-bit gradients, smaller than their 32-bit
    # copy and torch's intermediates. The allocator keeps the blocks.
    left: Floats
    holes: Floats  # between partitions of frozen parameters, left by the whole parameters while the model was made

    def peaks(self) -> Floats:
        """Return (moments, candidates): bytes of live tensors on the device."""
        resident = self.parameters + self.gradients + self.optimizer
        return resident + self.buckets + self.gathered + self.temporaries + self.activations


class _Moments:
    """Rows of a Bill's tables, one per moment."""

    def __init__(self, count: int) -> None:
        self.zero = np.zeros(count)
        self.names: list[str] = []
        self.rows: list[list[Floats]] = []

    def add(self, name: str, mine: Any, *parts: Floats) -> None:
        """Add a moment. Candidates without it (`mine` is false) get zeros. The parts follow TABLES."""
        self.names.append(name)
        self.rows.append([np.where(mine, part, 0.0) for part in parts])

    def tables(self) -> dict[str, Floats]:
        return {name: np.array(part) for name, part in zip(TABLES, zip(*self.rows, strict=True), strict=True)}


class _Terms:
    """Sizes, flags and buffers that several lines of the bill need; arrays hold one entry per candidate."""

    def __init__(self, job: Job, trace: Trace, columns: Columns, device: str) -> None:
        self.trace, self.columns, self.ranks = trace, columns, float(job.ranks)
        self.width, self.frozen_width = trained_width(job, trace), job.element_bytes
        self.plain, self.torch_alone = job.plain, job.torch_alone
        self.stepper = stepper(job)
        # torch uses foreach on CUDA only. Pinning does nothing on CPU ranks (accelerator/cpu_accelerator.py).
        self.on_gpu = device == "cuda"
        share = 1.0 if not job.plain else self.width / 4
        narrower = self.width / job.trained_bytes  # `state_share` describes the adapters alone
        self.temporary_bytes = self.stepper.temporary_bytes * share if self.on_gpu else 0.0
        follows = self.stepper.follows_weights & (self.plain | (columns.stage > 0))
        self.states = self.stepper.state_bytes * np.where(follows, columns.state_share * narrower, 1.0)
        self.accumulated, self.sent = columns.accumulated, columns.communicated
        self.total = float(sum(trace.parameters))  # elements, like the next two
        self.part, self.largest = self.total / self.ranks, float(trace.largest)
        self.at_once = self.largest if self.stepper.loops else self.total  # elements that stage 0 steps at once
        self.whole = self.width * self.total  # bytes
        stage = columns.stage
        self.zero0, self.one, self.three = stage == 0, stage == 1, stage == 3
        self.two = self.one | (stage == 2)  # the stages of stage_1_and_2.py
        self.out = columns.offload_optimizer > 0
        self.parameters_out = self.three & (columns.offload_param > 0)
        # FSDP's shards are its masters: in 32 bits, unless all is in the weights' own type (torch 2.13,
        # distributed/fsdp, _flat_param.py, _use_low_precision_shard). Gathered parameters have the type of the
        # arithmetic.
        self.fsdp = self.three & job.torch_alone
        self.shard, self.frozen_shard = (self.width, self.frozen_width) if job.plain else (max(self.width, 4.0), 4.0)
        self.master = np.where(self.fsdp, 0.0, columns.master)
        self.sub_group = sub_groups(columns, self.part, self.largest, self.ranks)
        self.stays = staying(columns, self.part, self.largest, self.ranks)
        self._gradients(job)
        self._buckets()

    def _gradients(self, job: Job) -> None:
        """Set the gradients that are kept in another precision than backward makes (`grad_accum_dtype`). In bf16 at stage 1
        DeepSpeed uses BF16_Optimizer. Otherwise stages 1 and 2 add them up in one flat buffer of a rank's part."""
        apart = self.accumulated != self.width
        self.bf16_optimizer = self.one & apart & ~self.out & (job.precision == "bf16")
        self.compact = self.two & apart & ~self.bf16_optimizer
        self.made = np.where(self.compact & self.one, self.accumulated, self.width)  # bytes per element of .grad
        self.own = np.where(self.compact, self.accumulated, self.width)  # bytes per element of a rank's own part
        # A parameter that crosses the border of a part is kept whole. In round-robin order that is a large one.
        self.across = np.where(self.two & (self.columns.round_robin > 0), self.width * self.largest, 0.0)
        self.contiguous = (self.columns.contiguous > 0) | (self.two & self.out)
        self.accumulates = (self.columns.accumulation > 1) | (self.columns.keeps_gradients > 0)

    def _buckets(self) -> None:
        """Set the buckets, and the bytes kept between micro-batches."""
        # Stage 3 has its buckets in the dtype that is sent.
        self.bucket_width = np.where(self.three, self.sent, self.made)
        bucket = self.bucket_width * self.columns.reduce_bucket
        # Stage 3 allocates its bucket with the engine; stages 1 and 2 allocate theirs in backward.
        self.standing = np.where(self.three & self.contiguous, bucket, 0.0)
        doubled = np.where(self.columns.overlap > 0, 2.0, 1.0)
        self.ipg = np.where(self.two & self.contiguous & ~self.bf16_optimizer, bucket * doubled, 0.0)
        self.early = np.where(self.columns.early_buckets > 0, self.ipg, 0.0)
        # Stage 1 also keeps its buckets, and frees them after the last micro-batch.
        accumulated = np.select(
            [self.bf16_optimizer, self.zero0 | self.one, self.two & (~self.out | self.compact)],
            [
                np.where(self.columns.immediate > 0, 0.0, self.whole),
                self.made * self.total,
                self.own * self.part + self.across,
            ],
            0.0,
        )
        self.kept = np.where(self.accumulates, accumulated, 0.0)
        self.kept_buckets = self.standing + np.where(self.accumulates & self.one, self.ipg, 0.0)


def bill(job: Job, trace: Trace, columns: Columns, device: str = "cpu") -> Bill:
    """Return device and host bytes of every candidate, without CUDA's context, the allocator and communication libraries.

    On "cuda", memory is really pinned, and torch's optimizers allocate their intermediates.
    """
    terms, moments = _Terms(job, trace, columns, device), _Moments(len(columns))
    parameters, gradients, optimizer = _resident(terms)
    _add_passes(terms, moments)
    _add_step(terms, moments, gradients)
    kept = {"host": _host(terms), "left": _left(terms), "holes": _holes(terms)}
    return Bill(parameters, gradients, optimizer, tuple(moments.names), **moments.tables(), **kept)


def trained_width(job: Job, trace: Trace) -> float:
    """Return the mean bytes per element of trained parameters and their gradients. peft makes 32-bit adapters in 16-bit
    models. Modules that it saves whole (the largest: embedding, head) keep their type (peft 0.21, cast_adapter_dtype)."""
    if job.lora is None or not job.lora.saved or job.trained_bytes == job.element_bytes or not trace.parameters:
        return job.trained_bytes
    saved = sum(sorted(trace.parameters)[-len(job.lora.saved) :]) / sum(trace.parameters)
    return saved * job.element_bytes + (1 - saved) * job.trained_bytes


def _resident(t: _Terms) -> tuple[Floats, Floats, Floats]:
    """Return (parameters, gradients, optimizer): device bytes that stay allocated all the time."""
    frozen = np.where(t.fsdp, t.frozen_shard, t.frozen_width) * t.trace.frozen
    second = np.where(t.columns.secondary > 1, 1 / t.columns.secondary, 0.0)
    shared = (1 / t.ranks + second) * (np.where(t.fsdp, t.shard * t.total, t.whole) + frozen)
    parameters = np.where(t.three, np.where(t.parameters_out, 0.0, shared), t.whole + frozen)
    # Stages 1 to 3 clone 32-bit master weights even of 32-bit parameters; stage 0 needs no such clone.
    master = np.where(t.zero0 & ~t.plain, 0.0 if t.width == 4 else 4.0, t.master)
    partitioned = np.where(t.out, t.stays, 1.0) * (master + t.states) * t.part
    partitioned = partitioned + np.where(t.out, 0.0, t.stepper.stray_share * t.whole)
    optimizer = np.where(t.zero0, (master + t.states) * t.total, partitioned)
    # Stage 3 keeps its partition's gradients in one buffer. Stages 1 and 2 stage one parameter's gradient on its way
    # to the host.
    staged = np.where(t.two & t.out, t.width * t.largest, 0.0)
    at_three = np.where(t.out, t.stays * t.master, np.where(t.fsdp, t.shard * t.accumulates, t.accumulated)) * t.part
    # torch's DistributedDataParallel copies gradients into its buckets (gradient_as_bucket_view is off by default).
    copied = np.where(t.zero0 & (t.plain | t.torch_alone) & (t.ranks > 1), t.whole, 0.0)
    gradients = np.select([t.three, t.bf16_optimizer], [at_three, t.accumulated * t.total], staged + copied)
    return parameters, gradients, optimizer


def _add_passes(t: _Terms, moments: _Moments) -> None:
    """Add the moments of forward and backward."""
    c = t.columns
    every = np.ones(len(c), dtype=bool)
    gathered = np.where(t.three, gathered_bytes(t.trace, c, t.frozen_width, t.ranks), 0.0)
    for choice, run in ((0.0, t.trace.plain), (1.0, t.trace.of(True))):
        mine = c.checkpointing == choice
        kept = np.where(c.fused_by_compiling & (choice == 0), COMPILED_KEPT, 1.0)
        for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
            for fixed, each, grads, used in _points(run, phase):
                (held, buckets), shards = _pending(t, grads), _shards(t, grads)
                whole = np.where(t.three, np.maximum(gathered, used), 0.0) * (t.ranks > 1)
                if phase == BACKWARD:
                    buckets = np.maximum(buckets, t.early)
                bypass = t.contiguous & t.one & ~t.bf16_optimizer
                held = held + bypassing(t.trace, c, t.made, grads / t.width * t.made, bypass)
                moments.add(
                    name,
                    mine,
                    np.maximum(t.kept_buckets, t.standing + buckets),
                    whole,
                    np.maximum(t.kept, held + shards),
                    kept * np.maximum(0.0, fixed + each * c.micro_batch) + _kept_inputs(t, run, each),
                    shards + t.fsdp * whole,
                )
    held, buckets = _pending(t, t.whole, done=True)
    flat = min(t.total, REDUCE_ELEMENTS) * (t.width + np.where(t.sent != t.width, t.sent, 0.0))
    flat = np.where(t.plain | t.torch_alone, 0.0, flat)
    held = np.where(t.zero0, t.whole + flat, held)
    # BF16_Optimizer reduces its flat tensor directly, in the dtype that is sent.
    held = np.where(t.bf16_optimizer & (t.sent != t.accumulated), held + t.sent * t.total, held)
    made = _shards(t, t.whole)
    moments.add("backward", every, t.standing + buckets, gathered, held + made, moments.zero, made + t.fsdp * gathered)


def _kept_inputs(t: _Terms, run: Pass, each: float) -> Floats:
    """Return the input bytes that DeepSpeed's own linear keeps for frozen layers at stage 3 (runtime/zero/linear.py,
    LinearFunctionForZeroStage3.forward). A sequence holds `each` bytes of activations at that point."""
    fixed, per_sequence = run.frozen_only
    share = min(1.0, max(0.0, each / run.after_forward[1])) if run.after_forward[1] > 0 else 1.0
    return np.where(t.three & (t.columns.own_linear > 0), share * (fixed + per_sequence * t.columns.micro_batch), 0.0)


def _add_step(t: _Terms, moments: _Moments, gradients: Floats) -> None:
    """Add the moments of the optimizer's step and of its initialisation; `gradients` are the resident ones."""
    every = np.ones(len(t.columns), dtype=bool)
    # Stage 0: gradients in 32 bits, and for FP16_Optimizer once more as one flat tensor.
    copied = 4.0 if t.width < 4 and not t.plain else 0.0
    of_all = t.whole + copied * (2 if t.stepper.flattens else 1) * t.total + t.temporary_bytes * t.at_once
    # A rank's part: as gathered, flat, and in the master's precision. Only the last remains during the step.
    flattened = np.where(t.compact, t.own, 2 * t.width) + np.where(t.own != t.master, t.master, 0.0)
    # Before that, its norm is computed in 64 bits, parameter by parameter (get_grad_norm_direct).
    norm = t.own * t.part + 8.0 * min(t.largest, t.part)
    of_part = t.across + np.maximum(norm, np.maximum(flattened, t.master + t.temporary_bytes) * t.part)
    of_sum = np.where(t.columns.immediate > 0, 0.0, t.whole) + t.temporary_bytes * t.part
    converted = t.accumulated + np.where(t.accumulated != t.master, t.master, 0.0)
    of_sub_group = np.maximum(converted, t.master + t.temporary_bytes) * t.sub_group
    of_sub_group = np.maximum(of_sub_group, 8.0 * t.largest / t.ranks)
    # Twin-Flow's second optimizer is torch's AdamW, not fused; its gradients are resident.
    of_split = np.where((t.stays > 0) & t.on_gpu, 4.0, 0.0) * t.sub_group
    shards = _shards(t, t.whole, stepping=True)
    one_by_one = t.stepper.one_by_one_bytes * np.where(t.zero0, t.largest, np.minimum(t.largest, t.part))
    copies = one_by_one + np.select(
        [t.zero0, t.bf16_optimizer, t.two & ~t.out, t.fsdp & ~t.out, t.three & ~t.out, t.three],
        [of_all, of_sum, of_part, shards + t.temporary_bytes * t.part, of_sub_group, of_split],
        0.0,
    )
    whole = np.where(t.three & (t.ranks > 1), t.frozen_width * persistent(t.trace, t.columns), 0.0)
    moments.add("step", every, t.kept_buckets, whole, np.maximum(copies, t.kept), moments.zero, shards + t.fsdp * whole)
    # Stage 3 begins with a gradient of the largest sub-group in the master's precision (initialize_optimizer_states).
    beyond = np.maximum(0.0, t.master * t.sub_group - gradients)
    moments.add("init", t.three & ~t.out, moments.zero, moments.zero, beyond, moments.zero, moments.zero)


def _left(t: _Terms) -> Floats:
    """Return the bytes of blocks that the step has freed and cannot reuse."""
    of_part = np.where(t.own != t.master, np.where(t.compact, t.own, 2 * t.width), 0.0) * t.part
    of_sub_group = np.where(t.accumulated != t.master, t.accumulated, 0.0) * t.sub_group
    left = np.select([t.two & ~t.bf16_optimizer & ~t.out, t.three & ~t.out], [of_part, of_sub_group], 0.0)
    return np.where(t.master > 0, left, 0.0)


def _holes(t: _Terms) -> Floats:
    """Return the unused bytes between frozen partitions at stage 3, each of which was cut out of the block of its whole
    parameter. Partitions of trainable parameters are moved together (stage3.py,
    _create_fp16_partitions_with_defragmentation)."""
    frozen = HOLES * t.frozen_width * t.trace.frozen / t.ranks
    return np.where(t.three & ~t.parameters_out & (t.ranks > 1) & ~t.plain & ~t.fsdp, frozen, 0.0)


def _host(t: _Terms) -> Floats:
    """Return the peak of host bytes of one rank if something is offloaded."""
    c = t.columns
    share = 1 - t.stays

    def pinned(size: Floats | float, by: Floats) -> Floats:
        blocks = np.where(by > 0, pinned_bytes(size), size) if t.on_gpu else size
        return np.asarray(blocks, dtype=np.float64)

    def of_optimizer(size: Floats | float) -> Floats:
        return pinned(size, c.pinned_optimizer)

    masters = t.master * t.part
    on_host = c.offload_optimizer < 2  # otherwise on NVMe
    states = np.where(on_host, t.states * t.part * share, 0.0)
    largest = t.width * t.largest
    accumulating = t.accumulates & (c.stage == 2) & ~t.compact & (t.master == 4)
    # Each parameter has a separate buffer.
    pins = (c.pinned_optimizer > 0) & t.on_gpu
    each = np.where(pins, _sum_of_blocks(t.trace.parameters, t.width), t.width * t.total) / t.ranks
    of_two = of_optimizer(masters) + of_optimizer(t.width * t.part) + of_optimizer(masters) + of_optimizer(largest)
    of_two = of_two + np.where(accumulating, each, 0.0)
    # Stage 3 pins the gradients of its sub-groups one by one, and its flat buffer. Its masters are not pinned.
    full = np.floor(t.part / t.sub_group)
    rest = np.maximum(0.0, t.part - full * t.sub_group)
    by_group = full * of_optimizer(t.master * t.sub_group) + of_optimizer(t.master * rest)
    of_three = (np.where(on_host, masters, 0.0) + by_group) * share + of_optimizer(t.accumulated * t.part)
    host = np.where(t.out, np.where(t.three, of_three, of_two) + states, 0.0)
    # While gradients are pinned, their unpinned original is still allocated, and the states are not yet.
    original = np.where(t.out & on_host & t.on_gpu, np.maximum(t.master, t.accumulated) * t.part, 0.0)
    host = host + np.maximum(0.0, original - states)
    # Parameters are pinned one by one, then moved into one flat buffer; the allocator keeps the first blocks.
    one_by_one = (c.pinned_param > 0) & t.on_gpu
    flat = pinned(t.width * t.part, c.pinned_param)
    left = np.where(one_by_one, _sum_of_blocks(t.trace.parameters, t.width / t.ranks), 0.0)
    # Frozen parameters stay in the blocks where they were pinned (stage3.py,
    # _create_fp16_partitions_with_defragmentation).
    shares = _sum_of_blocks(t.trace.every_frozen_size, t.width / t.ranks)
    frozen = np.where(one_by_one, shares, t.frozen_width * t.trace.frozen / t.ranks)
    return np.asarray(host + np.where(t.parameters_out, flat + left + frozen, 0.0), dtype=np.float64)


def _sum_of_blocks(sizes: list[int], width: float) -> float:
    """Return the bytes of one pinned block per parameter, at `width` bytes per element."""
    return float(pinned_bytes(width * np.array(sizes, dtype=np.float64)).sum())


def _points(run: Pass, phase: int) -> list[tuple[float, float, float, float]]:
    """Return (fixed, per sequence, gradients, parameters in use) in bytes of every entry of one phase."""
    rows = zip(run.fixed, run.per_sequence, run.gradients, run.in_use, run.phase, strict=True)
    return [(fixed, each, grads, used) for fixed, each, grads, used, at in rows if at == phase]


def _pending(t: _Terms, grads: float, done: bool = False) -> tuple[Floats, Floats]:
    """Return (gradients held, buckets) in bytes once backward has made `grads` bytes of gradients; `done` after the last.

    No bucket exists before the first gradient. A bucket that is copied flat is copied when it is full, or at the end.
    """
    c = t.columns
    nothing = np.zeros(len(c))
    if grads <= 0:
        return nothing, nothing
    stage, contiguous = c.stage, t.contiguous
    elements = grads / t.width
    waiting = np.minimum(elements, c.reduce_bucket)  # elements in the bucket until it is full
    first = t.bucket_width * waiting
    full = (elements >= c.reduce_bucket) | done
    own = t.own * min(elements, t.part)
    # With offload (then always contiguous), a gradient's norm is computed in 64 bits as soon as it exists.
    norm = np.where(t.out, 8.0 * min(t.largest, t.part, elements), 0.0) if t.width < 4 else nothing
    accumulated = np.where(t.accumulates & ~t.out & ~t.compact, t.width * t.part + t.across, 0.0)
    held = np.select(
        [t.zero0, t.bf16_optimizer, t.one & contiguous, t.one, (stage == 2) & contiguous, stage == 2],
        [
            nothing + grads,
            np.where(c.immediate > 0, min(grads, t.width * t.largest), grads),
            own + norm,
            t.made * elements,
            np.where(t.out & ~t.compact, 0.0, own) + accumulated + norm,
            first + (grads - first) / t.ranks + np.where(t.compact, own, accumulated),
        ],
        np.where(contiguous, 0.0, first),
    )
    # Gradients sent in another dtype are copied. A bucket whose parts are added to a flat buffer is cut into many
    # slices, and copied to be contiguous again.
    converted = np.where(t.sent != np.where(t.three, t.width, t.bucket_width), t.sent * waiting, 0.0)
    recut = np.where(t.compact, first, 0.0)
    scattered = (first + np.where(t.accumulated != t.sent, t.accumulated * waiting, 0.0)) / t.ranks
    flat = np.select(
        [t.zero0 | t.bf16_optimizer, (stage < 3) & contiguous, ~full, stage < 3],
        [nothing, t.ipg + np.where(full, converted + recut, 0.0), nothing, first + converted],
        first + converted + scattered,  # stage 3: the flat bucket, and the scattered result
    )
    return held, flat


def _shards(t: _Terms, grads: float, stepping: bool = False) -> Floats:
    """Return the bytes of gradients that FSDP has reduced when backward has made `grads`. A unit is reduced when it is
    complete."""
    waiting = 0.0 if stepping else t.columns.reduce_bucket
    done = np.maximum(0.0, grads / t.width - waiting)
    return np.where(t.fsdp & ~t.out & ~t.accumulates, t.shard * done / t.ranks, 0.0)


def bypassing(trace: Trace, c: Columns, width: float | Floats, grads: float | Floats, where: Any) -> Floats:
    """Return the gradient bytes of parameters larger than the bucket, if `where` is true. They are reduced in place; stage 1
    keeps them until the step."""
    sizes = np.sort(np.array(trace.parameters, dtype=np.float64))
    above = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0.0]])  # elements in parameters of at least each size
    over = above[np.searchsorted(sizes, c.reduce_bucket, side="right")]
    return np.where(where, np.minimum(grads, width * over), 0.0)
