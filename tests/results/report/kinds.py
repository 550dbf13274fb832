"""The pages that are looked at in a browser, by kind; each is written into a folder and its path is returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import Job
from autotune.results.plan import Plan, WayPlan
from autotune.results.report.html import AttemptShown, TrainingReport, plan_page, training_page, write_page
from autotune.search.study import StudyStore
from autotune.util.units import GIB
from tests.conftest import make_candidate, make_job
from tests.results.report.studies import EVIL, everything, in_memory, large, machine, measured, page, tell


def _of(made: Callable[[], StudyStore]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir()
        return page(made(), folder / "page.html")

    return write


def _one_trial() -> StudyStore:
    store = in_memory()
    store.set_winner(tell(store, make_candidate(0, 1), measured(10, 3)), "measured, not verified")
    return store


def _training(folder: Path) -> Path:
    folder.mkdir()
    first = AttemptShown(
        0, "z2 mb8 ga1", 40, 90.0, f"oom_device: {EVIL}", "", 20.0 * GIB, [(t, t, 20 * GIB) for t in range(40)]
    )
    last = AttemptShown(
        1, "z2 mb4 ga2", 60, 150.0, "done", "out/checkpoint-40", 14.0 * GIB, [(t, t, 14 * GIB) for t in range(60)]
    )
    ladder = (("z2 mb8 ga1", True, 20.0 * GIB), ("z2 mb4 ga2", False, 14.0 * GIB))
    report = TrainingReport(
        EVIL, "a job", "2 x rtx3090", 24 * GIB, 0, ("training ended with exit code 0",), (first, last), ladder
    )
    write_page(training_page(report), folder / "page.html")
    return folder / "page.html"


def _plan_of(job: Job, hardware: Hardware) -> Plan:
    predictor = Predictor(job, hardware, closed_form_trace(job, "a test"))
    best = predictor.predict_many([make_candidate(0, 8), make_candidate(3, 8)])
    return Plan(job, hardware, best, (WayPlan(0, False, False, best[0], best[0], None),), EVIL)


def _plans(*hardware: Hardware) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir()
        write_page(plan_page([_plan_of(make_job(), one) for one in hardware]), folder / "page.html")
        return folder / "page.html"

    return write


KINDS: dict[str, Callable[[Path], Path]] = {
    "everything": _of(everything),
    "evil": _of(lambda: everything(in_memory(EVIL), EVIL)),
    "empty": _of(in_memory),
    "one trial": _of(_one_trial),
    "500 trials": _of(large),
    "training": _training,
    "plan": _plans(machine()),
    "comparison": _plans(machine(), named_hardware("a100-80gb", 2)),
}
