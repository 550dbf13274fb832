"""Bytes of one rank, term by term, at each stage of ZeRO, and the keys that the terms do not cover."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.features import Columns, Flags, Floats, Places, selected
from autotune.predict.trace_data import FORWARD, Pass, Trace
from autotune.problem.candidate import GATHER_ON_SAVE, Candidate, put
from autotune.problem.ds_config import in_new_names, value_at
from autotune.problem.import_time_env import ALLOCATOR_VARIABLES
from autotune.problem.job import Job, weights_bytes
from autotune.problem.models import attention_heads, text_config
from autotune.util.units import MIB

# -- ZeRO --------------------------------------------------------------------------------------------------------------
#
# Bytes that DeepSpeed keeps and allocates around a model: one function per stage, each a column of the table in
# docs/predictor.md.
#
# Source: deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`,
# `fp16/unfused_optimizer.py` and `fused_optimizer.py`, `engine.py`), checked tensor by tensor against real engines:
# `benchmarks/predict/predictor.py` prints the errors. `versions.py` holds the differences of older versions.

# Share of the bytes of frozen partitions. Published figures of LoRA at stage 3 exceed the allocated bytes by 31 and
# 30 % of these (QwenLM/Qwen, 72B on 4 GPUs; modelscope/ms-swift, 7B on 2).
HOLES = 0.3
REDUCE_ELEMENTS = 5e8  # most elements of a flat copy in which stage 0 reduces (engine.py, allreduce_gradients)

Terms = dict[str, Floats]
WEIGHTS, GRADIENTS, MASTERS, STATES = "weights", "gradients", "master weights", "optimizer states"
BUCKET, GATHERED, COPIES, ACTIVATIONS = "reduce bucket", "gathered parameters", "copies", "activations"
HOLES_LEFT, HOST = "holes", "host"
SEGMENTS = "segments"
RESIDENT = (WEIGHTS, GRADIENTS, MASTERS, STATES)  # (n,) each: allocated all the time
# (moments, n) each; COPIES are the gradients of a pass, and the copies that a step makes
PASSING = (BUCKET, GATHERED, COPIES, ACTIVATIONS)
MOMENT, MOMENTS = "moment", ("forward", "backward", "step", "init")
# Share of a loss in its largest block: logits in 32 bits, with those in 16 and the softmax (10 bytes per entry in all).
LARGEST_OF_LOSS = 0.4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by term.

    A moment is a point of a step, or of the engine's initialisation, at which memory may peak.

    Args:
        terms: RESIDENT and PASSING; MOMENT, (moments, n): index of the name in MOMENTS; SEGMENTS, (moments, n): segments that
            only a step's flat tensors use; HOLES_LEFT and HOST, (n,): space between frozen partitions, main memory.
    """

    terms: Terms

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the name of each moment of the first candidate."""
        return tuple(MOMENTS[int(at)] for at in self.terms[MOMENT][:, 0])

    def resident(self) -> Floats:
        """Return (n,) bytes of the device that stay allocated."""
        return np.asarray(sum(self.terms[name] for name in RESIDENT))

    @property
    def host(self) -> Floats:
        """Return (n,) bytes of main memory."""
        return self.terms[HOST]

    def at(self, moments: Places) -> Terms:
        """Return the terms, (n,) each, of each candidate at one of the moments."""
        every = np.arange(len(moments))
        return {name: size[moments, every] if size.ndim > 1 else size for name, size in self.terms.items()}


@dataclass(frozen=True)
class Moments:
    """Points of a step at which memory may peak; (moments, 1) each. The last three are a pass's end, the step and the start."""

    names: tuple[str, ...]
    checkpointing: Floats  # 0 or 1 of a pass with or without it
    fixed: Floats  # bytes of activations
    each: Floats  # bytes of activations per sequence
    again_fixed: Floats  # both if all layers are checkpointed, at the largest moment of this part of the pass
    again_each: Floats
    made: Floats  # elements whose gradients exist
    inputs: Floats  # share of the inputs of frozen layers that exist

    @classmethod
    def of(cls, trace: Trace, width: float) -> Moments:
        """Return the moments of a trace whose gradients have `width` bytes per element."""
        names: list[str] = []
        rows: list[tuple[float, ...]] = []
        for choice in (False, True):
            run = trace.of(choice)
            columns = zip(run.phase, run.fixed, run.per_sequence, run.gradients, strict=True)
            for phase, fixed, each, gradients in sorted(columns, key=lambda row: row[0]):
                names.append("forward" if phase == FORWARD else "backward")
                again = (fixed, each)
                if not choice:
                    less = np.subtract(run.after_forward, trace.of(True).after_forward)
                    again = largest_moment(trace.of(True), phase, gradients > 0, tuple(again - less))
                rows.append((choice, fixed, each, *again, gradients / width, _share_of_inputs(run, each)))
        total = float(sum(trace.parameters))
        names += ["backward", "step", "init"]
        rows += [(np.nan, 0.0, 0.0, 0.0, 0.0, made, 0.0) for made in (total, total, 0.0)]
        return cls(tuple(names), *(column[:, None] for column in np.array(rows).T))

    def at(self, *names: str) -> Flags:
        """Select the moments of these names, (moments, 1)."""
        return np.array([name in names for name in self.names])[:, None]

    @property
    def ended(self) -> Flags:
        """Select the end of backward."""
        return np.asarray(np.arange(len(self.names))[:, None] == len(self.names) - 3)


