"""Studies for tests of their pages: what is in them is told by their names. None runs anything."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from autotune.commands.study_output import write_study
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.problem.space import SearchSpace, load_space
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import AS_IS, RESUME, SEARCH, VERIFY
from autotune.util.units import GIB
from tests.conftest import make_candidate, make_job

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>&\"'"


@functools.cache
def space() -> SearchSpace:
    return load_space("default")


def machine() -> Hardware:
    card = ("GPU-01234567-89ab-cdef-0123-456789abcdef",)
    return Hardware("cuda", "rtx3090", 2, 24 * GIB, None, 64 * GIB, "rtx3090", gpus=card)


def measured(speed: float, peak_gib: float, seconds: float = 30.0, **more: object) -> Outcome:
    facts = {
        "torch_allocated_bytes": int(0.7 * peak_gib * GIB),
        "torch_reserved_bytes": int(0.9 * peak_gib * GIB),
        **more,
    }
    found = Measurement(8 / speed, 0.1 / speed, 5, speed, 32 * speed, int(peak_gib * GIB), **facts)  # type: ignore[arg-type]
    return Outcome(
        OutcomeKind.OK, Phase.STEP, found, seconds=seconds, outside_seconds=seconds / 2, peak_bytes=found.peak_bytes
    )


def ran_out(phase: Phase, missing_gib: float, text: str = "torch.OutOfMemoryError") -> Outcome:
    missing = int(missing_gib * GIB)
    return Outcome(
        OutcomeKind.OOM_DEVICE, phase, None, "ran out", text, missing_bytes=missing, rank=1, seconds=9.0, log="/logs/7"
    )


def tell(store: StudyStore, candidate: Candidate, outcome: Outcome, role: str = SEARCH, note: str = "a guess") -> int:
    number = store.start(candidate, space(), role, note)
    store.finish(number, outcome)
    return number


def in_memory(model: str = "tiny-llama", hardware: Hardware | None = None) -> StudyStore:
    job = make_job()
    named = dataclasses.replace(job, model=dataclasses.replace(job.model, name=model))
    return StudyStore.in_memory(named, hardware or machine(), space())


def open_study(runs: Path, name: str = "s") -> StudyStore:
    """An empty one in a database."""
    folder = runs / "s"
    folder.mkdir(parents=True)
    job = make_job()
    store, _ = StudyStore.create_or_resume(name, default_storage(folder), folder, job, machine(), space())
    return store


def everything(store: StudyStore | None = None, text: str = "an error") -> StudyStore:
    """What fits, lies above the ceiling, ran out in several phases, hangs, crashes with a `text` or was cut short; a verified
    winner that resumes from a checkpoint; reasons for what was not tried."""
    store = store or in_memory()
    store.note_command(f"autotune run --study {text}")
    store.begin_call(900)
    winner = make_candidate(0, 8)
    tell(store, make_candidate(0, 4), measured(100, 11), note=AS_IS)
    tell(store, winner, measured(160, 17))
    tell(store, make_candidate(0, 16), measured(170, 23.5))
    tell(store, make_candidate(0, 32), ran_out(Phase.FORWARD, 4.0))
    tell(store, make_candidate(1, 32, overlap_comm=True), ran_out(Phase.STEP, 1.5))
    tell(store, make_candidate(3, 64, overlap_comm=False), ran_out(Phase.INIT, 40.0))
    tell(store, make_candidate(1, 8, overlap_comm=True), measured(140, 15))
    tell(store, make_candidate(1, 8, overlap_comm=False), measured(120, 14.5))
    tell(store, make_candidate(2, 8, overlap_comm=True, offload_optimizer="cpu"), measured(60, 9, alloc_retries=2))
    tell(
        store,
        make_candidate(3, 8, overlap_comm=True),
        Outcome(OutcomeKind.TIMEOUT, Phase.BACKWARD, None, text, text, seconds=60),
    )
    tell(
        store,
        make_candidate(3, 4, overlap_comm=True),
        Outcome(OutcomeKind.CRASH, Phase.FORWARD, None, text, text, rank=0),
    )
    tell(store, make_candidate(2, 4, overlap_comm=True), Outcome(OutcomeKind.INTERRUPTED, reason=text, evidence=text))
    best = tell(store, winner, measured(158, 17.2), VERIFY, "verification in a fresh process")
    tell(store, winner, Outcome(OutcomeKind.OK, Phase.STEP, peak_bytes=int(18 * GIB), seconds=20), RESUME)
    store.set_winner(best, "verified")
    store.note_skips({f"crashes: {text}": 12, "needs no less memory than z0 mb32 ga1, which ran out": 5})
    store.update_call(400.0, "budget used")
    return store


def large(trials: int = 500) -> StudyStore:
    """Many trials, in memory: a database would take a minute."""
    store = in_memory()
    store.begin_call(7200)
    options = [
        make_candidate(stage, size, accumulation, overlap_comm=overlap, reduce_bucket_size=bucket)
        for stage in (1, 2, 3)
        for size in (1, 2, 4, 8, 16, 32)
        for accumulation in (1, 2, 4, 8)
        for overlap in (True, False)
        for bucket in (500_000, 5_000_000, 50_000_000, 500_000_000)
    ]
    best = 0
    for at, candidate in enumerate(options[:trials]):
        peak = 2.0 + 0.75 * candidate.micro_batch - candidate.stage * 0.3 + (at % 7) * 0.01
        outcome = (
            measured(40 + candidate.micro_batch * 3 + at % 11, peak) if peak < 24 else ran_out(Phase.BACKWARD, 1.0)
        )
        number = tell(store, candidate, outcome, note="predicted gain 0.5 %")
        best = number if outcome.ok and candidate.micro_batch == 16 else best
    store.set_winner(best, "measured, not verified")
    store.update_call(7000.0, "budget used")
    return store


def page(store: StudyStore, out: Path) -> Path:
    """Writes the page of a study."""
    write_study(store, out)
    return out
