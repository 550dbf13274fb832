"""The recovery ladder: fallback configs after an OOM in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from autotune.masking import masked_data
from autotune.predict.features import installed_deepspeed
from autotune.predict.predictor import Predictor
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, EXPANDABLE, MICRO_BATCH, Candidate, Value
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, OutcomeKind
from autotune.problem.space import SearchSpace
from autotune.rank.checkpoints import convertible, layout
from autotune.script.profile import loops_by_hand
from autotune.search.pruning import no_smaller
from autotune.util.bounds import bounded_bytes
from autotune.util.files import write_atomically

# Knobs that a rung may change. Only stage, sub-groups and NVMe determine the layout of checkpoints
# (`autotune.rank.checkpoints.layout`). Other knobs, like round_robin_gradients, stay fixed.
CROSSED = (
    MICRO_BATCH,
    ACCUMULATION,
    CHECKPOINTING,
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "contiguous_gradients",
    "overlap_comm",
    EXPANDABLE,
)
LESS = 0.95  # share of the peak of the rung above; a rung must not exceed it
MOST_RUNGS = 8
_STAGE3 = "zero_optimization.stage3_"  # prefetching and persistence of stage 3, which checkpoints do not contain


@dataclass(frozen=True)
class Rung:
    """One config of the ladder."""

    candidate: Candidate
    peak_bytes: float
    samples_per_second: float
    measured: bool
    host_bytes: float = 0.0  # expected in host memory, per rank; 0 if nothing is offloaded

    def to_json(self, job: Job) -> dict[str, Any]:
        """Return the rung as JSON data, with its DeepSpeed config."""
        return {
            "candidate": self.candidate.as_dict,
            "measured": self.measured,
            "peak_bytes": round(self.peak_bytes),
            "host_bytes": round(self.host_bytes),
            "samples_per_second": round(self.samples_per_second, 4),
            "config": masked_data(self.candidate.ds_config(job)),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rung:
        """Return the rung of JSON data."""
        candidate = Candidate.of(data["candidate"])
        figures = data["peak_bytes"], data["samples_per_second"], data["measured"], data["host_bytes"]
        return cls(candidate, *figures)


def recovery_ladder(
    top: Candidate,
    space: SearchSpace,
    job: Job,
    predictor: Predictor,
    measured: dict[Candidate, Measurement],
    failed: Mapping[Candidate, OutcomeKind] = MappingProxyType({}),
    *,
    convert: bool = False,
    trains_otherwise: Callable[[Candidate], bool] = lambda candidate: False,
) -> list[Rung]:
    """Return the config to start from, then rungs of decreasing memory.

    Each step has the fastest candidate, and the last rung has the smallest peak.

    Every rung keeps the global batch of `top` exactly and can load its checkpoints; with `convert`, after a conversion.
    Measured values take precedence over predicted ones, which are scaled by the ratio of measured to predicted values of
    `top`. A loop by hand may count micro-batches, so its ladder keeps the micro-batch as long as it can.

    Candidates are left out for these reasons:

    - They have `failed`, or train something else than the user's config.
    - They are not measured, and predicted to need no less memory than a device OOM among `failed`.
    - They use the engine of such an OOM or of a rung above, with no smaller micro-batch.
    - They are faster than `top`, which won. Predicted speeds do not exclude the engine of `top`, since its smaller
      micro-batches need less memory for sure.
    """
    compatible = [one for one in _compatible(top, space, job, convert) if _explicit(one) != _explicit(top)]
    below_top = {one for one in compatible if not trains_otherwise(one)}
    candidates = [top, *sorted(below_top - {top}, key=str)]
    by_hand = job.script is not None and loops_by_hand(job.script)
    table = predictor.table(candidates)
    peaks, speeds = table.peak.copy(), table.samples.copy()
    if won := measured.get(top):
        peaks *= won.peak_bytes / peaks[0]
        speeds *= won.samples_per_second / speeds[0]
    for i, candidate in enumerate(candidates):
        if seen := measured.get(candidate):
            peaks[i], speeds[i] = seen.peak_bytes, seen.samples_per_second
    is_measured = np.array([one in measured for one in candidates])
    is_own = np.array([one.family == top.family for one in candidates])
    is_open = (speeds <= speeds[0]) | (is_own & ~is_measured)
    speeds = np.minimum(speeds, speeds[0])
    every = [
        Rung(candidate, float(peaks[i]), float(speeds[i]), candidate in measured, float(table.host_bytes[i]))
        for i, candidate in enumerate(candidates)
    ]
    micro_batches = np.array([candidate.micro_batch for candidate in candidates])
    for i, candidate in enumerate(candidates):
        if failed.get(candidate) is OutcomeKind.OOM_DEVICE:
            is_open &= ((peaks < peaks[i]) | is_measured) & ~no_smaller(candidates, candidate)
        is_open[i] &= candidate not in failed
    ladder, at = [every[0]], 0
    while True:
        is_open &= (peaks <= LESS * peaks[at]) & ~no_smaller(candidates, candidates[at])
        below = np.flatnonzero(is_open)
        if not len(below):
            return ladder
        if len(ladder) == MOST_RUNGS - 1:
            return [*ladder, every[below[np.argmin(peaks[below])]]]
        kept = below[micro_batches[below] == micro_batches[at]]
        if by_hand and len(kept):
            below = kept
        at = int(below[np.argmax(speeds[below])])
        ladder.append(every[at])


def _explicit(candidate: Candidate) -> dict[str, Value]:
    """Return a candidate's settings. Without checkpointing in its space, a candidate may leave it out."""
    return {**candidate.as_dict, CHECKPOINTING: candidate.checkpointing}


def _compatible(top: Candidate, space: SearchSpace, job: Job, convert: bool) -> list[Candidate]:
    """Return settings of the space that keep the global batch and can load the checkpoints of `top`."""
    total = top.rows_per_rank
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    if job.profile.batch_note:
        sizes = [top.micro_batch]  # the script ignores any other batch size
    own, others, deepspeed = top.ds_config(job), _others(dict(top.family)), installed_deepspeed(job.interpreter)
    mine = layout(own)
    found = []
    for family in [dict(top.family), *space.families()]:
        if _others(family) != others:
            continue
        config = Candidate.of(family).ds_config(job)
        if layout(config) != mine and not (convert and convertible(own, config, deepspeed)):
            continue
        found += [
            Candidate.of({**family, MICRO_BATCH: micro_batch, ACCUMULATION: total // micro_batch})
            for micro_batch in sizes
        ]
    return found


def _others(family: dict[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in family.items() if name not in CROSSED and not name.startswith(_STAGE3)}


def stored_ladder(folder: Path, study: str) -> list[Rung]:
    """Return the ladder that `run` wrote into a study's folder; none if it wrote none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [Rung.from_json(one) for one in json.loads(bounded_bytes(ladder_path(folder, study), stored=True))]
    return []


def ladder_path(folder: Path, study: str) -> Path:
    """Return the path of a study's ladder, wherever its winner was exported to. `run` writes it and `launch` reads it."""
    return folder / f"{study}.ladder.json"


def write_ladder(path: Path, ladder: list[Rung], job: Job) -> None:
    """Write `NAME.ladder.json`: the rungs, first to last."""
    write_atomically(path, json.dumps([rung.to_json(job) for rung in ladder], indent=2) + "\n")
