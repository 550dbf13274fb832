"""`autotune report`: a study as one HTML file."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path

from autotune.errors import UserError
from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import stored_trace
from autotune.results.plan import Plan
from autotune.results.report.confidential import confidential, without_secrets
from autotune.results.report.gather import Searched, study_report
from autotune.results.report.page import plan_page, study_page, write_page
from autotune.results.report.planned import plan_report
from autotune.results.targets import check_out
from autotune.search.records import uncollected
from autotune.search.storage import failures_in_one_line, output_file
from autotune.search.study import StudyStore


@uncollected()
def report_study(study: str, storage: str | None, out: Path | None, *, hide: bool = False) -> Path:
    """Write the page of a study to `out`, or as `NAME.html` into the study's folder, and return its path.

    Args:
        hide: leave out paths, host names and the model's name; the file is then `confidential.html`.

    Raises:
        UserError: there is no such study, or the file cannot be written.
    """
    store = StudyStore.load(study, storage)
    name = "confidential" if hide else store.name
    out = out or output_file(store.folder, f"{name}.html")
    check_out(out)
    with failures_in_one_line():
        write_study(store, out, hide=hide)
    return out


def write_study(
    store: StudyStore,
    out: Path,
    *,
    trace_of: Predictor | None = None,
    searched: Searched | None = None,
    hide: bool = False,
) -> None:
    """Write the page of an open study.

    Args:
        trace_of: a predictor of the same job and hardware, whose trace is used.
        searched: the space of the present call; None: the study's.
        hide: leave out paths, host names and the model's name.

    Raises:
        UserError: the file cannot be written.
    """
    predictor, why_none = _predictor(store, trace_of)
    report = without_secrets(study_report(store, searched or _searched(store), predictor, why_none))
    if hide:
        report = confidential(report, store.job, store.folder)
    write_page(study_page(report), out)


def _predictor(store: StudyStore, trace_of: Predictor | None) -> tuple[Predictor | None, str]:
    """Return a predictor without observations, or None and the reason.

    No code of the study runs, so that a prediction needs a stored trace.
    """
    if not any(record.outcome for record in store.records()):
        return None, ""
    job, hardware = store.job, store.hardware
    tracer = trace_of.tracer if trace_of else partial(stored_trace, versions=store.versions)
    try:
        return Predictor(job, hardware, trace_of.trace if trace_of else tracer(job, device=hardware.device), tracer), ""
    except UserError as error:
        return None, f"There is no prediction: {error}"


def _searched(store: StudyStore) -> Searched | None:
    """Return the study's space as searched; None if this version cannot read it."""
    with suppress(UserError):
        space = store.searched_space()
        return Searched(space, tuple(space.candidates(store.job)))
    return None


def write_plan(plans: list[Plan], out: Path) -> None:
    """Write the page of a plan, or a comparison of several.

    Raises:
        UserError: the file cannot be written.
    """
    write_page(plan_page(plan_report(plans)), out)


def open_in_browser(path: Path) -> bool:
    """Open the file in a browser; return whether one was found."""
    return webbrowser.open(path.resolve().as_uri())