def largest_moment(run: Pass, phase: int, begun: bool, other: tuple[float, float]) -> tuple[float, float]:
    """Return (fixed, per sequence) bytes of the largest moment of a part of a pass; `begun`: gradients exist.

    Args:
        other: of a pass in which that part is not among the largest moments.
    """
    rows = zip(run.phase, run.gradients, run.fixed, run.per_sequence, strict=True)
    sizes = [(fixed, each) for at, gradients, fixed, each in rows if at == phase and (gradients > 0) is begun]
    return max([*sizes, other], key=lambda size: size[1])


def _share_of_inputs(run: Pass, each: float) -> float:
    """Return the share of the inputs of frozen layers that exist while a sequence holds `each` bytes of activations."""
    left = run.after_forward[1]
    return min(1.0, max(0.0, each / left)) if left > 0 else 1.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a job's model on one rank that no knob changes. Counts are elements, widths are bytes per element."""

    ranks: float
    trained: float
    part: float  # a rank's part of them
    largest: float  # trained parameter
    frozen: float
    width: float  # of trained parameters and the gradients that backward makes
    frozen_width: float
    dequantized: float  # bytes of the largest 4-bit weight while it is dequantized
    plain: bool  # torch's own optimizer without masters
    torch_alone: bool
    on_gpu: bool
    frozen_shard: float  # width of FSDP's shards of frozen parameters
    optimizer: Stepper
    temporary: float  # bytes per element that the optimizer's step takes
    narrower: float  # width of states relative to those of the adapters alone, which `Columns.state_share` describes
    muon_share: float  # share of the elements that Muon steps
    trace: Trace

    @property
    def whole(self) -> float:
        """Return the bytes of all trained parameters."""
        return self.width * self.trained

    @property
    def norm(self) -> float:
        """Return the bytes of a gradient's norm in 64 bits, which is computed parameter by parameter (get_grad_norm_direct)."""
        return 8.0 * min(self.largest, self.part)

    def states(self, c: Columns, momentum: Floats | float = 4.0) -> Floats:
        """Return (n,) bytes per element of the optimizer's states. Muon's have the width `momentum`; its Adam steps the rest."""
        follows = self.optimizer.follows_weights & (self.plain | (c.stage > 0))
        share = np.where(follows, c.state_share * self.narrower, 1.0)
        adam = _ADAM_BYTES * c.state_share if self.muon_share else self.optimizer.state_bytes * share
        return np.asarray(self.muon_share * momentum + (1 - self.muon_share) * adam)

    @classmethod
    def of(cls, job: Job, trace: Trace, device: str) -> Sizes:
        """Return the sizes of a job. torch uses `foreach` on CUDA only."""
        total, width, optimizer = float(sum(trace.parameters)), trained_width(job, trace), optimizer_of_trials(job)
        (frozen, dequantized), matrices = frozen_width(job, trace), muon_sizes(job, trace)
        share = width / 4 if job.plain else 1.0
        return cls(
            ranks=float(job.ranks),
            trained=total,
            # A rank's part of an expert is one of ranks / ep_size (deepspeed 0.19.8, moe/layer.py: an expert-data-parallel
            # group).
            part=(total + job.profile.experts_elsewhere) / job.ranks,
            largest=float(trace.largest),
            frozen=float(trace.frozen),
            width=width,
            frozen_width=frozen,
            dequantized=dequantized,
            plain=job.plain,
            torch_alone=job.torch_alone,
            on_gpu=device == "cuda",
            # Base weights of adapters stay as they are loaded (accelerate 1.15, utils/fsdp_utils.py, fsdp2_prepare_model).
            frozen_shard=frozen if job.plain or job.lora else 4.0,
            optimizer=optimizer,
            temporary=optimizer.temporary_bytes * share * (device == "cuda"),
            narrower=width / job.trained_bytes,
            muon_share=sum(matrices) / max(total, 1.0),
            trace=trace,
        )


def keeps_gradients_contiguous(columns: Columns) -> Flags:
    """Return whether each candidate collects gradients in separate buckets, (n,). Offload at stages 1 and 2 always does."""
    below_3 = (columns.stage == 1) | (columns.stage == 2)
    return np.asarray((columns.contiguous > 0) | (below_3 & (columns.offload_optimizer > 0)))


def reduce_bucket_bytes(columns: Columns, element_bytes: Floats | float) -> Floats:
    """Return the bytes of each candidate's reduce buckets: two with overlap at stages 1 and 2; 0 without any, (n,).

    DeepSpeed allocates them whole, however small the model is.

    Args:
        element_bytes: bytes per element of the gradients in a bucket.
    """
    buckets = np.where((columns.stage < 3) & (columns.overlap > 0), 2.0, 1.0) * (columns.stage > 0)
    return np.asarray(keeps_gradients_contiguous(columns) * buckets * element_bytes * columns.reduce_bucket)


def accumulates(c: Columns) -> Flags:
    """Select the candidates whose gradients stay between micro-batches, (n,)."""
    return np.asarray((c.accumulation > 1) | (c.keeps_gradients > 0))


