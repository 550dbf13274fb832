"""Studies made without running anything, for tests of what is shown and exported of them."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.problem.space import load_space
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import VERIFY
from autotune.util.units import MIB
from tests.conftest import make_candidate, make_job


def study_of_every_kind(runs: Path, kinds: tuple[OutcomeKind, ...] = tuple(OutcomeKind), name: str = "s") -> StudyStore:
    """A study in `runs`: a trial of each kind of outcome; where something fits also one that is slower than the winner,
    and the winner, verified. It is written once for a process and copied, because every trial waits for the disk."""
    folder, made = runs / name, _written(kinds, name)
    if (made / default_storage(folder).rpartition("/")[2]).exists():  # else the folder's file system needs a journal
        shutil.copytree(made, folder)
        with suppress(UserError):  # the test's environment has other watched variables than that of the first caller
            return _opened(folder)
        shutil.rmtree(folder)
    return _write(folder, kinds)


@functools.cache
def _written(kinds: tuple[OutcomeKind, ...], name: str) -> Path:
    base, owner = Path(tempfile.mkdtemp(prefix="study-of-tests-")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(base, ignore_errors=True))
    _write(base / name, kinds).leave()
    return base / name


def _opened(folder: Path) -> StudyStore:
    space = load_space("cpu_demo")
    store, _ = StudyStore.create_or_resume(
        folder.name, default_storage(folder), folder, make_job(), detect("cpu", 2), space
    )
    return store


def _write(folder: Path, kinds: tuple[OutcomeKind, ...]) -> StudyStore:
    folder.mkdir(parents=True)
    store, space = _opened(folder), load_space("cpu_demo")
    store.begin_call(60)
    for at, kind in enumerate(kinds):
        measured = Measurement(1.0, 0.01, 5, 8.0 + at, 256.0, 300 * MIB, mfu=0.4, model_tflops_per_gpu=1.0)
        outcome = Outcome(
            kind, Phase.STEP, measured if kind is OutcomeKind.OK else None, "why", "evidence", missing_bytes=5
        )
        store.finish(store.start(make_candidate(at % 4, 1 + at), space, note="a note"), outcome)
    if OutcomeKind.OK not in kinds:
        return store
    slower = Outcome(OutcomeKind.OK, measurement=Measurement(2.0, 0.01, 5, 4.0, 128.0, 200 * MIB))
    store.finish(store.start(make_candidate(0, 7), space), slower)
    best = store.start(make_candidate(0, 1), space, VERIFY)
    store.finish(best, Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 8.0, 160.0, 300 * MIB)))
    store.set_winner(best, "verified")
    store.note_skips({"needs more": 5})
    store.update_call(33.0, "budget used")
    return store
