"""The charts of a page: positions, shapes, colours and labels."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from autotune.results.report.charts import Axis, Part, Plot, stacked
from autotune.results.report.data import Bars, Status, StudyReport, Trial
from autotune.search.records import RESUME, TRAINING
from autotune.units import GIB, MIB, format_bytes, format_count, format_duration

SHAPES = ("0", "1", "2", "3")  # for ZeRO's stages: circle, square, triangle, diamond (base.html.j2)
LETTERS = {  # for contents of memory; the classes `hold-…` of page.css have a colour and a texture for each
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
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
    return GIB if axis.name.endswith("(GiB)") else MIB


def look(trial: Trial) -> tuple[str, str]:
    """Return (shape, classes): shape and colour show the stage, hollow marks offload, a cross marks a failure."""
    stage = min(3, int(trial.knobs.get("zero_stage", 0)))
    hollow = any(trial.knobs.get(name, "none") != "none" for name in ("offload_optimizer", "offload_param"))
    if trial.status in (Status.FAILED, Status.UNDECIDED, Status.RUNNING):
        return "plus", "gone"
    shape = SHAPES[stage] if trial.status is not Status.RAN_OUT else "cross"
    return shape, f"s{stage}" + (" hollow" if hollow else "")


def speed_against_memory(report: StudyReport) -> Markup | None:
    """Draw tokens per second over the peak for all trials. OOM trials are in a lane, at the least memory they would have
    needed. None if no speed was measured, as there is no axis."""
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
    front = _front([t for t in ran if t.status is Status.FITS])
    plot.steps([((t.peak_bytes or 0) / unit, t.tokens_per_second or 0) for t in front], "front")
    for trial in out:
        shape, classes = look(trial)
        plot.mark(shape, needed[trial.number] / unit, None, classes, trial.number)
    for trial in ran:
        shape, classes = look(trial)
        plot.mark(shape, (trial.peak_bytes or 0) / unit, trial.tokens_per_second, classes, trial.number)
    winner = report.verdict.winner
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
    """Draw every trial as a line as long as its duration, at its speed, and the best so far. Trials are drawn in sequence,
    without the time between them. None if no trial took time or measured a speed."""
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
        shape, classes = look(trial)
        speed = trial.tokens_per_second
        if speed is not None:
            plot.line(at / unit, speed, end / unit, speed, f"took {classes}", trial.number)
            plot.mark(shape, end / unit, speed, classes, trial.number)
            if trial.status is Status.FITS and speed > best:
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
            shape, classes = look(trial)
            plot.mark(shape, measured / unit, predicted / unit, classes, trial.number)
        made.append(plot.html())
    return made


def letter(part: str) -> str:
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
        parts = [Part(f"{n}: {format_bytes(size)}", size, letter(n), hold(n)) for n, size in bar.parts]
        about = "; ".join(part.name for part in parts)
        title = f"Memory of a rank, {bar.name}: {bars.label}"
        lines = ((float(ceiling_bytes), "ceiling"), (float(capacity_bytes), "capacity"))
        made.append((bar.name, stacked(f"bar-{at}-{bar.name}", title, about, parts, scale, lines)))
    return made
