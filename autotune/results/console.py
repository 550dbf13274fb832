"""Terminal output: the live view of a run, and tables of a study."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from autotune.masking import masked
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Kind, Outcome
from autotune.results.tables import DataTable
from autotune.results.winner import speed, winner_lines
from autotune.search.records import RESUME, VERIFY, Record, uncollected
from autotune.search.rivals import rivals
from autotune.search.study import StudyStore
from autotune.streams import is_watched
from autotune.units import format_bytes, format_duration

_STYLE = {
    Kind.OK: "green",
    Kind.OOM_DEVICE: "yellow",
    Kind.OOM_HOST: "yellow",
    Kind.TIMEOUT: "red",
    Kind.INVALID: "magenta",
    Kind.CRASH: "red",
    Kind.INFRASTRUCTURE: "cyan",
    Kind.FOREIGN: "cyan",
    Kind.INTERRUPTED: "dim",
}


def outcome_line(outcome: Outcome) -> str:
    """Format an outcome in one line: speed and peak, or the failure."""
    if outcome.measurement is not None:
        measured = outcome.measurement
        retries = f", {measured.alloc_retries} allocator retries" if measured.alloc_retries else ""
        return f"{speed(measured)}, peak {format_bytes(measured.peak_bytes)}{retries}"
    missing = f", short of {format_bytes(outcome.missing_bytes)}" if outcome.missing_bytes else ""
    why = outcome.evidence if outcome.kind.is_oom else outcome.reason
    who = f" on rank {outcome.rank}" if outcome.rank is not None else ""
    return f"{outcome.kind.value} in {outcome.phase.value}{who}{missing}: {masked(why)[:110]}"


class PlainObserver:
    """Observer that prints plain lines, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def doing(self, text: str) -> None:
        """Show a long operation other than a trial; an empty text ends it."""

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        pass

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        what = role if role in (VERIFY, RESUME) else "trial"
        seconds = format_duration(outcome.seconds)
        self._print(f"{what} {number:>3}  {candidate}  ->  {outcome_line(outcome)}  [{seconds}]")

    def say(self, text: str) -> None:
        self._print(text)

    def clock(self, used_seconds: float, budget_seconds: float) -> None:
        pass

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class LiveObserver(PlainObserver):
    """Live view: budget, counts, the best so far, running trials with their phase, the last failures."""

    def __init__(self, console: Console, hardware: Hardware, budget_seconds: float) -> None:
        super().__init__(console)
        self._hardware, self._budget = hardware, budget_seconds
        self._began = time.monotonic()
        self._counts: Counter[Kind] = Counter()
        self._best: tuple[float, Candidate, Outcome] | None = None
        self._running: dict[int, str] = {}  # by trial number
        self._phase = ""
        self._doing: tuple[str, float] | None = None  # (text, start time)
        self._searching = False
        self._failures: list[str] = []
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def start(self) -> None:
        self._began = time.monotonic()
        self._searching = True
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def doing(self, text: str) -> None:
        self._doing = (text, time.monotonic()) if text else None
        if not self._searching:  # before the search there is no view yet
            (self._live.start if text else self._live.stop)()

    def phase(self, name: str) -> None:
        self._phase = name

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        what = {VERIFY: "verifying", RESUME: "resuming"}.get(role, "trial")
        self._running[number] = f"{what} {number}: {candidate}"

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        super().trial_finished(number, candidate, role, outcome)
        self._running.pop(number, None)
        self._counts[outcome.kind] += 1
        if outcome.measurement is None:
            self._failures = [*self._failures[-2:], f"{candidate}: {outcome_line(outcome)}"]
        elif outcome.measurement.peak_bytes <= self._hardware.ceiling_bytes:
            found = outcome.measurement.samples_per_second
            if self._best is None or found > self._best[0]:
                self._best = (found, candidate, outcome)

    def _render(self) -> Panel:
        if self._doing is not None:
            text, since = self._doing
            line = Text(f"now   {text}, {format_duration(time.monotonic() - since)} so far")
            return Panel(Group(line), title="autotune", border_style="dim")
        left = max(0.0, self._budget - (time.monotonic() - self._began))
        counts = "  ".join(f"[{_STYLE[kind]}]{kind.value} {number}[/]" for kind, number in sorted(self._counts.items()))
        lines: list[Any] = [
            Text.from_markup(f"left {format_duration(left)} of {format_duration(self._budget)}   {counts}")
        ]
        if self._best:
            lines.append(Text(f"best  {self._best[1]}  {outcome_line(self._best[2])}", style="bold green"))
        running = list(self._running.copy().values()) or ["thinking" if self._counts else "starting"]
        phase = f"  ({self._phase})" if len(running) == 1 else ""
        lines += [Text(f"now   {text}{phase}") for text in running]
        lines += [Text(f"failed {line}", style="yellow") for line in self._failures]
        return Panel(Group(*lines), title="autotune", border_style="dim")


