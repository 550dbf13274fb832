"""Candidates as feature columns, and differences between DeepSpeed versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.problem.candidate import COMPILED, EXPANDABLE, LIGER, LORA, PACKING, ZERO_DEFAULTS, Candidate
from autotune.problem.ds_config import value_at
from autotune.problem.job import Job, parse_lora
from autotune.problem.knobs import READ, Release
from autotune.util.interpreter import OWN, Interpreter
from autotune.versions import newer, release

# -- DeepSpeed versions ------------------------------------------------------------------------------------------------
#
# First releases of DeepSpeed with a change in memory or time, in the format of `versions.release`. docs/versions.md
# describes the checks.

# Stage 0 in bf16 runs FP16_Optimizer (`engine.get_data_types`). Before, it uses BF16_Optimizer: gradients are summed in
# 32 bits and masters are partitioned, like stage 1 with `grad_accum_dtype: fp32`.
_SUMS_IN_16_BITS = (0, 17, 6)
# Stages 1 and 2 allocate their buckets with the first gradient. 0.17.0 allocates them before backward, in addition to all
# activations (stage_1_and_2.py, `backward`).
_BUCKETS_WITH_GRADIENT = (0, 17, 3)
# Stage 0 in bf16 frees its gradients after a step, like other stages. `engine._take_model_step` of 0.18.4 sets them to
# zero.
_FREES_GRADIENTS = (0, 18, 6)
# `bf16_master_weights_and_grads` and `bf16_optimizer_states` are read. 0.16 ignores them, and 0.17 refuses the config.
_LOW_MASTERS = (0, 18, 3)
# `pin_memory` of the offload sections defaults to true, and in 0.19.3 to false (runtime/zero/offload_config.py).
PINS_BY_DEFAULT = (0, 19, 5)


def installed_deepspeed(interpreter: Interpreter = OWN) -> Release:
    """Return the ranks' DeepSpeed version, or the version these formulas are based on if none is installed."""
    return release(interpreter.version("deepspeed")) or READ


def unknown_newer(interpreter: Interpreter) -> list[str]:
    """Return a line for each library that is newer than the tested versions and that memory and time depend on."""
    return newer({name: interpreter.version(name) for name in ("torch", "deepspeed", "transformers")})


# -- feature columns ---------------------------------------------------------------------------------------------------
#
# Candidates as columns of numbers, so that ten thousand are predicted at once.

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]  # indices of candidates
# bytes of DeepSpeed's names of dtypes (runtime/config.py, DtypeEnum)
_WIDTHS = {"fp32": 4.0, "float32": 4.0, "float": 4.0, "fp16": 2.0, "float16": 2.0, "half": 2.0} | dict.fromkeys(
    ("bf16", "bfloat16"), 2.0
)
SEQUENCE_GRADIENTS = "seq_parallel_communication_data_type"
PLACES = {"none": 0.0, "cpu": 1.0, "nvme": 2.0}


def selected(tree: Any, chosen: Flags | Places) -> Any:
    """Select the candidates where `chosen` is true, or at these indices.

    Args:
        tree: an array whose last axis are candidates, or a dict or dataclass of trees.
    """
    if isinstance(tree, np.ndarray):
        return tree[..., chosen]
    if isinstance(tree, dict):
        return {name: selected(one, chosen) for name, one in tree.items()}
    return type(tree)(**selected(vars(tree), chosen))