def estimate_memory(
    job: Job, trace: Trace, columns: Columns, device: str = "cpu", loss: Floats | float = 0.0
) -> MemoryEstimate:
    """Return device and host bytes of every candidate, without CUDA's context, the allocator and communication libraries.

    On "cuda", memory is really pinned, and torch's optimizers allocate their intermediates. `loss` are the bytes of a
    micro-batch's logits and loss.
    """
    sizes = Sizes.of(job, trace, device)
    at = Moments.of(trace, sizes.width)
    shape = (len(at.names), len(columns))
    terms: Terms = {name: np.zeros(shape) for name in PASSING}
    terms |= {name: np.zeros(len(columns)) for name in (*RESIDENT, HOLES_LEFT, HOST)}
    terms[SEGMENTS] = np.zeros((3, len(columns)))  # gradients as they are flattened and cast, and their norm
    sums_apart = (columns.stage == 1) & (columns.accumulated != sizes.width) & (columns.offload_optimizer == 0)
    sums_apart &= job.precision == "bf16"
    stages: list[tuple[Callable[..., Terms], Flags]] = [
        (_stage_0, columns.stage == 0),
        (_bf16_optimizer, sums_apart),
        (_stages_1_and_2, ((columns.stage == 1) | (columns.stage == 2)) & ~sums_apart),
        (_fsdp if job.torch_alone else _stage_3, columns.stage == 3),
    ]
    for function, mine in stages:
        if mine.any():
            for name, size in function(sizes, selected(columns, mine), at).items():
                terms[name][..., mine] = size
    terms[ACTIVATIONS] = _activations(job, trace, columns, at)
    # The allocator never merges free blocks of different segments, unless they are expandable: a step's flat tensors that are
    # larger than every free block of the loss take segments that the passes cannot use.
    apart = (terms[SEGMENTS] > LARGEST_OF_LOSS * loss) & (columns.expandable == 0)
    terms[SEGMENTS] = np.where(apart, terms[SEGMENTS], 0.0).sum(axis=0) * at.at("forward", "backward")
    other = (at.checkpointing != (columns.checkpointing == 1)) & ~np.isnan(at.checkpointing)
    for name in PASSING:
        terms[name][other] = 0.0
    terms[MOMENT] = np.tile([[float(MOMENTS.index(name))] for name in at.names], len(columns))
    return MemoryEstimate(terms)


# -- stages ------------------------------------------------------------------------------------------------------------
#
# `s` are the job's sizes, `c` the knobs of the stage's candidates, and `at` the moments. Terms that are missing are zero.


def _stage_0(s: Sizes, c: Columns, at: Moments) -> Terms:
    copy = min(s.trained, REDUCE_ELEMENTS) * (s.width + np.where(c.communicated != s.width, c.communicated, 0.0))
    # Gradients in 32 bits, and for FP16_Optimizer once more as one flat tensor.
    copied = 4.0 * (s.width < 4 and not s.plain) * (1 + s.optimizer.flattens) * s.trained
    step = copied + s.temporary * s.trained
    # torch's DistributedDataParallel copies gradients into its buckets (gradient_as_bucket_view is off by default).
    copies_all = (s.plain or s.torch_alone) and s.ranks > 1
    return {
        WEIGHTS: s.whole + s.frozen_width * s.frozen,
        GRADIENTS: s.whole * copies_all,
        # 32-bit parameters are their own masters.
        MASTERS: s.trained * (c.master if s.plain else 4.0 * (s.width < 4)),
        STATES: s.trained * s.states(c),
        GATHERED: s.dequantized * at.at("forward", "backward"),
        COPIES: np.maximum(accumulates(c) * s.whole * ~at.at("init"), s.width * at.made)
        + at.ended * copy * (not s.plain and not s.torch_alone)
        + at.at("step") * step,
    }


def _bf16_optimizer(s: Sizes, c: Columns, at: Moments) -> Terms:
    """Return the terms of stage 1 in bf16 with gradients summed in 32 bits (DeepSpeed's BF16_Optimizer)."""
    step = s.whole + s.temporary * s.part
    # The flat tensor is reduced directly, in the dtype that is sent.
    sent = np.where(c.communicated != c.accumulated, c.communicated * s.trained, 0.0)
    return {
        WEIGHTS: s.whole + s.frozen_width * s.frozen + 0 * c.stage,
        GRADIENTS: c.accumulated * s.trained,
        MASTERS: c.master * s.part,
        STATES: s.states(c) * s.part + s.optimizer.stray_share * s.whole,
        GATHERED: s.dequantized * at.at("forward", "backward"),
        COPIES: np.where(
            at.at("step"),
            step,
            np.maximum(accumulates(c) * s.whole * ~at.ended * ~at.at("init"), at.made * s.width + at.ended * sent),
        ),
    }


