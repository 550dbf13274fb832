"""ZeRO memory accounting, and the keys that it does not model."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.features import Columns, Flags, Floats, value_at
from autotune.predict.trace_data import BACKWARD, FORWARD, Pass, Trace
from autotune.problem.candidate import GATHER_ON_SAVE, Candidate
from autotune.problem.ds_config import in_new_names
from autotune.problem.import_time_env import ALLOCATOR_VARIABLES
from autotune.problem.job import Job, weights_bytes
from autotune.problem.models import attention_heads
from autotune.script.profile import TORCHS
from autotune.util.units import MIB

# -- ZeRO --------------------------------------------------------------------------------------------------------------
#
# Bytes that DeepSpeed keeps and allocates around a model, at each stage of ZeRO.
#
# Source: deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`,
# `fp16/unfused_optimizer.py` and `fused_optimizer.py`, `engine.py`), checked tensor by tensor against real engines:
# `benchmarks/predict/predictor.py` prints the errors. `versions.py` holds the differences of older versions.

# Share of the bytes of frozen partitions. Published figures of LoRA at stage 3 exceed the allocated bytes by 31 and
# 30 % of these (QwenLM/Qwen, 72B on 4 GPUs; modelscope/ms-swift, 7B on 2).
HOLES = 0.3
# Share of the activations that a compiled model without checkpointing keeps. Outputs of pointwise operators (the
# 32-bit copies of norms, gates, rotations) are recomputed from the operands of products (torch,
# _functorch/partitioners.py, min_cut_rematerialization_partition). A Llama layer keeps 27 to 32 of 42 hidden sizes;
# its loss keeps all. Liger's kernels never keep more.
COMPILED_KEPT = 0.75
REDUCE_ELEMENTS = 5e8  # most elements of a flat copy in which stage 0 reduces (engine.py, allreduce_gradients)

# fields of a MemoryEstimate with one entry per candidate
SUMS = ("parameters", "gradients", "optimizer", "host", "left", "holes", "flat", "cast", "norm")
# fields of a MemoryEstimate of (moments, candidates)
TABLES = ("buckets", "gathered", "temporaries", "activations", "sent")


@dataclass(frozen=True)
class MemoryEstimate:
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
    # Blocks that the optimizer's step takes at once: gradients as one flat tensor, in the master's precision, and in 64 bits
    # for their norm. They need new segments unless backward has left a free block of their size.
    flat: Floats
    cast: Floats
    norm: Floats
    holes: Floats  # between partitions of frozen parameters, left by the whole parameters while the model was made

    def peaks(self) -> Floats:
        """Return (moments, candidates): bytes of live tensors on the device."""
        resident = self.parameters + self.gradients + self.optimizer
        return resident + self.buckets + self.gathered + self.temporaries + self.activations


class _Moments:
    """Rows of a MemoryEstimate's tables, one per moment."""

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


def keeps_gradients_contiguous(columns: Columns) -> Flags:
    """Return whether each candidate collects gradients in buckets of their own, (n,). Offload at stages 1 and 2 always does."""
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


