"""Candidates as feature columns, and differences between DeepSpeed versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.problem.candidate import (
    ATTENTION,
    COMPILED,
    EXPANDABLE,
    LIGER,
    LORA,
    LOSS,
    PACKING,
    ZERO_DEFAULTS,
    Candidate,
)
from autotune.problem.job import ATTENTIONS, LOSSES, Job, parse_lora
from autotune.problem.knobs import READ as READ
from autotune.problem.knobs import SUPER_OFFLOAD
from autotune.problem.knobs import Release as Release
from autotune.problem.models import liger_replaces_anything
from autotune.util.interpreter import OWN, Interpreter
from autotune.versions import newer, release

# -- DeepSpeed versions ------------------------------------------------------------------------------------------------
#
# Memory and time differences of older DeepSpeed versions. Each names the version and the reason; docs/versions.md
# describes the checks.
#
# A version has the format of `versions.release`.


def installed_deepspeed(interpreter: Interpreter = OWN) -> Release:
    """Return the ranks' DeepSpeed version, or the version these formulas are based on if none is installed."""
    return release(interpreter.version("deepspeed")) or READ


def sums_in_32_bits(deepspeed: Release) -> bool:
    """Check that stage 0 in bf16 uses BF16_Optimizer.

    Gradients are then summed in 32 bits and masters are partitioned, like stage 1 with `grad_accum_dtype: fp32`. From
    0.17.6 on, `engine.get_data_types` keeps bf16 and FP16_Optimizer runs.
    """
    return deepspeed < (0, 17, 6)


def makes_buckets_first(deepspeed: Release) -> bool:
    """Check that stages 1 and 2 allocate their buckets before backward, in addition to all activations.

    0.17.0 does (stage_1_and_2.py, `backward`). 0.17.3 allocates them with the first gradient.
    """
    return deepspeed < (0, 17, 3)


def keeps_gradients_at_stage_0(deepspeed: Release) -> bool:
    """Check that gradients of stage 0 in bf16 stay allocated from step to step, set to zero.

    `engine._take_model_step` of 0.18.4 keeps them; that of 0.18.6 frees them as at other stages.
    """
    return deepspeed < (0, 18, 6)


def pins_unless_told(deepspeed: Release) -> bool:
    """Check that `pin_memory` of the offload sections defaults to true.

    Source: runtime/zero/offload_config.py. The default is false in 0.19.3 and true in 0.19.5.
    """
    return deepspeed >= (0, 19, 5)


def has_low_masters(deepspeed: Release) -> bool:
    """Check that `bf16_master_weights_and_grads` and `bf16_optimizer_states` are read: from 0.18.3 on.

    0.16 ignores them, and 0.17 refuses the config.
    """
    return deepspeed >= (0, 18, 3)


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
    max_live: Floats
    max_reuse: Floats
    persistence: Floats
    attention: Floats  # index in ATTENTIONS; -1 for transformers' choice
    compiled: Floats
    lora: Floats  # rank of the adapters; 0 for full training
    packed: Floats
    many_lengths: Floats  # 1 if batches differ in length and the allocator's segments cannot grow
    tokens: Floats  # mean of a row, padding included
    accumulated: Floats  # bytes per element of accumulated gradients
    communicated: Floats  # bytes per element of gradients that are sent
    master: Floats  # bytes per element of master weights
    state_share: Floats  # size of an optimizer's states relative to 32 bits; plain torch's are as wide as its weights
    secondary: Floats  # ranks over which hpZ keeps a second set of parameters; 1 for none
    offload_ratio: Floats  # share of the sub-groups whose states are on the host if the optimizer is offloaded
    pinned_optimizer: Floats
    pinned_param: Floats
    round_robin: Floats
    own_linear: Floats  # stage 3 replaces torch's linear by one that saves its input even if the weight is frozen
    immediate: Floats  # BF16_Optimizer adds each gradient to its 32-bit sum as soon as backward makes it
    early_buckets: Floats  # stages 1 and 2 make their buckets before backward, not with its first gradient
    keeps_gradients: Floats  # gradients are set to zero after a step, and stay allocated
    allgather_bucket: Floats
    multi_rank: (
        Floats  # stages 1 and 2 all-reduce buckets that span several ranks; otherwise each part goes to its rank alone
    )
    narrow_weights: Floats  # ZeRO++: parameters travel in 8 bits
    narrow_gradients: Floats  # ZeRO++: gradients travel in 4 bits
    adam_beside: Floats  # DeepSpeed's CPU Adam steps sub-groups during backward (SuperOffload)
    liger: Floats  # Liger's kernels replace parts of the model
    loss: Floats  # index in LOSSES
    expandable: Floats  # the allocator's segments can grow, and their free blocks merge

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def fused_by_compiling(self) -> Flags:
        """Select the candidates that torch.compile fuses. Liger's kernels are fused already."""
        return np.asarray((self.compiled > 0) & (self.liger == 0))