def joined(trees: Sequence[Any], order: Places) -> Any:
    """Join the candidates of trees, and reorder them. An array with fewer rows than others repeats its last one."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: joined([tree[name] for tree in trees], order) for name in first}
    if not isinstance(first, np.ndarray):
        return type(first)(**joined([vars(tree) for tree in trees], order))
    if first.ndim > 1:
        rows = max(map(len, trees))
        trees = [np.pad(one, ((0, rows - len(one)), (0, 0)), "edge") for one in trees]
    return np.concatenate(trees, axis=-1)[..., order]


@dataclass(frozen=True)
class Columns:
    """Knobs of candidates, one entry per candidate. Sizes are in elements, places as in PLACES."""

    stage: Floats
    micro_batch: Floats
    rows: Floats  # sequences that a rank computes: the micro-batch, or its part of it if ranks share sequences
    accumulation: Floats
    checkpointing: Floats
    offload_optimizer: Floats
    offload_param: Floats
    reduce_bucket: Floats
    sub_group: Floats
    contiguous: Floats
    overlap: Floats
    prefetch: Floats
    max_reuse: Floats
    persistence: Floats
    compiled: Floats
    lora: Floats  # rank of the adapters; 0 for full training
    packed: Floats
    many_lengths: Floats  # 1 if batches differ in length and the allocator's segments cannot grow
    tokens: Floats  # mean of a row, padding included
    accumulated: Floats  # bytes per element of accumulated gradients
    communicated: Floats  # bytes per element of gradients that are sent
    master: Floats  # bytes per element of master weights
    state_share: Floats  # size of an optimizer's states relative to 32 bits; plain torch's are as wide as its weights
    pinned_optimizer: Floats
    pinned_param: Floats
    own_linear: Floats  # stage 3 replaces torch's linear by one that saves its input even if the weight is frozen
    early_buckets: Floats  # stages 1 and 2 make their buckets before backward, not with its first gradient
    keeps_gradients: Floats  # gradients are set to zero after a step, and stay allocated
    liger: Floats  # Liger's kernels replace parts of the model, if its version knows them
    expandable: Floats  # the allocator's segments can grow, and their free blocks merge

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def passes(self) -> Floats:
        """Return the passes through the model in a micro-batch: forward, backward and the recomputation, (n,)."""
        return 2.0 + self.checkpointing

    @property
    def fused_by_compiling(self) -> Flags:
        """Select the candidates that torch.compile fuses. Liger's kernels are fused already."""
        return np.asarray((self.compiled > 0) & (self.liger == 0))