class _Terms:
    """Sizes, flags and buffers that several lines of the estimate need; arrays hold one entry per candidate."""

    def __init__(self, job: Job, trace: Trace, columns: Columns, device: str) -> None:
        self.trace, self.columns, self.ranks = trace, columns, float(job.ranks)
        self.width, (self.frozen_width, self.dequantized) = trained_width(job, trace), frozen_width(job, trace)
        self.plain, self.torch_alone = job.plain, job.torch_alone
        self.stepper = optimizer_of_trials(job)
        # torch uses foreach on CUDA only. Pinning does nothing on CPU ranks (accelerator/cpu_accelerator.py).
        self.on_gpu = device == "cuda"
        share = 1.0 if not job.plain else self.width / 4
        narrower = self.width / job.trained_bytes  # `state_share` describes the adapters alone
        self.temporary_bytes = self.stepper.temporary_bytes * share if self.on_gpu else 0.0
        follows = self.stepper.follows_weights & (self.plain | (columns.stage > 0))
        self.states = self.stepper.state_bytes * np.where(follows, columns.state_share * narrower, 1.0)
        self.accumulated, self.sent = columns.accumulated, columns.communicated
        self.total = float(sum(trace.parameters))  # elements, like the next two
        # A rank's part of an expert is one of ranks / ep_size (deepspeed 0.19.8, moe/layer.py: an expert-data-parallel group).
        self.part, self.largest = (self.total + job.experts_elsewhere) / self.ranks, float(trace.largest)
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
        # Base weights of adapters stay as they are loaded (accelerate 1.15, utils/fsdp_utils.py, fsdp2_prepare_model).
        self.frozen_shard = self.frozen_width if job.plain or job.lora else 4.0
        self.shard = self.width if job.plain else max(self.width, 4.0)
        self.master = np.where(self.fsdp, 0.0, columns.master)
        self.sub_group = sub_groups(columns, self.part, self.largest, self.ranks)
        self.stays = device_share_of_optimizer(columns, self.part, self.largest, self.ranks)
        self.sharing, self.row_bytes = job.sequence_ranks, job.element_bytes * job.seq_len  # of one channel
        self.heads = attention_heads(job.model.config) if self.sharing > 1 else None
        self._gradients(job)
        self._buckets()
        self._muon(muon_sizes(job, trace))

    def exchanged(self, checkpointing: float) -> Floats:
        """Return the bytes by which Ulysses adds to the activations, all of them in the model's precision.

        The layer that runs holds the blocks that it has exchanged besides its own (ulysses_sp.py, `_combine_local_sequences`).
        Each layer whose activations are kept also keeps the copies of repeated keys and values.
        """
        if self.heads is None:
            return np.zeros(len(self.columns))
        kept = self.heads.repeated(self.sharing) * (1 if checkpointing else self.heads.layers)
        elements = self.heads.exchanged(self.sharing) + kept
        return np.asarray(self.row_bytes * elements * self.columns.rows)

    def _gradients(self, job: Job) -> None:
        """Set the gradients that are kept in another precision than backward makes (`grad_accum_dtype`).

        In bf16 at stage 1 DeepSpeed uses BF16_Optimizer. Otherwise stages 1 and 2 add them up in one flat buffer of a
        rank's part.
        """
        apart = self.accumulated != self.width
        self.bf16_optimizer = self.one & apart & ~self.out & (job.precision == "bf16")
        self.compact = self.two & apart & ~self.bf16_optimizer
        self.made = np.where(self.compact & self.one, self.accumulated, self.width)  # bytes per element of .grad
        self.own = np.where(self.compact, self.accumulated, self.width)  # bytes per element of a rank's own part
        # A parameter that crosses the border of a part is kept whole. In round-robin order that is a large one.
        self.across = np.where(self.two & (self.columns.round_robin > 0), self.width * self.largest, 0.0)
        self.contiguous = keeps_gradients_contiguous(self.columns)
        self.accumulates = (self.columns.accumulation > 1) | (self.columns.keeps_gradients > 0)

    def _muon(self, sizes: list[int]) -> None:
        """Set what Muon keeps for its matrices, besides Adam's states of the rest, and what it takes to step them.

        Stages 1 and 2 keep a momentum as wide as the gradients, and a copy of it that a skipped step discards
        (stage_1_and_2.py, `_muon_momentum_buffer`, `_muon_staging_momentum`). The end of backward replaces gradients by
        updates (`get_flat_partition`). Stage 3 keeps a momentum in the type that is sent (stage3.py,
        `_create_momentum_buffer`). It gathers the gradients and momenta of a bucket (`_apply_muon_to_accumulated_grads`), or
        of a whole sub-group if they are offloaded (`_apply_muon_updates_cpu_offload`). Blocks of these gathers stay
        allocated between steps (`_muon_allgather_buffers`).
        """
        nothing = np.zeros(len(self.columns))
        self.orthogonalized = self.updates = self.allgathered = nothing
        # largest share of the parameters in one of the optimizer's groups, which are stepped in turn
        self.at_step = 1.0
        if not sizes:
            return
        share, largest = sum(sizes) / self.total, float(max(sizes))
        self.at_step = max(share, 1 - share)
        self.sub_group = np.minimum(self.sub_group, self.at_step * self.part)
        in_two, iterating = self.two & ~self.bf16_optimizer, _NEWTON_SCHULZ_BYTES * largest
        momentum = np.select([in_two & ~self.out, self.three], [2 * self.made, self.sent], 4.0)
        self.states = share * momentum + (1 - share) * _ADAM_BYTES * self.columns.state_share
        self.updates = np.where(in_two & ~self.out, self.made * share * self.part + iterating, 0.0)
        at_two = min(share * self.total, max(largest, _MUON_BATCH))
        # Stage 3: gradients and momenta at once if they are offloaded, otherwise one after the other.
        of_group = 2 * self.accumulated * np.minimum(share * self.total, self.sub_group * self.ranks)
        packed = [_bucket_sizes(tuple(sizes), float(limit)) for limit in self.columns.reduce_bucket]
        at_three = np.where(self.out, of_group, self.sent * np.array([max(one) for one in packed]))
        block = (1 + 1 / self.ranks) * at_three
        if self.ranks > 1:
            kept = np.where(self.out, block, (1 + 1 / self.ranks) * self.sent * np.array([sum(one) for one in packed]))
            kept = np.where(block <= _KEPT_BY_MUON, np.minimum(kept, _KEPT_BY_MUON), 0.0)
            blocks = [(1 + 1 / self.ranks) * count * 4.0 * at_two for count in (1, 2)]  # gradients, then momenta too
            at_once = sum(min(one, _LARGEST_OF_MUON) for one in blocks)
            self.allgathered = np.select([self.three, in_two & self.out], [kept, nothing + at_once], 0.0)
        # A block that is too large to be kept is freed after the step.
        gathered = np.where(self.three & (self.ranks > 1) & (block > _KEPT_BY_MUON), block, 0.0)
        gathered = gathered + np.select(
            [self.three & self.out, self.three, in_two & self.out],
            [at_three, (2 + 1 / self.ranks) * at_three, nothing + 2 * 4.0 * at_two],
            0.0,
        )
        self.orthogonalized = gathered + iterating

    def _buckets(self) -> None:
        """Set the buckets, and the bytes kept between micro-batches."""
        # Stage 3 has its buckets in the dtype that is sent.
        self.bucket_width = np.where(self.three, self.sent, self.made)
        buckets = reduce_bucket_bytes(self.columns, self.bucket_width)
        # Stage 3 allocates its bucket with the engine; stages 1 and 2 allocate theirs in backward.
        self.standing = np.where(self.three, buckets, 0.0)
        self.ipg = np.where(self.two & ~self.bf16_optimizer, buckets, 0.0)
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