def _stages_1_and_2(s: Sizes, c: Columns, at: Moments) -> Terms:
    one, out, contiguous, adds = c.stage == 1, c.offload_optimizer > 0, keeps_gradients_contiguous(c), accumulates(c)
    # Gradients that are summed in another precision than backward makes are added up in one flat buffer of a rank's part.
    flat_sum = c.accumulated != s.width
    made = np.where(one, c.accumulated, s.width)  # bytes per element of .grad
    own = c.accumulated  # bytes per element of a rank's own part
    bucket = reduce_bucket_bytes(c, made)
    kept = adds * np.where(one, made * s.trained, (~out | flat_sum) * own * s.part)

    began, full = at.made > 0, (at.made >= c.reduce_bucket) | at.ended
    first = made * np.minimum(at.made, c.reduce_bucket)  # bytes that wait until the bucket is full
    # Gradients sent in another dtype are copied. A bucket whose parts are added to a flat buffer is cut into many
    # slices, and copied to be contiguous again.
    sent = np.where(c.communicated != made, c.communicated * np.minimum(at.made, c.reduce_bucket), 0.0)
    flat = np.where(contiguous, bucket + full * (sent + flat_sum * first), full * (first + sent))
    # Stage 1 keeps its buckets until the last micro-batch has ended.
    early = bucket * np.where(at.at("backward") & ~at.ended, c.early_buckets, 0.0)
    in_pass = np.maximum(flat * began, np.maximum(early, adds * one * bucket * ~at.ended))

    mine = own * np.minimum(at.made, s.part)
    # With offload, a gradient's norm is computed in 64 bits as soon as it exists.
    norm = out * (s.width < 4) * np.minimum(8.0 * at.made, s.norm)
    summed = adds * ~out * ~flat_sum * s.width * s.part
    two = np.where(contiguous, mine * (~out | flat_sum) + summed + norm, 0.0)
    two = np.where(contiguous, two, first + (s.width * at.made - first) / s.ranks + np.where(flat_sum, mine, summed))
    # Parameters larger than the bucket are reduced in place, and stay until the step.
    large = bypassing(s.trace, c, made, at.made * made, contiguous) * ~at.ended
    gradients = np.where(one, np.where(contiguous, mine + norm + large, made * at.made), two) * began

    # The step: a rank's part as gathered, flat, and in the master's precision. Only the last remains.
    cast, stepping = np.where(own != c.master, c.master, 0.0), ~out & (c.master > 0)
    flattened = np.where(flat_sum, own, 2 * s.width) + cast
    step = np.maximum(flattened, c.master + s.temporary) * s.part
    step = ~out * np.maximum(own * s.part + s.norm, step)
    return {
        WEIGHTS: s.whole + s.frozen_width * s.frozen,
        GRADIENTS: out * s.width * s.largest,  # staged on their way to the host
        MASTERS: ~out * c.master * s.part,
        STATES: ~out * (s.states(c, 2 * made) * s.part + s.optimizer.stray_share * s.whole),
        BUCKET: np.where(at.at("step"), adds * one * bucket, in_pass) * ~at.at("init"),
        GATHERED: s.dequantized * at.at("forward", "backward"),
        COPIES: np.maximum(np.where(at.at("step"), step, gradients), kept * ~at.ended) * ~at.at("init"),
        SEGMENTS: stepping * np.stack([own * s.part, cast * s.part, s.norm + 0 * cast]),
        HOST: out * _host_of_two(s, c, adds & (c.stage == 2) & ~flat_sum & (c.master == 4)),
    }


def _stage_3(s: Sizes, c: Columns, at: Moments) -> Terms:
    out = c.offload_optimizer > 0
    several = s.ranks > 1  # a single rank's partition is the whole parameter, so it copies nothing
    gradients = ~out * c.accumulated * s.part
    standing = reduce_bucket_bytes(c, c.communicated)
    waiting = np.minimum(at.made, c.reduce_bucket)
    first, full = c.communicated * waiting, (at.made >= c.reduce_bucket) | at.ended
    sent = np.where(c.communicated != s.width, c.communicated * waiting, 0.0)
    scattered = (first + np.where(c.accumulated != c.communicated, c.accumulated * waiting, 0.0)) / s.ranks
    flat = full * (first + sent + scattered)
    group = sub_groups(c, s)
    cast, stepping = np.where(c.accumulated != c.master, c.master, 0.0), ~out & (c.master > 0)
    step = np.maximum(np.maximum(c.accumulated + cast, c.master + s.temporary) * group, 8.0 * s.largest / s.ranks)
    step = ~out * step
    # The engine begins with a gradient of the largest sub-group in the master's precision (initialize_optimizer_states).
    beyond = ~out * np.maximum(0.0, c.master * group - gradients)
    passes = at.at("forward", "backward")
    turn = gathered_bytes(s.trace, c, s.frozen_width)
    always = s.frozen_width * persistent(s.trace, c)
    weights = (s.whole + s.frozen_width * s.frozen) / s.ranks
    # Each partition was cut out of the block of its whole parameter. Partitions of trainable parameters are moved
    # together (stage3.py, _create_fp16_partitions_with_defragmentation).
    holes = HOLES * s.frozen_width * s.frozen / s.ranks * (several and not s.plain)
    return {
        WEIGHTS: np.where(c.offload_param > 0, 0.0, weights),
        GRADIENTS: gradients,
        MASTERS: ~out * c.master * s.part,
        STATES: ~out * (s.states(c, c.communicated) * s.part + s.optimizer.stray_share * s.whole),
        BUCKET: (standing + flat * passes) * ~at.at("init"),
        GATHERED: several * np.where(at.at("step"), always, passes * turn),
        COPIES: np.select([passes, at.at("step")], [np.where(keeps_gradients_contiguous(c), 0.0, first), step], beyond),
        HOLES_LEFT: np.where(c.offload_param > 0, 0.0, holes),
        SEGMENTS: stepping * np.stack([c.accumulated * group, cast * group, s.norm + 0 * cast]),
        HOST: _host_of_three(s, c, group),
    }


