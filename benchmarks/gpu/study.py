"""`autotune run` from end to end: no cap, the default space, a verified winner. Its folder is read by `fidelity`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.gpu.gain import tuned
from benchmarks.gpu.ground import EXPECTED, Ground, Row

MODEL, STUDY, BUDGET = "smollm2-360m", "first", "150s"


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)  # the study's runs/
    row, done = tuned(ground, MODEL, STUDY, ground.choose(BUDGET, "180s"), uncapped=True)
    yield {**row, "stderr": [done.stderr[-6000:]], EXPECTED: done.code == 0 and bool(done.report.get("verified"))}
