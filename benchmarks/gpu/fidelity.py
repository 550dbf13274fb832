"""The winner of `study` trained by plain torchrun, twice, around a trial of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from autotune.search.study import StudyStore
from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.product import against_torchrun
from benchmarks.gpu.study import STUDY


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder.parent / "study")
    yield from against_torchrun(ground, StudyStore.load(STUDY), steps=25, max_seconds=10.0)