def _fsdp(s: Sizes, c: Columns, at: Moments) -> Terms:
    """Return the terms of FullyShardedDataParallel, which stage 3 means without DeepSpeed.

    Its shards are its masters: in 32 bits, unless all is in the weights' own type (torch 2.13, distributed/fsdp,
    _flat_param.py, _use_low_precision_shard). Gathered parameters have the type of the arithmetic. A unit of gradients is
    reduced when it is complete.
    """
    shard, out = s.width if s.plain else max(s.width, 4.0), c.offload_optimizer > 0
    none = dataclasses.replace(c, master=0 * c.master)
    terms = _stage_3(s, none, at)
    waiting = np.where(at.at("step"), 0.0, c.reduce_bucket)
    reduced = shard * np.maximum(0.0, at.made - waiting) / s.ranks * ~out * ~accumulates(c)
    copies = np.where(at.at("step"), s.temporary * s.part * ~out, terms[COPIES]) + reduced
    weights = (shard * s.trained + s.frozen_shard * s.frozen) / s.ranks
    return terms | {
        WEIGHTS: np.where(c.offload_param > 0, 0.0, weights),
        GRADIENTS: ~out * accumulates(c) * shard * s.part,
        COPIES: copies * ~at.at("init"),
        HOLES_LEFT: 0 * c.stage,
    }


def sub_groups(c: Columns, s: Sizes) -> Floats:
    """Return (n,) elements of a sub-group of stage 3. No parameter is cut."""
    return np.minimum(s.part, np.maximum(c.sub_group, s.largest / s.ranks))


def _activations(job: Job, trace: Trace, c: Columns, at: Moments) -> Floats:
    """Return (moments, n) bytes of the tensors of the model's own forward and backward."""
    # Bytes of a share of the layers lie on a straight line between all and none.
    kept, again = at.fixed + at.each * c.rows, at.again_fixed + at.again_each * c.rows
    run = np.maximum(0.0, kept + c.checkpointing * (again - kept))
    passes = at.at("forward", "backward") & ~at.ended
    # DeepSpeed's own linear of stage 3 keeps the inputs of frozen layers (runtime/zero/linear.py,
    # LinearFunctionForZeroStage3.forward).
    (fixed, each), (again_fixed, again_each) = trace.plain.frozen_only, trace.of(True).frozen_only
    inputs = fixed + each * c.rows
    inputs = inputs + c.checkpointing * (again_fixed + again_each * c.rows - inputs)
    inputs = at.inputs * np.where((c.stage == 3) & (c.own_linear > 0), inputs, 0.0)
    return np.asarray((run + inputs + _exchanged(job, c)) * passes)


def _exchanged(job: Job, c: Columns) -> Floats:
    """Return (n,) bytes by which Ulysses adds to the activations, all of them in the model's precision.

    The layer that runs holds the blocks that it has exchanged besides its own (ulysses_sp.py, `_combine_local_sequences`).
    Each layer whose activations are kept also keeps the copies of repeated keys and values.
    """
    ranks = job.sequence_ranks
    heads = attention_heads(job.model.config) if ranks > 1 else None
    if heads is None:
        return np.zeros(len(c))
    kept = heads.repeated(ranks) * np.maximum(1, (1 - c.checkpointing) * heads.layers)
    return np.asarray(job.element_bytes * job.seq_len * (heads.exchanged(ranks) + kept) * c.rows)


# -- main memory -------------------------------------------------------------------------------------------------------


def _pinned(s: Sizes, size: Floats | float, pins: Floats) -> Floats:
    """Return the bytes of main memory that a tensor takes. Pinning does nothing on CPU ranks (cpu_accelerator.py)."""
    return np.where((pins > 0) & s.on_gpu, pinned_bytes(size), size)


def _while_pinned(s: Sizes, c: Columns, states: Floats) -> Floats:
    """Return what is added while gradients are pinned: their original is still allocated, and the states are not yet."""
    original = np.where((c.offload_optimizer == 1) & s.on_gpu, np.maximum(c.master, c.accumulated) * s.part, 0.0)
    return np.maximum(0.0, original - states)


def _host_of_two(s: Sizes, c: Columns, sums: Flags) -> Floats:
    """Return (n,) bytes of an optimizer offloaded at stage 1 or 2; `sums`: each parameter has a separate 16-bit buffer."""
    on_host, pins = c.offload_optimizer < 2, c.pinned_optimizer
    states = np.where(on_host, s.states(c) * s.part, 0.0)
    each = np.where((pins > 0) & s.on_gpu, _sum_of_blocks(s.trace.parameters, s.width), s.whole) / s.ranks
    # masters and their gradients, the 16-bit copy, and one parameter's staging
    flat = 2 * _pinned(s, c.master * s.part, pins) + _pinned(s, s.width * s.part, pins)
    flat = flat + _pinned(s, s.width * s.largest, pins)
    return np.asarray(flat + sums * each + states + _while_pinned(s, c, states))