def estimate_memory(job: Job, trace: Trace, columns: Columns, device: str = "cpu") -> MemoryEstimate:
    """Return device and host bytes of every candidate, without CUDA's context, the allocator and communication libraries.

    On "cuda", memory is really pinned, and torch's optimizers allocate their intermediates.
    """
    terms, moments = _Terms(job, trace, columns, device), _Moments(len(columns))
    parameters, gradients, optimizer = _resident(terms)
    _add_passes(terms, moments)
    _add_step(terms, moments, gradients)
    kept = {"host": _host(terms), "left": _left(terms), "holes": _holes(terms), **_step_blocks(terms)}
    return MemoryEstimate(parameters, gradients, optimizer, tuple(moments.names), **moments.tables(), **kept)


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


@functools.lru_cache(maxsize=256)
def _bucket_sizes(sizes: tuple[int, ...], limit: float) -> frozenset[int]:
    """Return the different sums of neighbouring sizes that are gathered at once: at most `limit`, or one size."""
    found, filled = set(), 0
    for size in sizes:
        if filled and filled + size > limit:
            found.add(filled)
            filled = 0
        filled += size
    return frozenset({*found, filled})


def _inner_matrices(job: Job, sizes: list[int]) -> list[int]:
    """Select the sizes of matrices between embedding and head."""
    text = job.model.config.get("text_config") or job.model.config
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 1)
    ends = int(text.get("vocab_size", 0)) * hidden
    return [size for size in sizes if size > 16 * hidden and size != ends]


def frozen_width(job: Job, trace: Trace) -> tuple[float, float]:
    """Return the mean bytes per element of frozen parameters, and the bytes of the largest weight while it is dequantized."""
    width, sizes = job.element_bytes, quantized_sizes(job, trace)
    share = sum(sizes) / max(trace.frozen, 1)
    return share * NF4_BYTES + (1 - share) * width, width * max(sizes, default=0)


