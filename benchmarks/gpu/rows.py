"""A trial as `autotune run` makes it, as a row: how it ended, and what it measured."""

from __future__ import annotations

from typing import Any

from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.outcome import Outcome
from autotune.util.units import GIB
from benchmarks.gpu.ground import Ground, Row

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
