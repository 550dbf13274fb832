"""Candidates as columns of numbers, so that ten thousand are predicted at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.problem.candidate import ATTENTION, COMPILED, LORA, PACKING, ZERO_DEFAULTS, Candidate
from autotune.problem.job import ATTENTIONS, Job, parse_lora

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
PLACES = {"none": 0.0, "cpu": 1.0, "nvme": 2.0}


@dataclass(frozen=True)
class Columns:
    """One entry a candidate; sizes in elements, places as in PLACES."""

    stage: Floats
    micro_batch: Floats
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
    attention: Floats  # which of ATTENTIONS; -1 for transformers' choice
    compiled: Floats
    lora: Floats  # the adapters' rank; 0 for full training
    packed: Floats
    tokens: Floats  # of a row, padding included, on average

    def __len__(self) -> int:
        return len(self.stage)


def columns_of(candidates: Sequence[Candidate], job: Job) -> Columns:
    """What decides memory and time, with DeepSpeed's defaults or the user's own config where a candidate is silent."""
    own = _own_values(job.base_config)
    zero = "zero_optimization."
    raws = [candidate.as_dict for candidate in candidates]
    kinds: list[object] = [None, *ATTENTIONS]

    def column(name: str, default: float) -> Floats:
        default = own.get(name, default)
        return np.array([float(raw.get(name, default)) for raw in raws], dtype=np.float64)

    def place(name: str) -> Floats:
        return np.array([PLACES.get(str(raw.get(name, "none")), 1.0) for raw in raws])

    stage = np.array([float(c.stage) for c in candidates])
    overlap = np.array(
        [
            float(raw.get("overlap_comm", own.get("overlap_comm", c.stage == 3)))
            for raw, c in zip(raws, candidates, strict=True)
        ]
    )
    prefetch, max_live, max_reuse = (
        column(zero + name, ZERO_DEFAULTS[zero + name])
        for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    )
    micro_batch = np.array([float(c.micro_batch) for c in candidates])
    packed = np.array([float(raw.get(PACKING, job.packed)) for raw in raws])
    ranks: dict[Any, float] = {None: float(job.lora.rank) if job.lora else 0.0, "none": 0.0}
    loras = [raw.get(LORA) for raw in raws]
    ranks |= {one: float(parse_lora(str(one)).rank) for one in set(loras) - set(ranks)}
    return Columns(
        stage,
        micro_batch,
        np.array([float(c.accumulation) for c in candidates]),
        np.array([float(c.checkpointing) for c in candidates]),
        place("offload_optimizer"),
        place("offload_param"),
        column("reduce_bucket_size", ZERO_DEFAULTS["reduce_bucket_size"]),
        column("sub_group_size", ZERO_DEFAULTS["sub_group_size"]),
        column("contiguous_gradients", ZERO_DEFAULTS["contiguous_gradients"]),
        overlap,
        prefetch,
        max_live,
        max_reuse,
        np.array([float(kinds.index(raw.get(ATTENTION, job.attention))) for raw in raws]) - 1,
        np.array([float(raw.get(COMPILED, job.compiled)) for raw in raws]),
        np.array([ranks[one] for one in loras]),
        packed,
        np.where(
            packed > 0,
            float(job.seq_len),
            padded_tokens(job.lengths, micro_batch) if job.lengths else float(job.seq_len),
        ),
    )


def padded_tokens(lengths: Sequence[tuple[int, int]], micro_batch: Floats) -> Floats:
    """Mean of the longest of `micro_batch` sequences drawn from (tokens, how often): what a collator pads to."""
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
