"""The report's chart of speed against memory: shares of its axes, which `parts.html.j2` draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.results.report.model import Status, StudyReport, Trial
from autotune.util.units import GIB, MIB, format_bytes

_STEPS = (1, 2, 2.5, 5, 10)
_FAR = 1.6  # multiple of the capacity; a larger peak or shortfall is drawn at the edge


@dataclass(frozen=True)
class Axis:
    """Axis from `low` to `high`, with labels in `unit`s."""

    name: str
    low: float
    high: float
    unit: float = 1.0

    def share(self, value: float) -> float:
        """Return the share of the axis' length, clipped to it."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Return (share, label) of about five ticks at round numbers."""
        low, high = self.low / self.unit, self.high / self.unit
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * one for one in _STEPS if power * one >= rough * 0.999)
        labels = [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(self.share(label * self.unit), label) for label in labels]


@dataclass(frozen=True)
class Mark:
    """Mark of a trial: shape and colour show the stage, hollow marks offload, a cross marks an OOM."""

    trial: Trial
    x: float
    y: float | None  # None: it ran out of memory, and is drawn in a lane below

    @property
    def shape(self) -> str:
        """Return the id of its shape."""
        return "cross" if self.y is None else str(self.trial.knobs.get("zero_stage", 0))

    @property
    def classes(self) -> str:
        """Return its classes of style. A trial that cannot win, or is not compared with the winner, is faded."""
        knobs = self.trial.knobs
        hollow = any(knobs.get(name, "none") != "none" for name in ("offload_optimizer", "offload_param"))
        return f"s{knobs.get('zero_stage', 0)}" + " hollow" * hollow + " aside" * bool(self.trial.remark)


@dataclass(frozen=True)
class Chart:
    """Samples per second over the peak for all trials."""

    about: str  # description for readers who cannot see it
    x: Axis
    y: Axis
    capacity: float
    ceiling: float
    marks: Sequence[Mark]  # OOMs, then from back to front: the winner comes last
    front: Sequence[tuple[float, float]]  # of the trials that no other trial beats in both, smallest first


def speed_against_memory(report: StudyReport) -> Chart | None:
    """Return the chart; None if no speed was measured, as there is no axis. An OOM is at the least memory that it needs."""
    ran = [(t, t.peak_bytes, t.samples_per_second) for t in report.trials if t.peak_bytes and t.samples_per_second]
    if not ran:
        return None
    out = [trial for trial in report.trials if trial.status is Status.OOM]
    capacity_bytes, ceiling_bytes = report.hardware.capacity_bytes, report.hardware.ceiling_bytes
    needed = [(one.capacity_bytes or capacity_bytes) + (one.missing_bytes or 0) for one in out]
    peaks = [peak_bytes for _, peak_bytes, _ in ran]
    high = 1.04 * min(max(*peaks, capacity_bytes, *needed), _FAR * capacity_bytes)
    low = 0.9 * min(peaks)
    if not 0.4 * high < low < high:
        low = 0.0
    unit, word = (GIB, "GiB") if high >= 2 * GIB else (MIB, "MiB")
    x = Axis(f"peak memory of a rank ({word})", low, high, unit)
    y = Axis("samples/s", 0.0, 1.06 * max(speed for *_, speed in ran))
    winner = report.verdict.winner
    # the winner comes last, so that nothing covers it
    ran.sort(key=lambda one: (not one[0].remark, winner is not None and one[0].number == winner.number))
    marks = [Mark(trial, x.share(size), None) for trial, size in zip(out, needed, strict=True)]
    marks += [Mark(trial, x.share(peak_bytes), y.share(speed)) for trial, peak_bytes, speed in ran]
    best, front = 0.0, []
    for trial, peak_bytes, speed in sorted(ran, key=lambda one: (one[1], -one[2])):
        if speed > best and not trial.remark:
            best = speed
            front.append((x.share(peak_bytes), y.share(speed)))
    return Chart(
        f"{len(ran)} measured trials and {len(out)} OOMs; no winner may use more than {format_bytes(ceiling_bytes)}.",
        x,
        y,
        x.share(capacity_bytes),
        x.share(ceiling_bytes),
        marks,
        front,
    )
