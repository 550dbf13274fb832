"""SVG charts of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from autotune.results.report.model import Status, StudyReport, Trial
from autotune.util.units import GIB, MIB, format_bytes

# -- SVG axes and marks ------------------------------------------------------------------------------------------------
#
# Axes and marks as SVG of any width, without a script or network. Horizontal positions are percentages, so that text
# keeps its size. Every text is escaped.
#
# Marks differ in shape as well as colour. Each chart has a title, a description and, on the page, a table with the same
# data.

_STEPS = (1, 2, 2.5, 5, 10)
# pixels of the plot, and around it: for the topmost label, and for ticks and the axis' name
TOP, HEIGHT, BOTTOM = 14, 280, 42


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in _STEPS if power * one >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [first * step + i * step for i in range(int((high - first * step) / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Axis:
    """Mapping from numbers to a share of the plot's length; its labels are in `unit`s."""

    name: str
    low: float
    high: float
    show: Callable[[float], str]  # formats a number of units
    unit: float = 1.0

    def share(self, value: float) -> float:
        """Return the share of the plot's length, clipped to the plot."""
        if not self.high > self.low:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, label) of the ticks, which are round numbers."""
        ticks = nice_ticks(self.low / self.unit, self.high / self.unit)
        return [(tick * self.unit, self.show(tick)) for tick in ticks]


def _tag(name: str, content: str | None = None, /, **attributes: object) -> Markup:
    """Return an SVG element. Names of attributes have `_` for `-`, and `class_`; those that are None are left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = Markup("").join(Markup(' {}="{}"').format(*item) for item in given.items())
    return Markup("<{}{}{}").format(
        name, head, Markup("/>") if content is None else Markup(">{}</{}>").format(content, name)
    )


@dataclass
class Plot:
    """The page's chart under construction."""

    about: str  # description for readers who cannot see it
    x: Axis
    y: Axis
    lane: int  # pixels below the plot, for marks that have no value on the y axis
    _parts: list[Markup] = field(default_factory=list)

    def _across(self, value: float) -> str:
        return f"{100 * self.x.share(value):.1f}%"

    def _down(self, value: float) -> float:
        return TOP + HEIGHT * (1 - self.y.share(value))

    @property
    def _lane_at(self) -> float:
        return TOP + HEIGHT + self.lane / 2 + 4

    def mark(self, trial: Trial, x: float, y: float | None) -> None:
        """Add a trial's mark at a position, or in the lane without a y. It names the trial and links to its row."""
        shape, classes = marker_style(trial)
        down = f"{self._lane_at if y is None else self._down(y):.0f}"
        use = _tag("use", href=f"#m-{shape}", x=self._across(x), y=down, class_=classes, data_t=trial.number)
        name = _tag("title", f"trial {trial.number}: {trial.label}, {trial.result}")
        self._parts.append(_tag("a", name + use, href=f"#trial-{trial.number}", tabindex=-1))

    def ring(self, x: float, y: float) -> None:
        """Add a ring around the winner's mark."""
        self._parts.append(_tag("use", href="#m-ring", x=self._across(x), y=f"{self._down(y):.0f}", class_="winner"))

    def _line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        begin = {"x1": self._across(x1), "y1": f"{self._down(y1):.0f}"}
        end = {"x2": self._across(x2), "y2": f"{self._down(y2):.0f}"}
        self._parts.append(_tag("line", **begin, **end, class_="front"))

    def upright(self, x: float, classes: str, label: str, *, left: bool = False) -> None:
        """Add a vertical line with a label at one side, or at the other if that one lacks space."""
        at, bottom = self._across(x), TOP + HEIGHT + self.lane
        self._parts.append(_tag("line", x1=at, y1=TOP, x2=at, y2=bottom, class_=classes))
        end = (left and self.x.share(x) > 0.3) or self.x.share(x) > 0.85
        place = {"dx": -5, "text_anchor": "end"} if end else {"dx": 5, "text_anchor": "start"}
        self._parts.append(_tag("text", label, x=at, y=TOP + (10 if left else 24), **place, class_="note"))

    def front(self, points: Sequence[tuple[float, float]]) -> None:
        """Add a line through ascending points that keeps each height until the next one."""
        for (x1, y1), (x2, y2) in pairwise(points):
            self._line(x1, y1, x2, y1)
            self._line(x2, y1, x2, y2)

    def html(self) -> Markup:
        """Return the figure with axes and grid as HTML."""
        bottom = TOP + HEIGHT + self.lane
        across, left = [], []
        for tick, label in self.x.ticks:
            at = self._across(tick)
            across.append(_tag("line", x1=at, y1=TOP, x2=at, y2=bottom, class_="grid"))
            across.append(_tag("text", label, x=at, y=bottom + 17, text_anchor="middle"))
        for tick, label in self.y.ticks:
            down = self._down(tick)
            across.append(_tag("line", x1=0, y1=f"{down:.1f}", x2="100%", y2=f"{down:.1f}", class_="grid"))
            left.append(_tag("text", label, x=52, y=f"{down + 4:.1f}", text_anchor="end"))
        if self.lane:
            top, place = TOP + HEIGHT + 4, {"x": 52, "y": f"{self._lane_at + 4:.1f}", "text_anchor": "end"}
            across.append(_tag("rect", x=0, y=top, width="100%", height=self.lane - 4, class_="lane"))
            left.append(_tag("text", "OOM", **place, class_="lane-name"))
        whole = bottom + BOTTOM
        return Markup(
            '<div class="chart"><div class="y-name">{y}</div><svg class="y" width="56" height="{h}" aria-hidden="true">{left}'
            '</svg><svg class="plot" width="100%" height="{h}" role="group" aria-labelledby="speed-t speed-d">'
            '<title id="speed-t">Speed against memory</title><desc id="speed-d">{about}</desc>{across}{parts}<text x="50%" '
            'y="{name_at}" text-anchor="middle" class="name">{x}</text></svg></div>'
        ).format(
            y=self.y.name,
            h=whole,
            left=Markup("").join(left),
            about=self.about,
            across=Markup("").join(across),
            parts=Markup("").join(self._parts),
            name_at=bottom + 36,
            x=self.x.name,
        )


