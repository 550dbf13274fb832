"""One HTML file from a study, a plan or a training."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autotune._version import __version__
from autotune.problem.job import sync_note
from autotune.results.console import code_legend, config_sentence, knob_words
from autotune.results.output_files import check_out
from autotune.results.plan import (
    NO_CARD,
    Outlook,
    Plan,
    PlanTable,
    batch_line,
    cards_table,
    chunked_loss_line,
    comparison_table,
    fewest_gpus,
    limits,
    loading_line,
    machine_line,
    nothing_fits_lines,
    rate,
    ways_table,
)
from autotune.results.report import figures
from autotune.results.report.build import predicted_bar, reclaimed_memory_note
from autotune.results.report.figures import Axis, Plot, size_axis
from autotune.results.report.knob_effects import value_text
from autotune.results.report.model import Bars, Cell, StudyReport, Trial, TrialPrediction
from autotune.util.files import cannot_write, write_atomically
from autotune.util.streams import printable
from autotune.util.units import format_bytes, format_change, format_count, format_duration, format_hours, format_usd

# -- page --------------------------------------------------------------------------------------------------------------
#
# Fill the templates: one HTML file with its style, script and data inside, which loads nothing from a network.

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
        "tokens": figures.tokens,
        "shown": value_text,
        "knob": knob_words,
        "letter": figures.letter,
        "hold": figures.hold,
        "signed": lambda share: format_change(share).replace("-", "−"),
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
    return _environment().get_template(template).render(**parts, **values, version=__version__)


def as_data(data: Any) -> Markup:
    """Return JSON that is safe inside HTML: it cannot end the element or begin a tag."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), default=str)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def study_page(report: StudyReport) -> str:
    """Return the HTML of a study's page."""
    sizes = [bar.whole for bars in report.memory for bar in bars.bars]
    limits = (report.hardware.capacity_bytes, report.hardware.ceiling_bytes)
    scale = 1.02 * max([float(limits[0]), *sizes])
    return _fill(
        "study.html.j2",
        report=report,
        title=f"{report.study}: {report.model}",
        speed=figures.speed_against_memory(report),
        no_speed=figures.why_no_speed(report),
        clock=figures.over_time(report),
        predicted=figures.predicted_against_measured(report),
        bars=[figures.memory_bars(bars, at, scale, *limits) for at, bars in enumerate(report.memory)],
        holds=_holds(report.memory),
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


def plan_page(plans: list[Plan]) -> str:
    """Return the HTML of the page of one plan, or of several cards side by side."""
    first, several = plans[0], len(plans) > 1
    memory = [bars for plan in plans for bars in _memory(plan, several)]
    of_all = {bars.limits for bars in memory if bars.limits}
    capacities = [float(capacity) for capacity, _ in of_all]
    scale = 1.02 * max([1.0, *capacities, *(bar.whole for bars in memory for bar in bars.bars)])
    return _fill(
        "plan.html.j2",
        title=f"plan: {first.job.model.name}",
        job=first.job,
        batch=batch_line(first),
        note="; ".join(dict.fromkeys(plan.note for plan in plans if plan.note)),
        plans=[_card(plan) for plan in plans],
        memory=memory,
        bars=[figures.memory_bars(bars, at, scale, *bars.limits) for at, bars in enumerate(memory) if bars.limits],
        limits=of_all.pop() if len(of_all) == 1 else None,
        holds=_holds(memory),
        cards=comparison_table(plans) if several else cards_table(first),
        no_card=NO_CARD,
        fewest=f"Fewest {first.own.gpu}: {fewest_gpus(first.own, first.job)}." if first.own else "",
        data=as_data([plan.to_json() for plan in plans] if several else first.to_json()),
    )


def _holds(memory: Sequence[Bars]) -> list[str]:
    """Return the contents of all bars, each once."""
    return list(dict.fromkeys(name for bars in memory for bar in bars.bars for name, _ in bar.parts))


def _on_map(report: StudyReport, cell: Cell) -> bool:
    return report.map is not None and any(square.cell is cell for _, row in report.map.rows for square in row)


_NUMBERS = tuple(f.name for f in dataclasses.fields(Trial) if f.name not in ("knobs", "forecast"))
_FORECAST = tuple(f.name for f in dataclasses.fields(TrialPrediction))


def study_data(report: StudyReport) -> dict[str, Any]:
    """Return the data that the page offers as JSON and CSV: the study's settings, and its trials by columns, exact.

    Bytes and seconds.
    """
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


# -- report of a plan --------------------------------------------------------------------------------------------------
#
# Content of the page of `autotune plan --html`: predictions only. Sentences and tables are those of the terminal.


@dataclass(frozen=True)
class Card:
    """Predictions for one kind of device."""

    machine: str  # and its main memory
    ways: PlanTable
    sentence: str  # the verdict
    lines: tuple[str, ...]  # further facts of the verdict
    label: str = ""  # short codes of the config; empty if nothing fits
    legend: str = ""  # explains them
    tiles: tuple[tuple[str, str, str], ...] = ()  # (figure, its name, interval or detail)
    config: dict[str, Any] | None = None  # DeepSpeed's; None if nothing fits


def _card(plan: Plan) -> Card:
    outlook, hardware = plan.outlook, plan.hardware
    made = partial(Card, machine_line(plan), ways_table(plan))
    chunked = filter(None, [chunked_loss_line(plan)])
    if outlook is None:
        verdict, *lines = nothing_fits_lines(plan)
        return made(sentence=f"{verdict[0].upper()}{verdict[1:]}.", lines=(*lines, *chunked))
    one = outlook.prediction
    lines = [f"limited by {limits(one)}"]
    lines += filter(None, [reclaimed_memory_note(one.peak_bytes, one.needed_bytes, hardware.ceiling_bytes)])
    if hardware.reserve_bytes:
        free_bytes = hardware.capacity_bytes - one.peak_bytes
        lines.append(f"weight sync: {sync_note(outlook.job, one.candidate.stage, free_bytes)}")
    if one.host_bytes:
        lines.append(f"{format_bytes(outlook.host_bytes)} of main memory a node for what is offloaded")
    if plan.loading_bytes:
        lines.append(f"loading takes {loading_line(plan)}")
    sure = "Fastest that surely fits" if one.sure else "Likeliest to fit"
    return made(
        sentence=f"{sure}: {config_sentence(one.candidate, plan.job, hardware)}.",
        label=str(one.candidate),
        legend=code_legend(one.candidate),
        tiles=tuple(_tiles(plan, outlook)),
        lines=(*lines, *chunked),
        config=one.candidate.ds_config(plan.job),
    )


def _tiles(plan: Plan, outlook: Outlook) -> Iterator[tuple[str, str, str]]:
    one, low_high = outlook.prediction, " to ".join
    yield (
        f"{rate(outlook.tokens_per_second)} tokens/s",
        f"step {one.step_seconds:.3g} s",  # as the terminal prints it
        low_high(map(rate, outlook.tokens_interval)),
    )
    yield (
        f"{min(one.chance, 0.99):.0%}",
        "chance to fit",
        f"{format_bytes(one.peak_bytes)} ({low_high(map(format_bytes, one.peak_interval))}) of "
        f"{format_bytes(plan.hardware.capacity_bytes)} a GPU",
    )
    yield (
        format_hours(outlook.hours),
        f"for {format_count(outlook.tokens)} tokens",
        low_high(map(format_hours, outlook.hours_interval)),
    )
    if outlook.usd is not None and outlook.usd_interval is not None:
        yield format_usd(outlook.usd), f"at {outlook.price}", low_high(map(format_usd, outlook.usd_interval))
    if outlook.mfu is not None and outlook.mfu_interval is not None:
        yield f"{outlook.mfu:.0%}", "MFU", low_high(f"{share:.0%}" for share in outlook.mfu_interval)


def _memory(plan: Plan, several: bool) -> list[Bars]:
    """Return the bars of the fastest configs; if several cards are compared, of the fastest alone."""
    return [
        Bars(
            plan.hardware.name if several else f"{at + 1}",
            str(one.candidate),
            (predicted_bar(one, plan.hardware),),
            (plan.hardware.capacity_bytes, plan.hardware.ceiling_bytes),
        )
        for at, one in enumerate(plan.best[: 1 if several else None])
    ]


# -- report of a training ----------------------------------------------------------------------------------------------
#
# Content of the page of a training under `autotune launch`.


@dataclass(frozen=True)
class AttemptShown:
    """One start of the training, with the fields of `recovery.supervisor.Attempt`."""

    rung: int
    candidate: str
    steps: int
    seconds: float
    ended: str
    resumed_from: str
    peak_bytes: float
    course: Sequence[tuple[float, int, int]]  # (seconds, steps, bytes of the worst rank)


@dataclass(frozen=True)
class TrainingReport:
    """Full content of a training's page."""

    name: str
    job: str
    machine: str
    capacity_bytes: int
    code: int  # exit code of the training
    lines: tuple[str, ...]  # summary for the user
    attempts: tuple[AttemptShown, ...]
    ladder: tuple[tuple[str, bool, float], ...]  # (config, measured, bytes of a rank)

    @property
    def points(self) -> list[list[tuple[float, int, int]]]:
        """The courses of the attempts on one time axis, with their steps added up."""
        found, began, done = [], 0.0, 0
        for attempt in self.attempts:
            found.append([(began + seconds, done + steps, size) for seconds, steps, size in attempt.course])
            began += attempt.seconds
            done += attempt.steps
        return found


def _clock(report: TrainingReport) -> Axis:
    whole = max(sum(one.seconds for one in report.attempts), 1e-3)
    unit, word = (3600.0, "hours") if whole >= 7200 else (60.0, "minutes") if whole >= 180 else (1.0, "seconds")
    return Axis(f"time ({word})", 0.0, whole, lambda v: f"{v:.4g}", unit=unit)


def over_time(report: TrainingReport) -> list[Markup]:
    """Draw memory and steps over time. A vertical line marks the end of an attempt. Empty if no rank reported steps."""
    courses = report.points
    if not any(courses):
        return []
    clock = _clock(report)
    highest = max(size for course in courses for _, _, size in course)
    bytes_axis = size_axis("memory of the worst rank", 0.0, 1.06 * max(highest, report.capacity_bytes))
    most = max(steps for course in courses for _, steps, _ in course)
    memory = Plot(
        "memory-course",
        "Memory over time",
        f"At most {format_bytes(highest)} of {format_bytes(report.capacity_bytes)} a rank.",
        clock,
        bytes_axis,
        height=200,
    )
    memory.level(report.capacity_bytes, "capacity", "capacity")
    steps = Plot(
        "steps-course",
        "Steps over time",
        f"{most} steps in {len(report.attempts)} attempts, in {format_duration(sum(a.seconds for a in report.attempts))}.",
        clock,
        Axis("steps of all attempts", 0.0, 1.06 * max(most, 1), lambda v: f"{v:.4g}"),
        height=200,
    )
    for plot, at in ((memory, 2), (steps, 1)):
        ended = 0.0
        for attempt, course in zip(report.attempts, courses, strict=True):
            ended += attempt.seconds
            for before, after in pairwise(course):
                plot.line(before[0], before[at], after[0], after[at], "series")
            if attempt is not report.attempts[-1]:
                plot.upright(ended, "ended", f"end of attempt {report.attempts.index(attempt) + 1}")
    return [memory.html(), steps.html()]