def make_observer(hardware: Hardware, budget_seconds: float, console: Console, quiet: bool) -> PlainObserver:
    if quiet:
        return PlainObserver(Console(quiet=True))
    if console.is_terminal and is_watched(console.file):  # colours may be forced into a pipe
        return LiveObserver(console, hardware, budget_seconds)
    return PlainObserver(console)


def trials_table(records: list[Record]) -> DataTable:
    """Build a table of every trial with its result or reason."""
    table = DataTable(box=None, pad_edge=False, header_style="bold")
    for heading in ("#", "candidate", "outcome", "samples/s", "step", "peak", "why tried / what happened"):
        table.add_column(
            heading, overflow="fold", justify="right" if heading in ("#", "samples/s", "step", "peak") else "left"
        )
    for record in records:
        outcome = record.outcome
        if outcome is None:
            table.add_row(str(record.number), str(record.candidate), "running", "", "", "", record.note)
            continue
        measured = outcome.measurement
        peak = measured.peak_bytes if measured else outcome.peak_bytes
        kind = outcome.kind.value
        kind = f"{kind} ({record.role})" if record.role in (VERIFY, RESUME) else kind
        table.add_row(
            str(record.number),
            str(record.candidate),
            Text(kind, style=_STYLE[outcome.kind]),
            f"{measured.samples_per_second:.4g}" if measured else "",
            format_duration(measured.step_seconds) if measured else "",
            format_bytes(peak) if peak else "",
            record.note if measured else outcome_line(outcome),
        )
    return table


def study_json(store: StudyStore) -> dict[str, Any]:
    """Return everything that `show` prints, for JSON."""
    winner = store.winner
    return {
        "study": store.name,
        "fingerprint": store.fingerprint,
        "hardware": store.hardware.to_json(),
        "calls": [vars(call) for call in store.calls()],
        "used_seconds": sum(call.used_seconds for call in store.calls()),
        "winner": record_json(winner) if winner else None,
        "skips": store.skips,
        "trials": [record_json(record) for record in store.records()],
    }


def record_json(record: Record) -> dict[str, Any]:
    return {
        "number": record.number,
        "role": record.role,
        "note": record.note,
        "candidate": record.candidate.as_dict,
        "outcome": record.outcome.to_json() if record.outcome else None,
    }


@uncollected()
def show_study(store: StudyStore, out: Console) -> None:
    """Print a study's trials with their reasons, what was not tried and why, its calls, and its winner."""
    records, calls = store.records(), store.calls()
    out.print(trials_table(records))
    for reason, count in sorted(store.skips.items(), key=lambda item: -item[1])[:12]:
        out.print(f"not tried ({count}): {reason}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    if calls:
        total, last = sum(call.used_seconds for call in calls), calls[-1]
        print(
            f"\n{len(records)} trials; this study used {format_duration(total)} in {len(calls)} calls, the last "
            f"{format_duration(last.used_seconds)} of {format_duration(last.budget_seconds)} "
            f"({last.ended or 'not ended'})"
        )
    winner = store.winner
    lines = winner_lines(winner, rivals(store), store.job, store.hardware) if winner else ["no winner yet"]
    for line in lines:
        print(line)
