"""Studies made without running anything, for tests of what is shown and exported of them."""

from __future__ import annotations

from pathlib import Path

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
    and the winner, verified."""
    folder = runs / name
    folder.mkdir(parents=True)
    space = load_space("cpu_demo")
    store, _ = StudyStore.create_or_resume(name, default_storage(folder), folder, make_job(), detect("cpu", 2), space)
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