def _host_of_three(s: Sizes, c: Columns, group: Floats) -> Floats:
    """Return (n,) bytes of what stage 3 offloads, the optimizer's states in sub-groups of `group` elements.

    The gradients of the sub-groups are pinned one by one, and the flat buffer. Masters are not pinned.
    """
    on_host, pins = c.offload_optimizer < 2, c.pinned_optimizer
    states = np.where(on_host, s.states(c, c.communicated) * s.part, 0.0)
    full = np.floor(s.part / group)
    rest = np.maximum(0.0, s.part - full * group)
    gradients = full * _pinned(s, c.master * group, pins) + _pinned(s, c.master * rest, pins)
    held = np.where(on_host, c.master * s.part, 0.0) + gradients + _pinned(s, c.accumulated * s.part, pins)
    held = (c.offload_optimizer > 0) * (held + states + _while_pinned(s, c, states))
    # Parameters are pinned one by one, then moved into one flat buffer; the allocator keeps the first blocks. Frozen
    # parameters stay in them (stage3.py, _create_fp16_partitions_with_defragmentation).
    pinned, width = (c.pinned_param > 0) & s.on_gpu, s.width / s.ranks
    flat = _pinned(s, s.width * s.part, c.pinned_param) + pinned * _sum_of_blocks(s.trace.parameters, width)
    frozen = np.where(pinned, _sum_of_blocks(s.trace.every_frozen_size, width), s.frozen_width * s.frozen / s.ranks)
    return np.asarray(held + np.where(c.offload_param > 0, flat + frozen, 0.0))


def _sum_of_blocks(sizes: list[int], width: float) -> float:
    """Return the bytes of one pinned block per parameter, at `width` bytes per element."""
    return float(pinned_bytes(width * np.array(sizes, dtype=np.float64)).sum())


# -- widths ------------------------------------------------------------------------------------------------------------


def trained_width(job: Job, trace: Trace) -> float:
    """Return the mean bytes per element of trained parameters and their gradients. peft makes 32-bit adapters in 16-bit models.

    Modules that it saves whole (the largest: embedding, head) keep their type (peft 0.21, cast_adapter_dtype).
    """
    if job.lora is None or not job.lora.saved or job.trained_bytes == job.element_bytes or not trace.parameters:
        return job.trained_bytes
    saved = sum(sorted(trace.parameters)[-len(job.lora.saved) :]) / sum(trace.parameters)
    return saved * job.element_bytes + (1 - saved) * job.trained_bytes


# Bytes of an element of bitsandbytes' nf4 with double quantization (0.50, functional.py, quantize_4bit): 4 bits, an 8-bit
# constant for 64 elements, and a 32-bit constant for 256 of those. QLoRA (arXiv 2305.14314, section 3) counts the same.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def quantized_sizes(job: Job, trace: Trace) -> list[int]:
    """Return the elements of each weight that is kept in 4 bits: linear layers without the head.

    Embeddings and the head have `vocab_size x hidden_size` elements. Norms and biases are smaller than any matrix.
    """
    return _inner_matrices(job, trace.frozen_sizes) if job.lora is not None and job.lora.quantize else []


def muon_sizes(job: Job, trace: Trace) -> list[int]:
    """Return the elements of each parameter that Muon steps; its Adam steps the others, such as embeddings and vectors."""
    if job.optimizer_kind != "muon":
        return []
    if trace.matrices is not None:
        return trace.matrices
    return trace.parameters if job.lora else _inner_matrices(job, trace.parameters)


def _inner_matrices(job: Job, sizes: list[int]) -> list[int]:
    """Select the sizes of matrices between embedding and head."""
    text = text_config(job.model.config)
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 1)
    ends = int(text.get("vocab_size", 0)) * hidden
    return [size for size in sizes if size > 16 * hidden and size != ends]


def frozen_width(job: Job, trace: Trace) -> tuple[float, float]:
    """Return the mean bytes per element of frozen parameters, and the bytes of the largest weight while it is dequantized."""
    width, sizes = job.element_bytes, quantized_sizes(job, trace)
    share = sum(sizes) / max(trace.frozen, 1)
    return share * NF4_BYTES + (1 - share) * width, width * max(sizes, default=0)


def bypassing(trace: Trace, c: Columns, width: float | Floats, grads: float | Floats, where: Any) -> Floats:
    """Return the gradient bytes of parameters larger than the bucket, if `where` is true.

    They are reduced in place; stage 1 keeps them until the step.
    """
    sizes = np.sort(np.array(trace.parameters, dtype=np.float64))
    above = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0.0]])  # elements in parameters of at least each size
    over = above[np.searchsorted(sizes, c.reduce_bucket, side="right")]
    return np.where(where, np.minimum(grads, width * over), 0.0)


# -- gathered parameters -----------------------------------------------------------------------------------------------
#
# Whole parameters at ZeRO-3: those gathered at once, those always held, and those of a save.
#
# Source: deepspeed 0.19.8, `runtime/zero/partitioned_param_coordinator.py` and `stage3.py`.


