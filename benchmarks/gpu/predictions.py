"""Peak and step time of six trials of two models against what was predicted, before anything was measured and after the
trials so far."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from autotune.executors.base import Effort
from autotune.predict.trace import traced_predictor
from autotune.problem.job import Lora
from autotune.problem.outcome import OutcomeKind
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import as_row, beside, candidate
from benchmarks.trials.ranks import opened

CHECKPOINTED = {"activation_checkpointing": True}
OFFLOADED = {"offload_optimizer": "cpu"}
Knobs = tuple[int, int, dict[str, Any]]  # stage, micro-batch, the rest
_QUICK = Effort(min_steps=5, max_steps=20, min_seconds=1.5, max_seconds=6.0)
_REHEARSED = Effort(min_steps=2, max_steps=2, min_seconds=0.0)


@dataclass(frozen=True)
class Tried:
    """Candidates of one job."""

    model: str
    tokens: int
    knobs: tuple[Knobs, ...] = field(default=())
    lora_rank: int | None = None


JOBS = (
    Tried("smollm2-360m", 1024, ((0, 4, {}), (3, 16, {}), (2, 32, CHECKPOINTED))),
    Tried("qwen2.5-1.5b", 1024, ((1, 4, CHECKPOINTED), (3, 2, {}), (2, 4, {**CHECKPOINTED, **OFFLOADED}))),
)
REHEARSED = (Tried("tiny-llama", 32, ((2, 1, CHECKPOINTED),)),)


def run(ground: Ground) -> Iterator[Row]:
    yield from predicted(ground, ground.choose(JOBS, REHEARSED), None, ground.choose(_QUICK, _REHEARSED), 75.0)


def predicted(
    ground: Ground, jobs: Sequence[Tried], cap_bytes: int | None, effort: Effort, seconds: float
) -> Iterator[Row]:
    """Yield each trial's end, peak and step time with both predictions; a trial has at most so many seconds."""
    for place, one_job in enumerate(jobs):
        rank = one_job.lora_rank
        job = ground.job(one_job.model, one_job.tokens, lora=Lora(rank) if rank else None)
        hardware = ground.hardware(cap_bytes)
        candidates = [candidate(ground, stage, size, **knobs) for stage, size, knobs in one_job.knobs]
        predictor = traced_predictor(job, hardware)
        first = predictor.predict_many(candidates)
        with opened(job, hardware, ground.folder / str(place), candidates) as executor:
            for one, prior in zip(candidates, first, strict=True):
                calibrated = predictor.predict(one)
                with closing(executor.session(one, uuid.uuid4().hex[:8])) as session:
                    outcome = session.measure(one, effort, seconds)
                predictor.observe(one, outcome)
                name = f"{job.model.name}{f' LoRA r={rank}' if rank else ''}"
                row: Row = {"job": name, "candidate": str(one), **as_row(outcome), **beside(prior, outcome)}
                row["calibrated"] = beside(calibrated, outcome)
                yield {**row, EXPECTED: outcome.kind in (OutcomeKind.OK, OutcomeKind.OOM_DEVICE)}
