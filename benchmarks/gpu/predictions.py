"""Peak and step time of six trials of two models against what was predicted, before anything was measured and after the
trials so far. The models are traced beside the first trials."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from autotune.executors.base import MeasureSpec
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Lora
from autotune.problem.outcome import OutcomeKind
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import as_row, beside, candidate
from benchmarks.trials.ranks import opened

CHECKPOINTED = {"activation_checkpointing": True}
OFFLOADED = {"offload_optimizer": "cpu"}
Knobs = tuple[int, int, int, dict[str, Any]]  # stage, micro-batch, accumulation, the rest
QUICK = MeasureSpec(min_steps=5, max_steps=20, min_seconds=1.5, max_seconds=6.0)
QUICK_REHEARSED = MeasureSpec(min_steps=2, max_steps=2, min_seconds=0.0)


@dataclass(frozen=True)
class Tried:
    """Candidates of one job."""

    model: str
    tokens: int
    knobs: tuple[Knobs, ...] = field(default=())
    lora_rank: int | None = None


JOBS = (
    Tried("smollm2-360m", 1024, ((0, 4, 1, {}), (3, 16, 1, {}), (2, 32, 1, CHECKPOINTED))),
    Tried("qwen2.5-1.5b", 1024, ((1, 4, 1, CHECKPOINTED), (3, 2, 1, {}), (2, 4, 1, {**CHECKPOINTED, **OFFLOADED}))),
)
REHEARSED = (Tried("tiny-llama", 32, ((2, 1, 1, CHECKPOINTED),)),)


def run(ground: Ground) -> Iterator[Row]:
    yield from predicted(ground, ground.choose(JOBS, REHEARSED), None, ground.choose(QUICK, QUICK_REHEARSED), 75.0)


def predicted(
    ground: Ground, jobs: Sequence[Tried], cap_bytes: int | None, measure_spec: MeasureSpec, seconds: float
) -> Iterator[Row]:
    """Yield each trial's end, peak and step time with both predictions; a trial has at most so many seconds."""
    prepared = [prepare(ground, one, cap_bytes) for one in jobs]
    with ThreadPoolExecutor(len(prepared)) as pool:
        # a trace takes seconds of one core, as long as a fork server needs for its start
        tracing = [pool.submit(traced_predictor, job, hardware) for job, hardware, _ in prepared]
        for place, (job, hardware, candidates) in enumerate(prepared):
            with opened(job, hardware, ground.folder / str(place), candidates) as executor:
                predictor = tracing[place].result()
                first = predictor.predict_many(candidates)
                for one, prior in zip(candidates, first, strict=True):
                    calibrated = predictor.predict(one)
                    with closing(executor.session(one, uuid.uuid4().hex[:8])) as session:
                        outcome = session.measure(one, measure_spec, seconds)
                    predictor.observe(one, outcome)
                    name = f"{job.model.name}{f' LoRA r={job.lora.rank}' if job.lora else ''}"
                    row: Row = {"job": name, "tokens": job.seq_len, "candidate": str(one)}
                    row |= {**as_row(outcome), **beside(prior, outcome), "calibrated": beside(calibrated, outcome)}
                    yield {**row, EXPECTED: outcome.kind in (OutcomeKind.OK, OutcomeKind.OOM_DEVICE)}


def prepare(ground: Ground, tried: Tried, cap_bytes: int | None) -> tuple[Job, Hardware, list[Candidate]]:
    job = ground.job(tried.model, tried.tokens, lora=Lora(tried.lora_rank) if tried.lora_rank else None)
    candidates = [candidate(ground, stage, size, steps, **knobs) for stage, size, steps, knobs in tried.knobs]
    return job, ground.hardware(cap_bytes), candidates
