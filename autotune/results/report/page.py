"""Fill the templates: one HTML file with its style, script and data inside, which loads nothing from a network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autotune.files import cannot_write, write_atomically
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH
from autotune.results.report import pictures
from autotune.results.report.data import Cell, Forecast, StudyReport, Trial
from autotune.results.report.mattered import shown
from autotune.results.report.planned import PlanReport
from autotune.results.report.training import TrainingReport, over_time
from autotune.results.targets import check_out
from autotune.streams import printable
from autotune.units import format_bytes, format_duration

_SYMBOLS = {  # marks of the memory map, readable without colour
    Cell.FITS: "✓",
    Cell.ABOVE: "▲",
    Cell.RAN_OUT: "✗",
    Cell.FAILED: "!",
    Cell.RULED_OUT: "≥",
    Cell.TOO_MUCH: ">",
    Cell.PREDICTED: "~",
    Cell.UNKNOWN: "?",
    Cell.NONE: "",
}


_KNOBS = {
    MICRO_BATCH: "micro-batch",
    ACCUMULATION: "accumulation",
    CHECKPOINTING: "checkpointing",
    "zero_stage": "ZeRO stage",
}


def _knob(name: str) -> str:
    """Return a knob's name for display, in words between which a narrow column may break."""
    return _KNOBS.get(name, name.rpartition(".")[2].replace("_", " "))


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.results.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "size": format_bytes,
        "duration": format_duration,
        "tokens": pictures.tokens,
        "shown": shown,
        "knob": _knob,
        "letter": pictures.letter,
        "hold": pictures.hold,
        "signed": lambda share: f"{100 * share:+.1f} %",
        "signed_size": lambda size: f"{'+' if size >= 0 else '−'}{format_bytes(abs(size))}",
        "symbol": _SYMBOLS.__getitem__,
    }
    return made


@cache
def _part(name: str) -> str:
    """Read a style or script that is inserted unchanged."""
    return (resources.files("autotune.results.report") / "templates" / name).read_text(encoding="utf-8").strip()


def _allowed(script: str) -> str:
    """Return the hash by which a content security policy permits a script. The browser runs no other script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _fill(template: str, **values: Any) -> str:
    theme, script, style = (_part(name) for name in ("theme.js", "page.js", "page.css"))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {_allowed(theme)} {_allowed(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"theme": Markup(theme), "script": Markup(script), "style": Markup(style), "policy": policy}
    return _environment().get_template(template).render(**parts, **values)


def as_data(data: Any) -> Markup:
    """Return JSON that is safe inside HTML: it cannot end the element or begin a tag."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), default=str)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def study_page(report: StudyReport) -> str:
    """Return the HTML of a study's page."""
    sizes = [bar.whole for bars in report.memory for bar in bars.bars]
    scale = 1.02 * max([float(report.capacity_bytes), *sizes])
    limits = (report.capacity_bytes, report.ceiling_bytes)
    return _fill(
        "study.html.j2",
        report=report,
        title=f"{report.study}: {report.model}",
        speed=pictures.speed_against_memory(report),
        no_speed=pictures.why_no_speed(report),
        clock=pictures.over_time(report),
        predicted=pictures.predicted_against_measured(report),
        bars=[pictures.memory_bars(bars, at, scale, *limits) for at, bars in enumerate(report.memory)],
        holds=list(dict.fromkeys(name for bars in report.memory for bar in bars.bars for name, _ in bar.parts)),
        cells=[cell for cell in Cell if cell is not Cell.NONE and _on_map(report, cell)],
        data=as_data(study_data(report)),
    )


def training_page(report: TrainingReport) -> str:
    """Return the HTML of a training's page."""
    data = {"code": report.code, "attempts": [dataclasses.asdict(one) for one in report.attempts]}
    return _fill(
        "training.html.j2",
        report=report,
        title=f"{report.name}: training",
        pictures=over_time(report),
        data=as_data(data),
    )


def plan_page(report: PlanReport) -> str:
    """Return the HTML of a plan's page."""
    capacities = [float(card.capacity_bytes) for card in report.cards]
    scale = 1.02 * max([*capacities, *(bar.whole for bars in report.memory for bar in bars.bars)])
    limits = {bars.limits for bars in report.memory if bars.limits}
    return _fill(
        "plan.html.j2",
        report=report,
        title=f"plan: {report.model}",
        bars=[
            pictures.memory_bars(bars, at, scale, *bars.limits) for at, bars in enumerate(report.memory) if bars.limits
        ],
        limits=limits.pop() if len(limits) == 1 else None,
        holds=list(dict.fromkeys(name for bars in report.memory for bar in bars.bars for name, _ in bar.parts)),
        data=as_data(report.data),
    )


def _on_map(report: StudyReport, cell: Cell) -> bool:
    return report.map is not None and any(square.cell is cell for _, row in report.map.rows for square in row)


_NUMBERS = tuple(f.name for f in dataclasses.fields(Trial) if f.name not in ("knobs", "forecast"))
_FORECAST = tuple(f.name for f in dataclasses.fields(Forecast))


def study_data(report: StudyReport) -> dict[str, Any]:
    """Return the data that the page offers as JSON and CSV: the study's settings, and its trials by columns, exact. Bytes and
    seconds."""
    knobs = sorted({name for trial in report.trials for name in trial.knobs})
    rows = [
        [
            *(_short(getattr(trial, name)) for name in _NUMBERS),
            *(trial.knobs.get(name) for name in knobs),
            *(_short(getattr(trial.forecast, name)) if trial.forecast else None for name in _FORECAST),
        ]
        for trial in report.trials
    ]
    columns = [*_NUMBERS, *(f"knob.{name}" for name in knobs), *(f"forecast.{name}" for name in _FORECAST)]
    return {
        "study": report.study,
        "model": report.model,
        "machine": report.machine,
        "autotune": report.version,
        "capacity_bytes": report.capacity_bytes,
        "ceiling_bytes": report.ceiling_bytes,
        "winner": report.verdict.winner.number if report.verdict.winner else None,
        "fingerprint": report.fingerprint,
        "columns": columns,
        "trials": rows,
    }


def _short(value: Any) -> Any:
    """Round to five digits, which exceeds the accuracy and halves the size."""
    if isinstance(value, tuple):
        return [_short(one) for one in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None  # JSON has no such number
    return round(value) if abs(value) >= 1e5 else float(f"{value:.5g}")


# -- the file --------------------------------------------------------------------------------------------------------------


def write_page(html: str, out: Path) -> None:
    """Write the file completely or not at all.

    Raises:
        UserError: it cannot be written.
    """
    check_out(out)
    try:
        # a name may hold bytes that are no text, or move a terminal's cursor
        write_atomically(out, printable(html.encode(errors="replace").decode()))
    except OSError as error:
        raise cannot_write(out, error, "name another file") from None
