"""Studies and entries for the gallery's tests; none runs anything."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from autotune.gallery.schema import Entry, entry_of
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.problem.space import load_space
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH, VERIFY
from autotune.util.units import GIB
from tests.conftest import make_candidate

SPACE = load_space("default")


def job_of(model: str = "qwen2.5-0.5b", ranks: int = 2, seq_len: int = 1024, **more: Any) -> Job:
    return Job(resolve_model(model), ranks, seq_len, **more)


def ran(job: Job, candidate: Candidate, seconds: float, peak_gib: float = 10.0) -> Outcome:
    """An outcome whose figures go together."""
    samples = candidate.micro_batch * candidate.accumulation * job.ranks / seconds
    tokens = samples * job.tokens_per_sample
    found = Measurement(seconds, 0.01 * seconds, 5, samples, tokens, int(peak_gib * GIB))
    return Outcome(OutcomeKind.OK, Phase.STEP, found, peak_bytes=found.peak_bytes)


def store_of(job: Job, hardware: Hardware) -> StudyStore:
    return StudyStore.in_memory(job, hardware, SPACE)


def tell(store: StudyStore, candidate: Candidate, outcome: Outcome, role: str = SEARCH) -> int:
    number = store.start(candidate, SPACE, role)
    store.finish(number, outcome)
    return number


def small_study(job: Job | None = None, hardware: Hardware | None = None) -> StudyStore:
    """Two configs that run, one of which is the verified winner, one that runs out, and one that was cut short."""
    job = job or job_of()
    store = store_of(job, hardware or named_hardware("rtx4090", job.ranks))
    fast, slow = make_candidate(2, 8), make_candidate(3, 4)
    tell(store, slow, ran(job, slow, 3.0, 8.0))
    tell(store, fast, ran(job, fast, 1.5, 14.0))
    tell(
        store,
        make_candidate(0, 16),
        Outcome(OutcomeKind.OOM_DEVICE, Phase.BACKWARD, missing_bytes=2 * GIB, reason="torch"),
    )
    tell(store, make_candidate(1, 8), Outcome(OutcomeKind.INTERRUPTED, reason="stopped"))
    store.set_winner(tell(store, fast, ran(job, fast, 1.6, 14.5), VERIFY), "verified")
    return store


@cache
def _written() -> str:
    return entry_of(small_study()).text()


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """The text of a good entry with something changed."""
    data = copy.deepcopy(json.loads(_written()))
    change(data)
    return json.dumps(data)


def entry_with(**jobs: Any) -> Entry:
    """A good entry, its job changed."""
    found = Entry.model_validate_json(_written())
    return found.model_copy(update={"job": found.job.model_copy(update=jobs)})


def stored(tmp_path: Path) -> StudyStore:
    """The small study in a database, as `runs/s`."""
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    job, hardware = job_of(), named_hardware("rtx4090", 2)
    store, _ = StudyStore.create_or_resume("s", default_storage(folder), folder, job, hardware, SPACE)
    candidate = make_candidate(2, 8)
    store.set_winner(tell(store, candidate, ran(job, candidate, 1.5, 14.0), VERIFY), "verified")
    return store
