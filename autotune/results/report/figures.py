"""SVG charts of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup, escape

from autotune.results.report.model import Bars, Status, StudyReport, Trial
from autotune.search.trials import RESUME, TRAINING
from autotune.util.units import GIB, MIB, format_bytes, format_count, format_duration

# -- SVG axes and marks ------------------------------------------------------------------------------------------------
#
# Axes and marks as SVG of any width, without a script or network. Horizontal positions are percentages, so that text
# keeps its size. Every text is escaped.
#
# Marks differ in shape as well as colour. Each chart has a title, a description and, on the page, a table with the same
# data.

_STEPS = (1, 2, 2.5, 5, 10)
TOP, BOTTOM = 14, 42  # pixels around the plot: for the topmost label, and for ticks and the axis' name
MOST_LABELLED = 6


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in _STEPS if power * one >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [first * step + i * step for i in range(int((high - first * step) / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, … between two numbers above zero, thinned if there are many."""
    every = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
    ]
    found = [tick for tick in every if low <= tick <= high]
    return found[:: max(1, -(-len(found) // MOST_LABELLED))]


@dataclass(frozen=True)
class Axis:
    """Mapping from numbers to a share of the plot's length."""

    name: str
    low: float
    high: float
    show: Callable[[float], str]  # formats a tick's label
    log: bool = False

    def share(self, value: float) -> float:
        """Return the share of the plot's length, clipped to the plot."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (at - low) / (high - low))) if high > low else 0.5

    @property
    def ticks(self) -> list[float]:
        """Return the ticks: logarithmic on a wide logarithmic axis, else round numbers."""
        wide = self.log and self.high > 8 * self.low
        return log_ticks(self.low, self.high) if wide else nice_ticks(self.low, self.high)


def _of(trial: int | None) -> Markup:
    """Return the attribute by which the page's script finds the marks and the row of a trial."""
    return Markup("") if trial is None else Markup(' data-t="{}"').format(trial)


@dataclass
class Plot:
    """A chart under construction.

    Args:
        height: of the plot itself in pixels; `lane` more are below it, for marks that have no value on the y axis.
    """

    name: str  # unique on its page
    title: str
    about: str  # description for readers who cannot see it
    x: Axis
    y: Axis
    height: int = 280
    lane: int = 0
    lane_name: str = ""
    _parts: list[Markup] = field(default_factory=list)

    def _across(self, value: float) -> str:
        return f"{100 * self.x.share(value):.1f}%"

    def _down(self, value: float) -> float:
        return TOP + self.height * (1 - self.y.share(value))

    @property
    def _lane_at(self) -> float:
        return TOP + self.height + self.lane / 2 + 4

    def mark(self, shape: str, x: float, y: float | None, classes: str, trial: int | None = None) -> None:
        """Add a mark at a position, or in the lane without a y. For a trial's mark, the page's script shows the trial's row."""
        down = self._lane_at if y is None else self._down(y)
        self._parts.append(
            Markup('<use href="#m-{}" x="{}" y="{:.0f}" class="{}"{}/>').format(
                shape, self._across(x), down, classes, _of(trial)
            )
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str, trial: int | None = None) -> None:
        """Add a line, in data coordinates."""
        self._parts.append(
            Markup('<line x1="{}" y1="{:.0f}" x2="{}" y2="{:.0f}" class="{}"{}/>').format(
                self._across(x1), self._down(y1), self._across(x2), self._down(y2), classes, _of(trial)
            )
        )

    def upright(self, x: float, classes: str, label: str = "", *, left: bool = False) -> None:
        """Add a vertical line with a label at one side, or at the other if that one lacks space."""
        at, bottom = self._across(x), TOP + self.height + self.lane
        self._parts.append(
            Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(at, TOP, at, bottom, classes)
        )
        if label:
            end = (left and self.x.share(x) > 0.3) or self.x.share(x) > 0.85
            self._parts.append(
                Markup('<text x="{}" y="{}" dx="{}" text-anchor="{}" class="note">{}</text>').format(
                    at, TOP + (10 if left else 24), -5 if end else 5, "end" if end else "start", label
                )
            )

    def level(self, y: float, classes: str, label: str) -> None:
        """Add a horizontal line with a label at its right end."""
        down = self._down(y)
        self._parts.append(
            Markup('<line x1="0" y1="{0:.0f}" x2="100%" y2="{0:.0f}" class="{1}"/>').format(down, classes)
        )
        self._parts.append(
            Markup('<text x="100%" y="{:.0f}" text-anchor="end" class="note">{}</text>').format(down - 4, label)
        )

    def steps(self, points: Sequence[tuple[float, float]], classes: str) -> None:
        """Add a line that keeps each height until the next point."""
        for (x1, y1), (x2, y2) in pairwise(points):
            self.line(x1, y1, x2, y1, classes)
            if y1 != y2:
                self.line(x2, y1, x2, y2, classes)

    def html(self) -> Markup:
        """Return the figure with axes and grid as HTML."""
        bottom = TOP + self.height + self.lane
        across, left = [], []
        for tick in self.x.ticks:
            at = self._across(tick)
            across.append(Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="grid"/>').format(at, TOP, at, bottom))
            across.append(
                Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(at, bottom + 17, self.x.show(tick))
            )
        for tick in self.y.ticks:
            down = self._down(tick)
            across.append(Markup('<line x1="0" y1="{:.1f}" x2="100%" y2="{:.1f}" class="grid"/>').format(down, down))
            left.append(
                Markup('<text x="52" y="{:.1f}" text-anchor="end">{}</text>').format(down + 4, self.y.show(tick))
            )
        if self.lane:
            top = TOP + self.height + 4
            across.append(
                Markup('<rect x="0" y="{}" width="100%" height="{}" class="lane"/>').format(top, self.lane - 4)
            )
            left.append(
                Markup('<text x="52" y="{:.1f}" text-anchor="end" class="lane-name">{}</text>').format(
                    self._lane_at + 4, self.lane_name
                )
            )
        whole = bottom + BOTTOM
        return Markup(
            '<div class="chart"><div class="y-name">{y}</div><svg class="y" width="56" height="{h}" aria-hidden="true">{left}'
            '</svg><svg class="plot" width="100%" height="{h}" role="img" aria-labelledby="{n}-t {n}-d"><title id="{n}-t">'
            '{title}</title><desc id="{n}-d">{about}</desc>{across}{parts}<text x="50%" y="{name_at}" text-anchor="middle"'
            ' class="name">{x}</text></svg></div>'
        ).format(
            y=self.y.name,
            h=whole,
            left=Markup("").join(left),
            n=self.name,
            title=self.title,
            about=self.about,
            across=Markup("").join(across),
            parts=Markup("").join(self._parts),
            name_at=bottom + 36,
            x=self.x.name,
        )


@dataclass(frozen=True)
class BarPart:
    """One part of a bar."""

    name: str
    size: float
    letter: str
    classes: str


def stacked(
    name: str, title: str, about: str, parts: Sequence[BarPart], whole: float, lines: Sequence[tuple[float, str]]
) -> Markup:
    """Draw a bar of parts from left to right, with vertical lines at some sizes.

    A letter appears in parts that are wide enough.
    """
    drawn, at = [], 0.0
    for part in parts:
        width = 100 * part.size / whole
        drawn.append(
            Markup('<rect x="{:.2f}%" y="4" width="{:.2f}%" height="26" class="{}"><title>{}</title></rect>').format(
                at, width, part.classes, part.name
            )
        )
        if width >= 4:
            drawn.append(
                Markup('<text x="{:.2f}%" y="22" text-anchor="middle" class="letter">{}</text>').format(
                    at + width / 2, part.letter
                )
            )
        at += width
    for size, classes in lines:
        x = 100 * size / whole
        drawn.append(Markup('<line x1="{:.2f}%" y1="0" x2="{:.2f}%" y2="34" class="{}"/>').format(x, x, classes))
    return Markup(
        '<svg class="bar" width="100%" height="34" role="img" aria-labelledby="{n}-t {n}-d"><title id="{n}-t">{t}</title>'
        '<desc id="{n}-d">{d}</desc>{p}</svg>'
    ).format(n=name, t=escape(title), d=about, p=Markup("").join(drawn))


# -- charts of a report ------------------------------------------------------------------------------------------------
#
# The charts of a page: positions, shapes, colours and labels.

SHAPES = ("0", "1", "2", "3")  # for ZeRO's stages: circle, square, triangle, diamond (base.html.j2)
LETTERS = {  # for contents of memory; the classes `hold-…` of page.css have a colour and a texture for each
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "logits and loss": "L",
    "buckets": "B",
    "gathered parameters": "F",
    "temporaries": "T",
    "host": "H",
    "allocator": "K",
    "kept by the allocator": "K",
    "context and communication": "C",
    "allocated by torch": "M",
    "tensors": "M",
    "rest of the process": "R",
    "not told apart": "M",
    "all there was": "M",
    "more that was asked for": "+",
}
_FAR = 1.6  # multiple of the capacity; a larger peak or shortfall is drawn at the edge


def tokens(value: float) -> str:
    """Format tokens per second."""
    return format_count(value) if value >= 1000 else f"{value:.3g}"


def size_axis(name: str, low: float, high: float, log: bool = False) -> Axis:
    """Return an axis of bytes: in GiB, or in MiB if all values are small."""
    unit, word = (GIB, "GiB") if high >= 2 * GIB else (MIB, "MiB")
    return Axis(f"{name} ({word})", low / unit, high / unit, lambda v: f"{v:.4g}", log)


def unit_of(axis: Axis) -> float:
    """Return the bytes per unit of an axis."""
    return GIB if axis.name.endswith("(GiB)") else MIB


def marker_style(trial: Trial) -> tuple[str, str]:
    """Return (shape, classes): shape and colour show the stage, hollow marks offload, a cross marks a failure.

    A trial that cannot win, or is not compared with the winner, is faded.
    """
    stage = min(3, int(trial.knobs.get("zero_stage", 0)))
    hollow = any(trial.knobs.get(name, "none") != "none" for name in ("offload_optimizer", "offload_param"))
    if trial.status in (Status.FAILED, Status.UNDECIDED, Status.RUNNING):
        return "plus", "gone"
    shape = SHAPES[stage] if trial.status is not Status.RAN_OUT else "cross"
    return shape, f"s{stage}" + (" hollow" if hollow else "") + (" aside" if trial.remark else "")


def speed_against_memory(report: StudyReport) -> Markup | None:
    """Draw tokens per second over the peak for all trials.

    OOM trials are in a lane, at the least memory they would have needed. None if no speed was measured, as there is no
    axis.
    """
    ran = [t for t in report.trials if t.measured and t.peak_bytes]
    out = [t for t in report.trials if t.status is Status.RAN_OUT]
    if not ran:
        return None
    needed = {t.number: (t.capacity_bytes or report.capacity_bytes) + (t.missing_bytes or 0) for t in out}
    sizes = [*(t.peak_bytes or 0 for t in ran), report.capacity_bytes, *needed.values()]
    high = 1.04 * min(max(sizes), _FAR * report.capacity_bytes)
    low = min(t.peak_bytes or 0 for t in ran)
    x = size_axis("peak memory of a rank", 0.0 if low < 0.4 * high else 0.9 * low, high)
    fastest = max(t.tokens_per_second or 0 for t in ran)
    plot = Plot(
        "speed",
        "Speed against memory",
        f"{len(ran)} measured trials and {len(out)} that ran out of memory; no winner may use more than "
        f"{format_bytes(report.ceiling_bytes)}.",
        x,
        Axis("tokens/s", 0.0, 1.06 * fastest, tokens),
        lane=30 if out else 0,
        lane_name="ran out",
    )
    unit = unit_of(x)
    one = report.ceiling_bytes == report.capacity_bytes
    plot.upright(report.capacity_bytes / unit, "capacity", "capacity, and ceiling" if one else "capacity")
    if not one:
        plot.upright(report.ceiling_bytes / unit, "ceiling", "ceiling", left=True)
    front = _front([t for t in ran if not t.remark])
    plot.steps([((t.peak_bytes or 0) / unit, t.tokens_per_second or 0) for t in front], "front")
    for trial in out:
        shape, classes = marker_style(trial)
        plot.mark(shape, needed[trial.number] / unit, None, classes, trial.number)
    winner = report.verdict.winner
    # the winner comes last, so that nothing covers it
    for trial in sorted(ran, key=lambda t: (not t.remark, winner is not None and t.number == winner.number)):
        shape, classes = marker_style(trial)
        plot.mark(shape, (trial.peak_bytes or 0) / unit, trial.tokens_per_second, classes, trial.number)
    if winner is not None and winner.peak_bytes:
        plot.mark("ring", winner.peak_bytes / unit, winner.tokens_per_second, "winner")
    return plot.html()


def why_no_speed(report: StudyReport) -> str:
    """Return the text that replaces missing charts of speed."""
    out = sum(trial.status is Status.RAN_OUT for trial in report.trials)
    table = f"; {out} ran out of memory: what each lacked is told in All trials" if out else ""
    return f"No trial has measured a speed, so there is no chart of it{table}."


def _front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that no other trial beats in both speed and memory, smallest first."""
    best, front = 0.0, []
    for trial in sorted(trials, key=lambda t: (t.peak_bytes or 0, -(t.tokens_per_second or 0))):
        if (trial.tokens_per_second or 0) > best:
            best = trial.tokens_per_second or 0
            front.append(trial)
    return front


def over_time(report: StudyReport) -> Markup | None:
    """Draw every trial as a line as long as its duration, at its speed, and the best so far.

    Trials are drawn in sequence, without the time between them. None if no trial took time or measured a speed.
    """
    shown = [t for t in report.trials if t.role != TRAINING and t.status is not Status.RUNNING]
    whole = sum(t.seconds for t in shown)
    fastest = max((t.tokens_per_second or 0 for t in shown), default=0.0)
    if whole <= 0 or fastest <= 0:
        return None
    minutes = whole >= 180
    unit = 60.0 if minutes else 1.0
    x = Axis(f"time in trials ({'minutes' if minutes else 'seconds'})", 0.0, whole / unit, lambda v: f"{v:.4g}")
    plot = Plot(
        "clock",
        "The search in time",
        f"{len(shown)} trials in {format_duration(whole)}, one after the other; a line is as long as its trial took.",
        x,
        Axis("tokens/s", 0.0, 1.06 * fastest, tokens),
        height=220,
        lane=26,
        lane_name="no speed",
    )
    at, best, front = 0.0, 0.0, [(0.0, 0.0)]
    for trial in shown:
        end = at + trial.seconds
        shape, classes = marker_style(trial)
        speed = trial.tokens_per_second
        if speed is not None:
            plot.line(at / unit, speed, end / unit, speed, f"took {classes}", trial.number)
            plot.mark(shape, end / unit, speed, classes, trial.number)
            if not trial.remark and speed > best:
                best = speed
                front.append((end / unit, speed))
        elif trial.role != RESUME:
            plot.mark(shape, (at + end) / 2 / unit, None, classes, trial.number)
        at = end
    if len(front) > 1:
        plot.steps([*front[1:], (whole / unit, best)], "front")
    return plot.html()


def predicted_against_measured(report: StudyReport) -> list[Markup]:
    """Draw two charts, memory and step time. A mark on the diagonal was predicted exactly."""
    told = [t for t in report.trials if t.forecast and t.measured and t.peak_bytes and t.step_seconds]
    if not told:
        return []
    made = []
    for name, title in (("memory", "peak memory"), ("step", "time of a step")):
        pairs = [
            (t, float(t.peak_bytes or 0), t.forecast.peak_bytes)
            if name == "memory"
            else (t, float(t.step_seconds or 0), t.forecast.step_seconds)
            for t in told
            if t.forecast
        ]
        values = [value for _, *both in pairs for value in both if value > 0]
        low, high = 0.9 * min(values), 1.1 * max(values)
        if name == "memory":
            x, y = (size_axis(f"{how} {title}", low, high, log=True) for how in ("measured", "predicted"))
        else:
            x, y = (
                Axis(f"{how} {title} (s)", low, high, lambda v: f"{v:.3g}", True) for how in ("measured", "predicted")
            )
        plot = Plot(
            f"predicted-{name}", f"Predicted against measured {title}", f"{len(pairs)} trials.", x, y, height=260
        )
        plot.line(x.low, y.low, x.high, y.high, "diagonal")
        unit = unit_of(x) if name == "memory" else 1.0
        for trial, measured, predicted in pairs:
            shape, classes = marker_style(trial)
            plot.mark(shape, measured / unit, predicted / unit, classes, trial.number)
        made.append(plot.html())
    return made


def letter(part: str) -> str:
    """Return the letter that marks a part."""
    return LETTERS.get(part, part[:1].upper())


def hold(part: str) -> str:
    """Return the CSS class for a content of memory."""
    return f"hold hold-{letter(part) if letter(part) != '+' else 'more'}"


def memory_bars(bars: Bars, at: int, scale: float, capacity_bytes: int, ceiling_bytes: int) -> list[tuple[str, Markup]]:
    """Return (name, drawing) of each bar of a config, with a title on each part.

    Args:
        at: index of the config on its page.
        scale: bytes of the whole width.
    """
    made = []
    for bar in bars.bars:
        parts = [BarPart(f"{n}: {format_bytes(size)}", size, letter(n), hold(n)) for n, size in bar.parts]
        about = "; ".join(part.name for part in parts)
        title = f"Memory of a rank, {bar.name}: {bars.label}"
        lines = ((float(ceiling_bytes), "ceiling"), (float(capacity_bytes), "capacity"))
        made.append((bar.name, stacked(f"bar-{at}-{bar.name}", title, about, parts, scale, lines)))
    return made