_STAGE3 = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
)


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
    own = {**_own_values(job.base_config), **alone}
    zero = "zero_optimization."
    raws = [candidate.as_dict for candidate in candidates]
    kinds: list[object] = [None, *ATTENTIONS]

    def column(name: str, default: float) -> Floats:
        default = own.get(name, default)
        return np.array([float(raw.get(name, default)) for raw in raws], dtype=np.float64)

    def place(name: str) -> Floats:
        return np.array([PLACES.get(str(raw.get(name, "none")), 1.0) for raw in raws])

    stage = np.array([float(c.stage) for c in candidates])
    overlaps = [raw.get("overlap_comm", own.get("overlap_comm", at == 3)) for raw, at in zip(raws, stage, strict=True)]
    prefetch, max_live, max_reuse, persistence = (column(zero + name, ZERO_DEFAULTS[zero + name]) for name in _STAGE3)
    micro_batch = np.array([float(c.micro_batch) for c in candidates])
    packed = np.array([float(raw.get(PACKING, job.packed)) for raw in raws])
    fixed_segments = np.array([not raw.get(EXPANDABLE) for raw in raws])
    columns = Columns(
        stage,
        micro_batch,
        micro_batch / job.sequence_ranks,
        np.array([float(c.accumulation) for c in candidates]),
        np.array([float(c.checkpointing) for c in candidates]),
        place("offload_optimizer"),
        place("offload_param"),
        column("reduce_bucket_size", ZERO_DEFAULTS["reduce_bucket_size"]),
        column("sub_group_size", ZERO_DEFAULTS["sub_group_size"]),
        column("contiguous_gradients", ZERO_DEFAULTS["contiguous_gradients"]),
        np.array(overlaps, dtype=np.float64),
        prefetch,
        max_live,
        max_reuse,
        persistence,
        np.array([float(kinds.index(raw.get(ATTENTION, job.attention))) for raw in raws]) - 1,
        np.array([float(raw.get(COMPILED, job.compiled)) for raw in raws]),
        _lora_ranks(raws, job),
        packed,
        (packed == 0) * fixed_segments * float(len(job.lengths) > 1),
        np.where(
            packed > 0,
            float(job.seq_len),
            padded_tokens(job.lengths, micro_batch) if job.lengths else float(job.seq_len),
        ),
        **_precisions(raws, job, deepspeed),
        **_placement(raws, job, deepspeed),
        **_sending(raws, job),
    )
    return _of_old_stage_0(columns, deepspeed) if job.precision == "bf16" and not job.plain else columns


def _lora_ranks(raws: list[dict[str, Any]], job: Job) -> Floats:
    ranks: dict[Any, float] = {None: float(job.lora.rank) if job.lora else 0.0, "none": 0.0}
    loras = [raw.get(LORA) for raw in raws]
    ranks |= {one: float(parse_lora(str(one)).rank) for one in set(loras) - set(ranks)}
    return np.array([ranks[one] for one in loras])


def _of_old_stage_0(columns: Columns, deepspeed: Release) -> Columns:
    """Adjust stage 0 in bf16 to an older DeepSpeed."""
    zero0 = columns.stage == 0
    if keeps_gradients_at_stage_0(deepspeed):
        columns = dataclasses.replace(columns, keeps_gradients=zero0.astype(np.float64))
    if sums_in_32_bits(deepspeed):  # such a stage 0 behaves like stage 1
        stage, accumulated = np.where(zero0, 1.0, columns.stage), np.where(zero0, 4.0, columns.accumulated)
        columns = dataclasses.replace(columns, stage=stage, accumulated=accumulated)
    return columns


