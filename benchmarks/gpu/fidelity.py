"""The winner of `study` trained by plain torchrun and measured again; without that study a fixed candidate."""

from __future__ import annotations

import os
from collections.abc import Iterator

from autotune.errors import UserError
from autotune.search.study import StudyStore
from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.product import against_torchrun
from benchmarks.gpu.rows import candidate
from benchmarks.gpu.study import MODEL, STUDY

TOKENS = 1024
SECONDS = 8.0  # of the measured steps of each training and trial


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