def _resident(t: _Terms) -> tuple[Floats, Floats, Floats]:
    """Return (parameters, gradients, optimizer): device bytes that stay allocated all the time."""
    frozen = np.where(t.fsdp, t.frozen_shard, t.frozen_width) * t.trace.frozen
    second = np.where(t.columns.secondary > 1, 1 / t.columns.secondary, 0.0)
    shared = (1 / t.ranks + second) * (np.where(t.fsdp, t.shard * t.total, t.whole) + frozen)
    parameters = np.where(t.three, np.where(t.parameters_out, 0.0, shared), t.whole + frozen)
    # Stages 1 to 3 clone 32-bit master weights even of 32-bit parameters; stage 0 needs no such clone.
    master = np.where(t.zero0 & (not t.plain), 0.0 if t.width == 4 else 4.0, t.master)
    partitioned = np.where(t.out, t.stays, 1.0) * (master + t.states) * t.part
    partitioned = partitioned + np.where(t.out, 0.0, t.stepper.stray_share * t.whole)
    optimizer = np.where(t.zero0, (master + t.states) * t.total, partitioned) + t.allgathered
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
    gathered = np.where(t.three, gathered_bytes(t.trace, c, t.frozen_width, t.ranks), t.dequantized)
    copied = {choice: t.exchanged(choice) for choice in (0.0, 1.0)}
    for choice, run in ((0.0, t.trace.plain), (1.0, t.trace.of(True))):
        mine = c.checkpointing == choice
        kept = np.where(c.fused_by_compiling & (choice == 0), COMPILED_KEPT, 1.0)
        for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
            for fixed, each, grads, used in _points(run, phase):
                (held, buckets), shards = _pending(t, grads), _shards(t, grads)
                whole = np.where(t.three, np.maximum(gathered, used) * (t.ranks > 1), t.dequantized)
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
                    kept * np.maximum(0.0, fixed + each * c.rows) + _kept_inputs(t, run, each) + copied[choice],
                    shards + t.fsdp * whole,
                )
    held, buckets = _pending(t, t.whole, done=True)
    flat = min(t.total, REDUCE_ELEMENTS) * (t.width + np.where(t.sent != t.width, t.sent, 0.0))
    flat = np.where(t.plain | t.torch_alone, 0.0, flat)
    held = np.where(t.zero0, t.whole + flat, held)
    # BF16_Optimizer reduces its flat tensor directly, in the dtype that is sent; those of several groups are copied.
    held = np.where(t.bf16_optimizer & (t.sent != t.accumulated), held + t.sent * t.total, held) + t.updates
    held = held + t.bf16_optimizer * (t.at_step < 1) * t.accumulated * min(t.total, REDUCE_ELEMENTS)
    made = _shards(t, t.whole)
    moments.add("backward", every, t.standing + buckets, gathered, held + made, moments.zero, made + t.fsdp * gathered)


def _kept_inputs(t: _Terms, run: Pass, each: float) -> Floats:
    """Return the input bytes that DeepSpeed's own linear keeps for frozen layers at stage 3.

    Source: runtime/zero/linear.py, LinearFunctionForZeroStage3.forward. A sequence holds `each` bytes of activations at
    that point.
    """
    fixed, per_sequence = run.frozen_only
    share = min(1.0, max(0.0, each / run.after_forward[1])) if run.after_forward[1] > 0 else 1.0
    return np.where(t.three & (t.columns.own_linear > 0), share * (fixed + per_sequence * t.columns.rows), 0.0)