def gathered_bytes(trace: Trace, c: Columns, width: float) -> Floats:
    """Return the bytes of parameters that stage 3 holds whole at the turn from forward to backward, frozen ones included.

    Stage 3 keeps parameters that are used again within `max_reuse_distance` elements. `max_live_parameters` does not release
    them (0 and 1e9 take the same with tiny-llama on CPU ranks). One prefetch runs ahead. The smallest parameters are never
    released.
    """
    sizes = trace.every_size
    kept = kept_at_turn(c) + c.prefetch
    # The head, usually the largest parameter, is used again at once.
    at_least = np.where(c.max_reuse > 0, np.maximum(kept, max(sizes) + c.prefetch), kept)
    return width * np.minimum(float(sum(sizes)), at_least + persistent(trace, c))


def kept_at_turn(c: Columns) -> Floats:
    """Return the most elements that stage 3 still holds when backward begins, so that it need not gather them again.

    They are used again within `max_reuse_distance`, half of which lies on either side of the turn.
    """
    return c.max_reuse / 2


def persistent(trace: Trace, c: Columns) -> Floats:
    """Return the elements of parameters that stage 3 always holds whole.

    Such parameters have at most `stage3_param_persistence_threshold` elements.
    """
    sizes = np.sort(np.array(trace.every_size, dtype=np.float64))
    upwards = np.concatenate([[0.0], np.cumsum(sizes)])
    return np.asarray(upwards[np.searchsorted(sizes, c.persistence, side="right")])


def saved_bytes(job: Job, trace: Trace, c: Columns) -> Floats:
    """Return (n,) bytes of main memory that a save of the weights takes on the first rank's machine, in addition to offload.

    Stage 3 gathers all weights there before it writes, frozen ones too (engine.py, `_zero3_consolidated_16bit_state_dict`).
    The user's own config can turn gathering off.
    """
    gathers = value_at(in_new_names(job.base_config), ("zero_optimization", GATHER_ON_SAVE)) is not False
    whole = weights_bytes(sum(trace.parameters) + trace.frozen, job.element_bytes)
    return np.where((c.stage == 3) & gathers, whole, 0.0)


# -- pinned memory -----------------------------------------------------------------------------------------------------
#
# Main memory that pinning takes. torch's allocator of pinned memory rounds blocks up to powers of two and never returns
# them.


def pinned_bytes(size: Any) -> Floats:
    """Return the bytes of host memory that `tensor.pin_memory()` takes for tensors of `size` bytes.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (`PowerOf2Ceil`), which rounds every block up to
    `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF; by default that is every block. DeepSpeed pins through torch,
    unless DS_PIN_MEMORY_BACKEND=native locks pages without rounding (deepspeed 0.19.8, accelerator/abstract_accelerator.py
    and utils/pin_memory.py).
    """
    exact = np.asarray(size, dtype=np.float64)
    if os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native":
        return exact
    rounded = np.exp2(np.ceil(np.log2(np.maximum(exact, 1.0))))
    return np.where((exact > 0) & (exact <= _threshold_bytes()), rounded, exact)


def _threshold_bytes() -> float:
    """Return the size above which blocks are not rounded."""
    config = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    limits = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb\s*:\s*(\d+)", config)
    return min((float(limit) * MIB for limit in limits), default=float("inf"))


# -- optimizers --------------------------------------------------------------------------------------------------------
#
# Bytes that an optimizer keeps per parameter and needs for its step, by the type that DeepSpeed makes from a config.

# Bytes of 32-bit states per parameter, without the master weights.
STATE_BYTES = {"adamw": 8, "adam": 8, "fused_adam": 8, "lion": 4, "sgd": 4, "adagrad": 4, "muon": 4, "rmsprop": 4}
STATE_BYTES |= {"onebitadam": 12, "zerooneadam": 12, "onebitlamb": 12, "fusedlamb": 8, "lamb": 8}
_ADAM_BYTES = STATE_BYTES["adamw"]
# States whose width does not follow the weights'. 8-bit states have a 32-bit scale for 256 elements (bitsandbytes
# 0.4x, functional.quantize_blockwise). Paged states use CUDA's managed memory, which moves to the host when the
# device is full, and torch does not count it. Adafactor keeps a row and a column of a matrix (Shazeer & Stern 2018).
_IN_8_BITS = 1 + 4 / 256
OTHER_STATES = {"adamw8bit": 2 * _IN_8_BITS, "adam8bit": 2 * _IN_8_BITS, "lion8bit": _IN_8_BITS, "adafactor": 0.0}
OTHER_STATES |= {"pagedadamw8bit": 0.0, "pagedadamw": 0.0, "pagedadamw32bit": 0.0, "pagedlion": 0.0}
# Bytes of intermediates per parameter of torch's `foreach` implementations, the default on CUDA (torch 2.13,
# torch/optim/adam.py, _multi_tensor_adam: the square root; adagrad.py, _multi_tensor_adagrad: root and numerator;
# sgd.py, _multi_tensor_sgd: none, except for the sum with decayed weights).
_FOREACH_BYTES = {"adamw": 4, "adam": 4, "adagrad": 8}
_FOREACH_DECAYED_SGD_BYTES = 4


