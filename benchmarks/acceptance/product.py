"""The whole product: a study of five minutes, and its winner trained by plain torchrun with what autotune prints.

Training reaches what was measured, within 3 %: the study's own figure, and that of a trial right after the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from fidelity import EFFORT, RATIO_TARGET, SMALL_EFFORT, measured, trained
from ranks import opened

from acceptance.gain import tuned
from acceptance.ground import EXPECTED, Ground, Row
from autotune.search.study import StudyStore

MODEL, BUDGET = "gemma-2-2b", "5m"
STEPS = 12  # of torchrun's training, after its warm-up


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)  # the study's runs/
    row, done = tuned(ground, MODEL, "product", ground.choose(BUDGET, "90s"))
    yield {**row, EXPECTED: bool(done.report.get("verified"))}
    if done.code:
        return
    store = StudyStore.load("product")
    assert store.winner is not None
    winner, outcome = store.winner.candidate, store.winner.outcome
    assert outcome is not None
    assert outcome.measurement is not None
    torchrun, _ = trained(store.job, winner, ground.choose(STEPS, 2), store.hardware.device)

    def against(what: str, speed: float) -> Row:
        ratio = speed / torchrun
        row: Row = {"what": f"{what} / torchrun", "candidate": str(winner), "samples/s": speed}
        row |= {"torchrun samples/s": torchrun, "ratio": ratio}
        return {**row, EXPECTED: ground.choose(abs(ratio - 1) <= RATIO_TARGET, None)}

    yield against("the study's figure", outcome.measurement.samples_per_second)
    with opened(store.job, store.hardware, ground.folder / "again", [winner]) as executor:
        (now,) = measured(executor, winner, ground.choose(EFFORT, SMALL_EFFORT))
        yield against("a trial now", now)