def _precisions(raws: list[dict[str, Any]], job: Job, deepspeed: Release) -> dict[str, Floats]:
    """Return the columns of the dtypes that DeepSpeed keeps values in.

    Source: deepspeed 0.19.8, engine.get_data_types, base_optimizer.py.
    """
    width = job.element_bytes

    def of(path: str, default: float = width) -> Floats:
        return np.array([_WIDTHS.get(str(one).removeprefix("torch."), default) for one in _set(raws, job, path)])

    # Under sequence parallelism gradients have a key of their own (engine.py, `_configure_distributed_model`).
    sent, default = ("communication_data_type", width) if job.sequence_ranks == 1 else (SEQUENCE_GRADIENTS, 4.0)
    low = f"{job.precision}.{job.precision}_master_weights_and_grads"
    low_masters, low_states = (
        _flags(raws, job, path) * has_low_masters(deepspeed) for path in (low, "bf16.bf16_optimizer_states")
    )
    return {
        "accumulated": of("data_types.grad_accum_dtype"),
        "communicated": of(sent, default),
        "master": np.where(job.plain, 0.0, np.where(low_masters, 2.0, 4.0)),
        "state_share": np.where(job.plain, job.trained_bytes / 4, np.where(low_states, 0.5, 1.0)),
        "immediate": _flags(raws, job, "bf16.immediate_grad_update"),
    }


def _placement(raws: list[dict[str, Any]], job: Job, deepspeed: Release) -> dict[str, Floats]:
    """Return the columns of where data lies: hpZ's second partition, Twin-Flow's ratio, pinning (runtime/zero/config.py)."""
    zero = "zero_optimization."

    def numbers(path: str, default: float) -> Floats:
        values = _set(raws, job, zero + path)
        return np.array([float(one) if isinstance(one, int | float) else default for one in values])

    return {
        "secondary": np.maximum(1.0, numbers("zero_hpz_partition_size", 1.0)),
        "own_linear": _flags(raws, job, zero + "memory_efficient_linear", True),
        "round_robin": _flags(raws, job, zero + "round_robin_gradients"),
        "offload_ratio": numbers("offload_optimizer.ratio", 1.0),
        "pinned_optimizer": _flags(raws, job, zero + "offload_optimizer.pin_memory", pins_unless_told(deepspeed)),
        "pinned_param": _flags(raws, job, zero + "offload_param.pin_memory", pins_unless_told(deepspeed)),
        "early_buckets": np.full(len(raws), float(makes_buckets_first(deepspeed))),
        "keeps_gradients": np.zeros(len(raws)),
    }


def _sending(raws: list[dict[str, Any]], job: Job) -> dict[str, Floats]:
    """Return the columns of how and when data travels, of Liger, of the loss, and of the allocator."""
    zero = "zero_optimization."
    own, default = value_at(job.base_config, zero + "allgather_bucket_size"), ZERO_DEFAULTS["allgather_bucket_size"]
    sizes = [raw.get("allgather_bucket_size", own) for raw in raws]
    knows = liger_replaces_anything(job.model.config.get("model_type"), job.interpreter.version("liger_kernel"))
    return {
        "allgather_bucket": np.array([float(one) if isinstance(one, int | float) else default for one in sizes]),
        "multi_rank": _flags(raws, job, zero + "use_multi_rank_bucket_allreduce", True),
        "narrow_weights": _flags(raws, job, zero + "zero_quantized_weights"),
        "narrow_gradients": _flags(raws, job, zero + "zero_quantized_gradients"),
        "adam_beside": _flags(raws, job, SUPER_OFFLOAD),
        "liger": np.array([float(knows and raw.get(LIGER, job.liger)) for raw in raws]),
        "loss": np.array([float(LOSSES.index(raw.get(LOSS, job.loss))) for raw in raws]),
        "expandable": np.array([float(bool(raw.get(EXPANDABLE))) for raw in raws]),
    }


def value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a DeepSpeed config, or None."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _set(raws: list[dict[str, Any]], job: Job, path: str) -> list[Any]:
    """Return the value of a key in each candidate, else in the user's own config; None if both lack it."""
    own = value_at(job.base_config, path)
    return [raw.get(path, own) for raw in raws]


def _flags(raws: list[dict[str, Any]], job: Job, path: str, default: bool = False) -> Floats:
    return np.array([float(one if isinstance(one, bool) else default) for one in _set(raws, job, path)])


def padded_tokens(lengths: Sequence[tuple[int, int]], micro_batch: Floats) -> Floats:
    """Return the mean of the longest of `micro_batch` sequences, to which a collator pads.

    They are drawn from (tokens, count).
    """
    tokens, counts = np.array(sorted(lengths), dtype=np.float64).T
    below = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
    sizes, place = np.unique(micro_batch, return_inverse=True)
    return np.asarray((np.diff(below ** sizes[:, None], axis=1) @ tokens)[place])


def _own_values(config: dict[str, Any]) -> dict[str, float]:
    zero = config.get("zero_optimization")
    found: dict[str, float] = {}
    for name, value in (zero if isinstance(zero, dict) else {}).items():
        if isinstance(value, bool | int | float):
            found[name] = float(value)
            found[f"zero_optimization.{name}"] = float(value)
    return found