@dataclass(frozen=True)
class Stepper:
    """Bytes of an optimizer per parameter. `flattens`: DeepSpeed wraps it into FP16_Optimizer at stage 0 in 16 bits."""

    state_bytes: float
    temporary_bytes: float  # on CUDA, during the step
    flattens: bool
    # Adagrad's constructor makes states for the model's own parameters. DeepSpeed then makes another Adagrad for its
    # partitions (stage_1_and_2.py and stage3.py, initialize_optimizer_states), and the engine keeps the first.
    stray_share: float = 0.0
    known: bool = True  # False: an unknown type, whose states are assumed to be Adam's
    follows_weights: bool = True  # with plain 16-bit torch the states are 16 bits, too


def optimizer_of_trials(job: Job) -> Stepper:
    """Return the optimizer of the job's trials without offload.

    Source: deepspeed 0.19.8, runtime/engine.py, _configure_basic_optimizer and _configure_fp16_optimizer. A script's profile
    describes the script's own optimizer. If the profile lacks it, the optimizer is assumed to have no intermediates, like
    Trainer's default (`adamw_torch_fused`). Plain torch uses `foreach` unless the config sets `fused`.
    """
    kind = job.optimizer_kind
    other = kind.replace("_", "").replace("-", "")
    if other in OTHER_STATES:
        return Stepper(OTHER_STATES[other], 0.0, False, follows_weights=False)
    named = "type" in job.own_optimizer
    own = job.own_optimizer.get("params")
    own = own if isinstance(own, dict) else {}
    is_adam = kind in ("adam", "adamw")
    flattens = not job.plain and (kind == "fused_adam" or (named and is_adam and not own.get("torch_adam")))
    temporary = 0.0
    if kind == "sgd":
        temporary = _FOREACH_DECAYED_SGD_BYTES if own.get("weight_decay") else 0.0
    elif kind == "adagrad" or (is_adam and (named or job.plain) and not flattens and not own.get("fused")):
        temporary = _FOREACH_BYTES[kind]
    temporary, flattens = _of_script(job) or (temporary, flattens)
    states, stray = float(STATE_BYTES.get(kind, _ADAM_BYTES)), float(kind == "adagrad")
    return Stepper(states, float(temporary), flattens, stray, kind in STATE_BYTES)


def _of_script(job: Job) -> tuple[float, bool] | None:
    """Return (bytes of intermediates, `flattens`) of the script's own optimizer, which steps regardless of the config.

    None if the profile has no optimizer. torch uses `foreach` on CUDA if a script sets neither option (torch 2.13,
    torch/optim/adam.py, `adam`).
    """
    if found := job.profile.torch_optimizer:
        alone = found["fused"] or found["foreach"] is False
        return 0.0 if alone else float(_FOREACH_BYTES.get(str(found["class"]).lower(), 0)), False
    # DeepSpeed's or apex's, which `_configure_fp16_optimizer` recognizes by its class
    if job.profile.optimizer:
        return 0.0, job.profile.optimizer == "FusedAdam" and not job.plain
    return None


# -- unmodelled keys ---------------------------------------------------------------------------------------------------
#
# Predictions are less certain if such a key is set, and report it.

# Keys of `zero_optimization` that the formulas read, or that hardly change memory (deepspeed 0.19.8,
# runtime/zero/config.py; `parameter_alignment` is 16 bytes per parameter). Any other key, also of a newer DeepSpeed,
# counts as unread.
_MODELLED_KEYS = set(
    (
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint offload_param offload_optimizer sub_group_size stage3_prefetch_bucket_size "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters parameter_alignment "
        "memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks"
    ).split()
)
_MODELLED_OFFLOAD_KEYS = {"device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"}
_MODELLED_OFFLOAD_KEYS |= {"pipeline", "pipeline_read", "pipeline_write"}
# Other sections that change what is kept of a model, an activation or a state.
_SECTIONS = (
    "torch_autocast",
    "tensor_parallel",
    "pipeline",
    "expert_parallel",
    "hybrid_engine",
    "compile.deepcompile",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.partition_activations",
    "fp8",
    "bf16.immediate_grad_update",
)


def unread_keys(config: dict[str, Any]) -> list[str]:
    """Return the dotted names of the keys that a config sets and that no formula reads."""
    found = []
    for section in ("", ".offload_optimizer", ".offload_param"):
        path = f"zero_optimization{section}"
        read = _MODELLED_OFFLOAD_KEYS if section else _MODELLED_KEYS
        entry = value_at(config, path.split("."))
        if isinstance(entry, dict):
            found += [f"{path}.{key}" for key, value in entry.items() if key not in read and _is_set(value)]
    return found + [name for name in _SECTIONS if _is_set(value_at(config, name.split(".")))]


def unread_knobs(candidate: Candidate) -> list[str]:
    """Return the unread keys that a candidate sets by dotted names."""
    config: dict[str, Any] = {}
    for name, value in candidate.knobs:
        if "." in name:
            put(config, name, value)
    return unread_keys(config)


def _is_set(value: Any) -> bool:
    """Check that a value turns something on: a section through `enabled`, a number if it is positive and not 1."""
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) is True
    if isinstance(value, bool) or value is None:
        return bool(value)
    return value > 0 and value != 1 if isinstance(value, int | float) else value != "auto"