# -- charts of a report ------------------------------------------------------------------------------------------------
#
# The charts of a page: positions, shapes, colours and labels.

SHAPES = ("0", "1", "2", "3")  # for ZeRO's stages: circle, square, triangle, diamond (base.html.j2)
_FAR = 1.6  # multiple of the capacity; a larger peak or shortfall is drawn at the edge


def _memory_axis(low: float, high: float) -> Axis:
    """Return the axis of peaks: in GiB, or in MiB if all values are small."""
    unit, word = (GIB, "GiB") if high >= 2 * GIB else (MIB, "MiB")
    return Axis(f"peak memory of a rank ({word})", low, high, lambda v: f"{v:.4g}", unit)


def marker_style(trial: Trial) -> tuple[str, str]:
    """Return (shape, classes): shape and colour show the stage, hollow marks offload, a cross marks a failure.

    A trial that cannot win, or is not compared with the winner, is faded.
    """
    stage = min(3, int(trial.knobs.get("zero_stage", 0)))
    hollow = any(trial.knobs.get(name, "none") != "none" for name in ("offload_optimizer", "offload_param"))
    if trial.status in (Status.FAILED, Status.UNDECIDED, Status.RUNNING):
        return "plus", "gone"
    shape = SHAPES[stage] if trial.status is not Status.OOM else "cross"
    return shape, f"s{stage}" + (" hollow" if hollow else "") + (" aside" if trial.remark else "")


def speed_against_memory(report: StudyReport) -> Markup | None:
    """Draw samples per second over the peak for all trials.

    OOM trials are in a lane, at the least memory they would have needed. None if no speed was measured, as there is no
    axis.
    """
    ran = [t for t in report.trials if t.measured and t.peak_bytes]
    out = [t for t in report.trials if t.status is Status.OOM]
    if not ran:
        return None
    capacity_bytes, ceiling_bytes = report.hardware.capacity_bytes, report.hardware.ceiling_bytes
    needed = {t.number: (t.capacity_bytes or capacity_bytes) + (t.missing_bytes or 0) for t in out}
    sizes = [*(t.peak_bytes or 0 for t in ran), capacity_bytes, *needed.values()]
    high = 1.04 * min(max(sizes), _FAR * capacity_bytes)
    low = min(t.peak_bytes or 0 for t in ran)
    x = _memory_axis(0.0 if low < 0.4 * high else 0.9 * low, high)
    fastest = max(t.samples_per_second or 0 for t in ran)
    plot = Plot(
        f"{len(ran)} measured trials and {len(out)} OOMs; no winner may use more than {format_bytes(ceiling_bytes)}.",
        x,
        Axis("samples/s", 0.0, 1.06 * fastest, lambda v: f"{v:.4g}"),
        lane=30 if out else 0,
    )
    plot.upright(capacity_bytes, "capacity", "capacity")
    plot.upright(ceiling_bytes, "ceiling", "ceiling", left=True)
    plot.front(_front([t for t in ran if not t.remark]))
    for trial in out:
        plot.mark(trial, needed[trial.number], None)
    winner = report.verdict.winner
    # the winner comes last, so that nothing covers it
    for trial in sorted(ran, key=lambda t: (not t.remark, winner is not None and t.number == winner.number)):
        plot.mark(trial, trial.peak_bytes or 0, trial.samples_per_second)
    if winner is not None:
        plot.ring(winner.peak_bytes or 0, winner.samples_per_second or 0)
    return plot.html()


def why_no_speed(report: StudyReport) -> str:
    """Return the text that replaces missing charts of speed."""
    out = sum(trial.status is Status.OOM for trial in report.trials)
    table = f"; {out} ended with an OOM: All trials has what each lacked" if out else ""
    return f"No trial has measured a speed, so there is no chart of it{table}."


def _front(trials: Sequence[Trial]) -> list[tuple[float, float]]:
    """Return (peak, speed) of the trials that no other trial beats in both, smallest first."""
    best, front = 0.0, []
    for peak_bytes, slowness in sorted((t.peak_bytes or 0, -(t.samples_per_second or 0)) for t in trials):
        if -slowness > best:
            best = -slowness
            front.append((float(peak_bytes), best))
    return front
