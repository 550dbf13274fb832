"""A trial as `autotune run` makes it, as a row: how it ended, and what it measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.job import Job
from autotune.problem.outcome import Outcome
from autotune.util.units import GIB
from benchmarks.gpu.ground import Ground, Row
from benchmarks.trials.job_variants import step_seconds
from benchmarks.trials.ranks import opened

DEADLINE_SECONDS = 150.0
_CALM = MeasureSpec(min_steps=5, max_steps=40, min_seconds=3.0, max_seconds=15.0)
_REHEARSED = MeasureSpec(min_steps=2, max_steps=2, min_seconds=0.0)
_SMALL = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, "sub_group_size": 1_000_000}


def measure_spec(ground: Ground) -> MeasureSpec:
    return ground.choose(_CALM, _REHEARSED)


def candidate(ground: Ground, stage: int, micro_batch: int, accumulation: int = 1, **knobs: Any) -> Candidate:
    """With DeepSpeed's own bucket sizes; in rehearsal with small ones and at most two sequences."""
    size = ground.choose(micro_batch, min(micro_batch, 2))
    batch = {MICRO_BATCH: size, ACCUMULATION: accumulation}
    return Candidate.of({"zero_stage": stage, **ground.choose({}, _SMALL), **batch, **knobs})


def measured(ground: Ground, job: Job, engines: Iterable[Sequence[Candidate]]) -> Iterator[Row]:
    """Measure candidates, those of a sequence in one engine, beside what was predicted for them."""
    hardware = ground.hardware()
    with opened(
        job, hardware, ground.folder / job.model.name, [one for engine in engines for one in engine]
    ) as executor:
        for number, engine in enumerate(engines):
            with closing(executor.session(engine[0], str(number))) as session:
                for one in engine:
                    row = as_row(session.measure(one, measure_spec(ground), DEADLINE_SECONDS))
                    yield {"candidate": str(one), "predicted step s": step_seconds(job, hardware, one), **row}


def as_row(outcome: Outcome) -> Row:
    """Figures for the table; the Outcome is kept whole beside them."""
    row: Row = {"outcome": outcome.kind.value, "trial s": outcome.seconds}
    if outcome.measurement is None:
        return row | {"why": outcome.reason, "evidence": outcome.evidence, "whole": outcome.to_json()}
    found = outcome.measurement
    row |= {
        "peak GiB": found.peak_bytes / GIB,
        "reserved GiB": _gib(found.torch_reserved_bytes),
        "overhead GiB": _gib(found.overhead_bytes),
        "NVML peak GiB": _gib(found.nvml_peak_bytes),
        "step s": found.step_seconds,
        "± s": found.step_seconds_spread,
        "samples/s": found.samples_per_second,
        "MFU": found.mfu,
    }
    return row | {"whole": outcome.to_json()}


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
