"""The winner of `study` trained by plain torchrun and measured again; without that study a fixed candidate."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator

from autotune.errors import UserError
from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.search.study import StudyStore
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import candidate
from benchmarks.gpu.study import MODEL, STUDY
from benchmarks.trials.fidelity import MEASURE_SPEC, RATIO_TARGET, SMALL_SPEC, measured, trained
from benchmarks.trials.ranks import WARMUP_STEPS, opened

TOKENS = 1024
SECONDS = 8.0  # of the measured steps of each training and trial
STUDY_TARGET = 0.05  # of a study's figure: it was measured minutes before
LEAST_STEPS = 3  # of a training that are counted, and of a trial's


def run(ground: Ground) -> Iterator[Row]:
    earlier = ground.folder.parent / "study"
    os.chdir(earlier if earlier.is_dir() else ground.folder)
    try:
        store = StudyStore.load(STUDY)
    except UserError:  # `study` has not run here, or came to nothing
        store = None
    if store and store.winner and store.winner.outcome and store.winner.outcome.measurement:
        known = store.winner.outcome.measurement.samples_per_second
        yield from against_torchrun(ground, store.job, store.hardware, store.winner.candidate, known, SECONDS)
    else:
        one = candidate(ground, 2, 16)
        yield from against_torchrun(ground, ground.job(MODEL, TOKENS), ground.hardware(), one, None, SECONDS)


def against_torchrun(
    ground: Ground, job: Job, hardware: Hardware, one: Candidate, known: float | None, seconds: float
) -> Iterator[Row]:
    """Yield samples a second of a candidate's trials over those of plain torchrun between them.

    The trial after the training, and the mean of both trials, are to agree with it within 3 %.

    Args:
        known: the speed that a study has measured; None: a trial before the training measures it.
        seconds: of the measured steps of each training and trial. Long steps are at least LEAST_STEPS.
    """
    with opened(job, hardware, ground.folder / "again", [one]) as executor:
        samples = job.ranks * one.micro_batch * one.accumulation
        if known is None:
            (before,) = measured(executor, one, spec_of(ground, seconds))
            yield {"what": "a trial before", "candidate": str(one), "samples/s": before}
        else:
            before = known
        steps = max(LEAST_STEPS, math.ceil(seconds * before / samples))
        steps, warmup = ground.choose(steps, 2), max(2, min(WARMUP_STEPS, steps // 2))
        plain, _ = trained(job, one, steps, hardware.device, warmup)
        what, target = ("a trial before", RATIO_TARGET) if known is None else ("the study's figure", STUDY_TARGET)
        row = _ratio(ground, f"{what} / torchrun", str(one), before, plain, target)
        yield {**row, "torchrun steps": steps, "torchrun warm-up": warmup}
        (after,) = measured(executor, one, spec_of(ground, seconds))
    yield _ratio(ground, "a trial after / torchrun", str(one), after, plain, RATIO_TARGET)
    if known is None:
        yield _ratio(ground, "the mean of both trials / torchrun", str(one), (before + after) / 2, plain, RATIO_TARGET)


def spec_of(ground: Ground, seconds: float) -> MeasureSpec:
    """Return the spec of a trial whose measured steps take so many seconds."""
    real = dataclasses.replace(MEASURE_SPEC, min_steps=LEAST_STEPS, min_seconds=seconds / 2, max_seconds=seconds)
    return ground.choose(real, SMALL_SPEC)


def _ratio(ground: Ground, what: str, candidate: str, speed: float, torchrun: float, target: float) -> Row:
    ratio = speed / torchrun
    row: Row = {"what": what, "candidate": candidate, "samples/s": speed, "torchrun samples/s": torchrun}
    return {**row, "ratio": ratio, EXPECTED: ground.choose(abs(ratio - 1) <= target, None)}
