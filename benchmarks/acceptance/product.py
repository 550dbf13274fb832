"""The whole product: a study of five minutes, its winner trained by plain torchrun, and both measured again in turn.

Training reaches what was measured, within 3 %: first against the study's own figure, then round by round (fidelity.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from fidelity import EFFORT, RATIO_TARGET, SMALL_EFFORT, How, compare

from acceptance.gain import tuned
from acceptance.ground import EXPECTED, Ground, Row
from autotune.search.study import StudyStore

MODEL, BUDGET = "gemma-2-2b", "5m"
STEPS = 12  # of torchrun's trainings, after their warm-up


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)  # the study's runs/
    row, done = tuned(ground, MODEL, "product", ground.choose(BUDGET, "90s"))
    verified = bool(done.report.get("verified"))
    yield {**row, EXPECTED: done.code == 0 and (verified or ground.rehearse)}
    if done.code:
        return
    store = StudyStore.load("product")
    assert store.winner is not None
    assert store.winner.outcome is not None
    found = store.winner.outcome.measurement
    assert found is not None
    how = How(1, ground.choose(STEPS, 2), ground.choose(EFFORT, SMALL_EFFORT))
    rows = compare(store.job, store.hardware, [store.winner.candidate], ground.folder, how, with_script=False)
    trained = rows[0].speeds["torchrun"][0]
    for what, speed in (
        ("the study's figure / torchrun", found.samples_per_second),
        ("a trial now / torchrun", rows[0].speeds["--model"][0]),
    ):
        ratio = speed / trained
        near = abs(ratio - 1) <= RATIO_TARGET
        yield {
            "what": what,
            "candidate": str(store.winner.candidate),
            "samples/s": speed,
            "torchrun samples/s": trained,
            "ratio": ratio,
            EXPECTED: ground.choose(near, None),
        }