def _add_step(t: _Terms, moments: _Moments, gradients: Floats) -> None:
    """Add the moments of the optimizer's step and of its initialisation; `gradients` are the resident ones."""
    every = np.ones(len(t.columns), dtype=bool)
    # Stage 0: gradients in 32 bits, and for FP16_Optimizer once more as one flat tensor.
    copied = 4.0 if t.width < 4 and not t.plain else 0.0
    of_all = t.whole + copied * (2 if t.stepper.flattens else 1) * t.total + t.temporary_bytes * t.at_once
    # A rank's part: as gathered, flat, and in the master's precision. Only the last remains during the step.
    # With several groups of parameters, each is flattened in turn.
    cast = np.where(t.own != t.master, t.master, 0.0)
    flattened = np.where(t.compact, t.own, 2 * t.width) + cast
    flattened = flattened - (1 - t.at_step) * (np.where(t.compact, 0.0, t.width) + cast)
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
    copies = one_by_one + np.maximum(
        t.orthogonalized,
        np.select(
            [t.zero0, t.bf16_optimizer, t.two & ~t.out, t.fsdp & ~t.out, t.three & ~t.out, t.three],
            [of_all + t.orthogonalized, of_sum, of_part, shards + t.temporary_bytes * t.part, of_sub_group, of_split],
            0.0,
        ),
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


def _step_blocks(t: _Terms) -> dict[str, Floats]:
    """Return the sizes of the largest blocks of a step with DeepSpeed's own optimizers on the device, fields of MemoryEstimate.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py (`step`: flatten, cast, get_grad_norm_direct) and stage3.py
    (`_prepare_fp32_grad_for_sub_group`).
    """
    mine = (t.two | t.three) & ~t.out & ~t.bf16_optimizer & ~t.fsdp & (t.master > 0)
    at_once = np.where(t.three, t.sub_group, t.part)
    flat = np.where(t.three, t.accumulated, t.own) * at_once
    cast = np.where(t.master != np.where(t.three, t.accumulated, t.own), t.master * at_once, 0.0)
    norm = np.full(len(t.columns), 8.0 * min(t.largest, t.part))
    return {name: np.where(mine, size, 0.0) for name, size in (("flat", flat), ("cast", cast), ("norm", norm))}


def _holes(t: _Terms) -> Floats:
    """Return the unused bytes between frozen partitions at stage 3.

    Each partition was cut out of the block of its whole parameter. Partitions of trainable parameters are moved
    together (stage3.py, _create_fp16_partitions_with_defragmentation).
    """
    frozen = HOLES * t.frozen_width * t.trace.frozen / t.ranks
    return np.where(t.three & ~t.parameters_out & (t.ranks > 1) & (not t.plain) & ~t.fsdp, frozen, 0.0)


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
    """Return the bytes of gradients that FSDP has reduced when backward has made `grads`.

    A unit is reduced when it is complete.
    """
    waiting = 0.0 if stepping else t.columns.reduce_bucket
    done = np.maximum(0.0, grads / t.width - waiting)
    return np.where(t.fsdp & ~t.out & ~t.accumulates, t.shard * done / t.ranks, 0.0)


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
    """Return the elements that stage 3 still holds when backward begins, so that it need not gather them again.

    They are used again within `max_reuse_distance`, half of which lies on either side of the turn.
    """
    return np.minimum(c.max_reuse / 2, float(sum(trace.every_size)))


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
    gathers = value_at(in_new_names(job.base_config), f"zero_optimization.{GATHER_ON_SAVE}") is not False
    whole = weights_bytes(sum(trace.parameters) + trace.frozen, job.element_bytes)
    return np.where((c.stage == 3) & gathers, whole, 0.0)


# -- twin flow ---------------------------------------------------------------------------------------------------------
#
# Twin-Flow: the share of an offloaded optimizer that stays on the device (`offload_optimizer.ratio`).
#
# Source: deepspeed 0.19.8, `runtime/zero/stage3.py`, `_create_fp32_partitions`: the first `int((1 - ratio) * n)` whole
# sub-groups of a rank's n. With one sub-group the ratio changes nothing; `sub_group_size` of 1e9 gives most models only
# one.


def sub_groups(c: Columns, part: float, largest: float, ranks: float) -> Floats:
    """Return the elements of a sub-group of a rank with `part` elements.

    No parameter is cut; the largest has `largest` elements over all ranks.
    """
    return np.minimum(part, np.maximum(c.sub_group, largest / ranks))


def device_share_of_optimizer(c: Columns, part: float, largest: float, ranks: float) -> Floats:
    """Return the share of an offloaded optimizer that stays on the device, for each candidate."""
    groups = np.ceil(part / sub_groups(c, part, largest, ranks))
    return np.where(c.stage == 3, np.floor((1 - c.offload_ratio) * groups + 1e-9) / groups, 0.0)


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
# Muon's step: Newton-Schulz holds a matrix three times in 16 bits, and its update (zero/muon/original_muon.py).
_NEWTON_SCHULZ_BYTES = 8.0
# Limits of the blocks that it gathers into (stage3.py, `_muon_allgather_max_cached_bytes`; stage_1_and_2.py,
# `_muon_allgather_max_buffer_bytes`), and of the elements that stages 1 and 2 gather at once (`_muon_param_batches`)
_KEPT_BY_MUON, _LARGEST_OF_MUON, _MUON_BATCH = 256 * MIB, 64 * MIB, 8 * MIB
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
# Bytes of intermediates of torch's plain loops, for the tensor being stepped (_single_tensor_adam: the root and the
# quotient; _single_tensor_adagrad: the root). ZeRO's partitions are one tensor each.
_LOOP_BYTES = {"adamw": 8, "adam": 8, "adagrad": 4}
# transformers 5.23, optimization.py, Adafactor.step, one parameter at a time: gradient and weights in 32 bits, the
# update and its factors.
_ADAFACTOR_BYTES = 16


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
    # bytes per element of the largest parameter: intermediates of the parameter being stepped
    one_by_one_bytes: float = 0.0
    follows_weights: bool = True  # with plain 16-bit torch the states are 16 bits, too
    loops: bool = False  # at stage 0, `temporary_bytes` hold one parameter at a time


def optimizer_of_trials(job: Job) -> Stepper:
    """Return the optimizer of the job's trials without offload.

    Source: deepspeed 0.19.8, runtime/engine.py, _configure_basic_optimizer and _configure_fp16_optimizer. A script's profile
    describes the script's own optimizer. If the profile lacks it, the optimizer is assumed to have no intermediates, like
    Trainer's default (`adamw_torch_fused`). Plain torch uses `foreach` unless the config sets `fused`.
    """
    kind = job.optimizer_kind
    other = kind.replace("_", "").replace("-", "")
    if other in OTHER_STATES:
        one_by_one = _ADAFACTOR_BYTES if other == "adafactor" else 0
        return Stepper(OTHER_STATES[other], 0.0, False, one_by_one_bytes=one_by_one, follows_weights=False)
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
    temporary, flattens, loops = _of_script(job) or (temporary, flattens, False)
    states, stray = float(STATE_BYTES.get(kind, _ADAM_BYTES)), float(kind == "adagrad")
    return Stepper(states, float(temporary), flattens, stray, kind in STATE_BYTES, loops=loops)


def _of_script(job: Job) -> tuple[float, bool, bool] | None:
    """Return (bytes of intermediates, `flattens`, `loops`) of the script's own optimizer, which steps regardless of the config.

    None if the profile has no optimizer. torch uses `foreach` on CUDA if a script sets neither option (torch 2.13,
    torch/optim/adam.py, `adam`).
    """
    profile = job.script.profile if job.script is not None else {}
    if found := profile.get(TORCHS):
        kind, fused, foreach = str(found["class"]).lower(), found["fused"], found["foreach"]
        loops = not fused and not foreach and (fused, foreach) != (None, None)
        table = {} if fused else _LOOP_BYTES if loops else _FOREACH_BYTES
        return float(table.get(kind, 0)), False, loops
    # DeepSpeed's or apex's, which `_configure_fp16_optimizer` recognizes by its class
    if found := profile.get("optimizer"):
        return 0.0, found == "FusedAdam" and not job.plain, False
    return None


# -- unmodelled keys ---------------------------------------------------------------------------------------------------
#
# Predictions are less certain if such a key is set, and report it.

# Keys of `zero_optimization` that the formulas read, or that hardly change memory (deepspeed 0.19.8,
# runtime/zero/config.py; `parameter_alignment` is 16 bytes per parameter). Any other key, also of a newer DeepSpeed,
# counts as unread.
_READ = set(
    (
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint offload_param offload_optimizer sub_group_size stage3_prefetch_bucket_size "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters round_robin_gradients parameter_alignment "
        "zero_hpz_partition_size memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks"
    ).split()
)
_READ_OFFLOAD = {"device", "nvme_path", "pin_memory", "ratio", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"}
_READ_OFFLOAD |= {"pipeline", "pipeline_read", "pipeline_write"}
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
)


def unread_keys(config: dict[str, Any]) -> list[str]:
    """Return the dotted names of the keys that a config sets and that no formula reads."""
    found = []
    for section in ("", ".offload_optimizer", ".offload_param"):
        path, read = f"zero_optimization{section}", _READ_OFFLOAD if section else _READ
        entry = value_at(config, path)
        if isinstance(entry, dict):
            found += [f"{path}.{key}" for key, value in entry.items() if key not in read and _is_set(value)]
    return found + [name for name in _SECTIONS if _is_set(value_at(config, name))]


def unread_knobs(candidate: Candidate) -> list[str]:
    """Return the unread keys that a candidate sets by dotted names."""
    config: dict[str, Any] = {}
    for name, value in candidate.knobs:
        if "." in name:
            *parents, leaf = name.split(".")
            place = config
            for parent in parents:
                place = place.setdefault(parent, {})
            place[leaf] = value
    return unread_keys(config) if config else []


def _is_set(value: Any) -> bool:
    """Check that a value turns something on: a section through `enabled`, a size if it is above 1."""
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) is True
    if isinstance(value, bool) or value is None:
        return bool(value)
    return value > 1 if isinstance(value, int | float) else value != "auto"
