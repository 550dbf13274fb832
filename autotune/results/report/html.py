"""One HTML file from a study."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from autotune._version import __version__
from autotune.results.console import knob_words
from autotune.results.report import figures
from autotune.results.report.build import value_text
from autotune.results.report.model import StudyReport, Trial
from autotune.util.units import format_bytes, format_duration

# -- page --------------------------------------------------------------------------------------------------------------
#
# Fill the templates: one HTML file with its style, script and data inside, which loads nothing from a network.


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.results.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"size": format_bytes, "duration": format_duration, "shown": value_text, "knob": knob_words}
    return made


@cache
def _part(name: str) -> str:
    """Read a style or script that is inserted unchanged."""
    return (resources.files("autotune.results.report") / "templates" / name).read_text(encoding="utf-8").strip()


def _allowed(script: str) -> str:
    """Return the hash by which a content security policy permits a script. The browser runs no other script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def study_page(report: StudyReport) -> str:
    """Return the HTML of a study's page."""
    theme, script, style = (_part(name) for name in ("theme.js", "page.js", "page.css"))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {_allowed(theme)} {_allowed(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"theme": Markup(theme), "script": Markup(script), "style": Markup(style), "policy": policy}
    return (
        _environment()
        .get_template("study.html.j2")
        .render(
            **parts,
            version=__version__,
            report=report,
            title=f"{report.study}: {report.model}",
            speed=figures.speed_against_memory(report),
            data=as_data(study_data(report)),
        )
    )


def as_data(data: Any) -> Markup:
    """Return JSON that is safe inside HTML: it cannot end the element or begin a tag."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), default=str)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


_NUMBERS = tuple(f.name for f in dataclasses.fields(Trial) if f.name != "knobs")


def study_data(report: StudyReport) -> dict[str, Any]:
    """Return the data that the page offers as JSON and CSV: the study's settings, and its trials by columns, exact.

    Bytes and seconds.
    """
    knobs = sorted({name for trial in report.trials for name in trial.knobs})
    rows = [
        [*(_short(getattr(trial, name)) for name in _NUMBERS), *(trial.knobs.get(name) for name in knobs)]
        for trial in report.trials
    ]
    columns = [*_NUMBERS, *(f"knob.{name}" for name in knobs)]
    return {
        "study": report.study,
        "model": report.model,
        "machine": str(report.hardware),
        "autotune": __version__,
        "capacity_bytes": report.hardware.capacity_bytes,
        "ceiling_bytes": report.hardware.ceiling_bytes,
        "winner": report.verdict.winner.number if report.verdict.winner else None,
        "fingerprint": report.fingerprint,
        "columns": columns,
        "trials": rows,
    }


def _short(value: Any) -> Any:
    """Round to five digits, which exceeds the accuracy and halves the size."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None  # JSON has no such number
    return round(value) if abs(value) >= 1e5 else float(f"{value:.5g}")
