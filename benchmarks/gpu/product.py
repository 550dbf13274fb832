"""The whole product: a study of five minutes, and its winner trained by plain torchrun with what autotune prints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from autotune.search.study import StudyStore
from benchmarks.gpu.gain import tuned
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.trials.fidelity import EFFORT, RATIO_TARGET, SMALL_EFFORT, measured, trained
from benchmarks.trials.ranks import opened

MODEL, BUDGET = "gemma-2-2b", "5m"
STUDY_TARGET = 0.05  # of a study's figure: it was measured minutes before


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)  # the study's runs/
    row, done = tuned(ground, MODEL, "product", ground.choose(BUDGET, "90s"))
    yield {**row, EXPECTED: bool(done.report.get("verified"))}
    if done.code == 0:
        yield from against_torchrun(ground, StudyStore.load("product"), steps=12, max_seconds=EFFORT.max_seconds)


def against_torchrun(ground: Ground, store: StudyStore, steps: int, max_seconds: float) -> Iterator[Row]:
    """Yield samples a second of the study's winner over those of plain torchrun: the study's own figure, and those of a trial
    between two trainings, which is to agree with their mean within 3 %.

    Args:
        steps: of each training, after its warm-up.
        max_seconds: of the trial's measurement.
    """
    assert store.winner is not None
    winner, outcome = store.winner.candidate, store.winner.outcome
    assert outcome is not None
    assert outcome.measurement is not None
    steps = ground.choose(steps, 2)
    effort = ground.choose(dataclasses.replace(EFFORT, max_seconds=max_seconds), SMALL_EFFORT)
    first, _ = trained(store.job, winner, steps, store.hardware.device)
    found = outcome.measurement.samples_per_second
    yield _ratio(ground, "the study's figure / torchrun", str(winner), found, first, STUDY_TARGET)
    with opened(store.job, store.hardware, ground.folder / "again", [winner]) as executor:
        (now,) = measured(executor, winner, effort)
    yield {"what": "a trial now", "candidate": str(winner), "samples/s": now}
    second, _ = trained(store.job, winner, steps, store.hardware.device)
    what = "a trial now / the mean of both torchruns"
    row = _ratio(ground, what, str(winner), now, (first + second) / 2, RATIO_TARGET)
    yield {**row, "torchrun, second / first": second / first}


def _ratio(ground: Ground, what: str, candidate: str, speed: float, torchrun: float, target: float) -> Row:
    ratio = speed / torchrun
    row: Row = {"what": what, "candidate": candidate, "samples/s": speed, "torchrun samples/s": torchrun}
    return {**row, "ratio": ratio, EXPECTED: ground.choose(abs(ratio - 1) <= target, None)}
