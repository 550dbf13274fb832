"""Content of the page of a training under `autotune launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from autotune.results.report.charts import Axis, Plot
from autotune.results.report.pictures import size_axis, unit_of
from autotune.units import format_bytes, format_duration


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
    version: str = ""
    confidential: bool = False

    @property
    def points(self) -> list[list[tuple[float, int, int]]]:
        """The courses of the attempts on one time axis, with their steps added up."""
        found, began, done = [], 0.0, 0
        for attempt in self.attempts:
            found.append([(began + seconds, done + steps, size) for seconds, steps, size in attempt.course])
            began += attempt.seconds
            done += attempt.steps
        return found


def _clock(report: TrainingReport) -> tuple[Axis, float]:
    whole = max(sum(one.seconds for one in report.attempts), 1e-3)
    unit, word = (3600.0, "hours") if whole >= 7200 else (60.0, "minutes") if whole >= 180 else (1.0, "seconds")
    return Axis(f"time ({word})", 0.0, whole / unit, lambda v: f"{v:.4g}"), unit


def over_time(report: TrainingReport) -> list[Markup]:
    """Draw memory and steps over time. A vertical line marks the end of an attempt. Empty if no rank reported steps."""
    courses = report.points
    if not any(courses):
        return []
    clock, unit = _clock(report)
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
    scale = unit_of(bytes_axis)
    memory.level(report.capacity_bytes / scale, "capacity", "capacity")
    steps = Plot(
        "steps-course",
        "Steps over time",
        f"{most} steps in {len(report.attempts)} attempts, in {format_duration(sum(a.seconds for a in report.attempts))}.",
        clock,
        Axis("steps of all attempts", 0.0, 1.06 * max(most, 1), lambda v: f"{v:.4g}"),
        height=200,
    )
    for plot, at, by in ((memory, 2, scale), (steps, 1, 1.0)):
        ended = 0.0
        for attempt, course in zip(report.attempts, courses, strict=True):
            ended += attempt.seconds
            for before, after in pairwise(course):
                plot.line(before[0] / unit, before[at] / by, after[0] / unit, after[at] / by, "series")
            if attempt is not report.attempts[-1]:
                plot.upright(ended / unit, "ended", f"end of attempt {report.attempts.index(attempt) + 1}")
    return [memory.html(), steps.html()]
