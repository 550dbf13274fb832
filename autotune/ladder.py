"""The recovery ladder: what a training steps down to when memory runs out in the midst of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.export import write_atomically
from autotune.job import Job
from autotune.outcome import Measurement
from autotune.predict.predictor import Predictor
from autotune.space import SearchSpace

# DeepSpeed loads a checkpoint into an engine that partitions its states alike. These knobs leave the partitions alone
# (deepspeed 0.19.8, stage_1_and_2.py and stage3.py); stage, offload and sub-groups do not.
CROSSED = (
    MICRO_BATCH, ACCUMULATION, CHECKPOINTING, "reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients",
    "overlap_comm",
)  # fmt: skip
LESS = 0.95  # of the peak above: a rung that frees less is no step
MOST_RUNGS = 6


@dataclass(frozen=True)
class Rung:
    """One config of the ladder."""

    candidate: Candidate
    peak_bytes: float
    samples_per_second: float
    measured: bool

    def to_json(self, job: Job) -> dict[str, Any]:
        return {
            "candidate": self.candidate.as_dict, "measured": self.measured, "peak_bytes": round(self.peak_bytes),
            "samples_per_second": round(self.samples_per_second, 4), "config": self.candidate.ds_config(job),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rung:
        candidate = Candidate.of(data["candidate"])
        return cls(candidate, data["peak_bytes"], data["samples_per_second"], data["measured"])


def recovery_ladder(
    top: Candidate, space: SearchSpace, job: Job, predictor: Predictor, measured: dict[Candidate, Measurement]
) -> list[Rung]:
    """The config to start from, then ever less memory, at each step the fastest there is.

    Every rung keeps the global batch of `top` exactly and can load its checkpoints. Measured values stand where there
    are any, predicted ones elsewhere.
    """
    candidates = sorted({top, *_compatible(top, space, job)}, key=str)
    table = predictor.table(candidates)
    rungs = []
    for i, candidate in enumerate(candidates):
        seen = measured.get(candidate)
        peak = float(seen.peak_bytes) if seen else float(table.peak[i])
        speed = seen.samples_per_second if seen else float(table.samples[i])
        rungs.append(Rung(candidate, peak, speed, seen is not None))
    ladder = [next(rung for rung in rungs if rung.candidate == top)]
    while len(ladder) < MOST_RUNGS:
        below = [rung for rung in rungs if rung.peak_bytes <= LESS * ladder[-1].peak_bytes]
        if not below:
            break
        ladder.append(max(below, key=lambda rung: rung.samples_per_second))
    return ladder


def _compatible(top: Candidate, space: SearchSpace, job: Job) -> list[Candidate]:
    """Settings of the space that keep the global batch and what checkpoints hold."""
    total = top.micro_batch * top.accumulation
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    if job.script is not None and job.script.profile.get("batch_note"):
        sizes = [top.micro_batch]  # the script does not obey another
    fixed = {name: value for name, value in top.knobs if name not in CROSSED}
    found = []
    for family in [dict(top.family), *space.families()]:
        if {name: value for name, value in family.items() if name not in CROSSED} != fixed:
            continue
        for micro_batch in sizes:
            rung = {MICRO_BATCH: micro_batch, ACCUMULATION: total // micro_batch}
            found.append(Candidate.of({**dict(top.family), **family, **rung}))
    return found


def write_ladder(path: Path, ladder: list[Rung], job: Job) -> None:
    """`NAME.ladder.json`: the rungs, first to last."""
    write_atomically(path, json.dumps([rung.to_json(job) for rung in ladder], indent=2) + "\n")