def columns_of(
    candidates: Sequence[Candidate],
    job: Job,
    deepspeed: Release = READ,
    alone: Mapping[str, float] = MappingProxyType({}),
) -> Columns:
    """Return the knobs that decide memory and time.

    Missing ones come from the user's own config, then from DeepSpeed's defaults.

    Args:
        deepspeed: version whose defaults apply.
        alone: values of missing knobs in a job without DeepSpeed, from `step_time.fsdp_settings`. They come before the
            user's own config, which torch does not read.
    """
    raws = [candidate.as_dict for candidate in candidates]
    width, zero = job.element_bytes, "zero_optimization."

    def set_values(key: str) -> list[Any]:
        own = value_at(job.base_config, key.split("."))
        return [raw.get(key, own) for raw in raws]

    def numbers(knob: str, default: float = 0.0) -> Floats:
        path = knob if "." in knob else zero + knob
        own, default = alone.get(knob, value_at(job.base_config, path.split("."))), ZERO_DEFAULTS.get(knob, default)
        values = [raw.get(knob, own) for raw in raws]
        return np.array([float(one if isinstance(one, int | float) else default) for one in values])

    def places(knob: str) -> Floats:
        return np.array([PLACES.get(str(raw.get(knob, "none")), 1.0) for raw in raws])

    # Dtypes that DeepSpeed keeps values in: deepspeed 0.19.8, engine.get_data_types, base_optimizer.py.
    def widths(key: str, default: float = width) -> Floats:
        return np.array([_WIDTHS.get(str(one).removeprefix("torch."), default) for one in set_values(key)])

    def of_job(knob: str, own: bool = False) -> Floats:
        return np.array([float(bool(raw.get(knob, own))) for raw in raws])

    stage = np.array([float(c.stage) for c in candidates])
    micro_batch = np.array([float(c.micro_batch) for c in candidates])
    accumulated = widths("data_types.grad_accum_dtype")
    overlap = numbers("overlap_comm", np.nan)
    overlap = np.where(np.isnan(overlap), stage == 3, overlap)
    old_stage_0 = (stage == 0) & (job.precision == "bf16") & (not job.plain)
    keeps_gradients = old_stage_0 & (deepspeed < _FREES_GRADIENTS)
    if deepspeed < _SUMS_IN_16_BITS:
        stage, accumulated = np.where(old_stage_0, 1.0, stage), np.where(old_stage_0, 4.0, accumulated)
    reads_low = deepspeed >= _LOW_MASTERS
    low_masters = numbers(f"{job.precision}.{job.precision}_master_weights_and_grads") * reads_low
    low_states = numbers("bf16.bf16_optimizer_states") * reads_low
    packed, expandable = of_job(PACKING, job.packed), of_job(EXPANDABLE)
    tokens = padded_tokens(job.lengths, micro_batch) if job.lengths else float(job.seq_len)
    pins = deepspeed >= PINS_BY_DEFAULT
    return Columns(
        stage=stage,
        micro_batch=micro_batch,
        rows=micro_batch / job.sequence_ranks,
        accumulation=np.array([float(c.accumulation) for c in candidates]),
        checkpointing=np.array([c.checkpointed_share for c in candidates]),
        offload_optimizer=places("offload_optimizer"),
        offload_param=places("offload_param"),
        reduce_bucket=numbers("reduce_bucket_size"),
        sub_group=numbers("sub_group_size"),
        contiguous=numbers("contiguous_gradients"),
        overlap=overlap,
        prefetch=numbers(zero + "stage3_prefetch_bucket_size"),
        max_reuse=numbers(zero + "stage3_max_reuse_distance"),
        persistence=numbers(zero + "stage3_param_persistence_threshold"),
        compiled=of_job(COMPILED, job.compiled),
        lora=_lora_ranks(raws, job),
        packed=packed,
        many_lengths=(packed == 0) * (expandable == 0) * float(len(job.lengths) > 1),
        tokens=np.where(packed > 0, float(job.seq_len), tokens),
        accumulated=accumulated,
        # Under sequence parallelism gradients have their own key (engine.py, `_configure_distributed_model`).
        communicated=widths("communication_data_type") if job.sequence_ranks == 1 else widths(SEQUENCE_GRADIENTS, 4.0),
        master=np.where(job.plain, 0.0, np.where(low_masters, 2.0, 4.0)),
        state_share=np.where(job.plain, job.trained_bytes / 4, np.where(low_states, 0.5, 1.0)),
        pinned_optimizer=numbers(zero + "offload_optimizer.pin_memory", pins),
        pinned_param=numbers(zero + "offload_param.pin_memory", pins),
        own_linear=numbers(zero + "memory_efficient_linear", True),
        early_buckets=np.full(len(raws), float(deepspeed < _BUCKETS_WITH_GRADIENT)),
        keeps_gradients=keeps_gradients.astype(np.float64),
        liger=of_job(LIGER, job.liger),
        expandable=expandable,
    )


def _lora_ranks(raws: list[dict[str, Any]], job: Job) -> Floats:
    ranks: dict[Any, float] = {None: float(job.lora.rank) if job.lora else 0.0, "none": 0.0}
    loras = [raw.get(LORA) for raw in raws]
    ranks |= {one: float(parse_lora(str(one)).rank) for one in set(loras) - set(ranks)}
    return np.array([ranks[one] for one in loras])


def longest_shares(lengths: Sequence[tuple[int, int]], micro_batch: Floats) -> tuple[Floats, Floats, Places]:
    """Return the distribution of the longest of `micro_batch` sequences, which are drawn from (tokens, count).

    Returns:
        The lengths in tokens; (sizes, lengths + 1) the probability that the longest is shorter than each length, and 1; and
        (n,) the row of each candidate's micro-batch.
    """
    tokens, counts = np.array(sorted(lengths), dtype=np.float64).T
    below = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
    sizes, place = np.unique(micro_batch, return_inverse=True)
    return tokens, below ** sizes[:, None], place


def padded_tokens(lengths: Sequence[tuple[int, int]], micro_batch: Floats) -> Floats:
    """Return the mean of the longest of `micro_batch` sequences, to which a collator pads."""
    tokens, below, place = longest_shares(lengths, micro_batch)
    return np.asarray((np.diff(below, axis=1) @ tokens)[place])
