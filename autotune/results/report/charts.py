"""Axes and marks as SVG of any width, without a script or network. Horizontal positions are percentages, so that text keeps
its size. Every text is escaped.

Marks differ in shape as well as colour. Each chart has a title, a description and, on the page, a table with the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup, escape

_STEPS = (1, 2, 2.5, 5, 10)
TOP, BOTTOM = 14, 42  # pixels around the plot: for the topmost label, and for ticks and the axis' name
MOST_LABELLED = 6


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
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
class Part:
    """One part of a bar."""

    name: str
    size: float
    letter: str
    classes: str


def stacked(
    name: str, title: str, about: str, parts: Sequence[Part], whole: float, lines: Sequence[tuple[float, str]]
) -> Markup:
    """Draw a bar of parts from left to right, with vertical lines at some sizes. A letter appears in parts that are wide
    enough."""
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
