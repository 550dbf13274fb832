"""Live view, tables and winner lines on the console."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from autotune.masking import MASK, NOTE, masked, masked_data, masked_words
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script, under_lightning
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.results.export import (
    lightnings_own,
    lossy_settings,
    over_nodes,
    slice_line,
    with_checkpointing,
    without_checkpointing,
    without_zero_init,
)
from autotune.results.tables import DataTable
from autotune.script.command_line import framework_of
from autotune.script.profile import SPLIT, other_batch
from autotune.script.script import (
    RELAUNCHED,
    carried,
    carries_knob,
    flags_to_give,
    half_told,
    training_command,
    typed,
    variables_for,
)
from autotune.search.study import StudyStore
from autotune.search.trials import AS_IS, RESUME, SEARCH, VERIFY, Record, resumed_peak_bytes, uncollected
from autotune.search.tuner import comparable_trials
from autotune.util.interpreter import launched
from autotune.util.streams import is_watched
from autotune.util.units import format_bytes, format_count, format_duration
from autotune.workers.launchers import assignments, variables_of

# -- console -----------------------------------------------------------------------------------------------------------
#
# Terminal output: the live view of a run, and tables of a study.

_STYLE = {
    OutcomeKind.OK: "green",
    OutcomeKind.OOM_DEVICE: "yellow",
    OutcomeKind.OOM_HOST: "yellow",
    OutcomeKind.TIMEOUT: "red",
    OutcomeKind.INVALID: "magenta",
    OutcomeKind.CRASH: "red",
    OutcomeKind.INFRASTRUCTURE: "cyan",
    OutcomeKind.GPU_CONTENTION: "cyan",
    OutcomeKind.INTERRUPTED: "dim",
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
        """Do nothing: there is no live view."""

    def stop(self) -> None:
        """Do nothing: there is no live view."""

    def phase(self, name: str) -> None:
        """Do nothing: plain output has no phases."""

    def doing(self, text: str) -> None:
        """Show a long operation other than a trial; an empty text ends it."""

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        """Do nothing: plain output reports ends."""

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        """Print a trial's outcome in one line."""
        what = role if role in (VERIFY, RESUME) else "trial"
        seconds = format_duration(outcome.seconds)
        self._print(f"{what} {number:>3}  {candidate}  ->  {outcome_line(outcome)}  [{seconds}]")

    def say(self, text: str) -> None:
        """Print a message."""
        self._print(text)

    def clock(self, used_seconds: float, budget_seconds: float) -> None:
        """Do nothing: plain output has no clock."""

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class LiveObserver(PlainObserver):
    """Live view: budget, counts, the best so far, running trials with their phase, the last failures."""

    def __init__(self, console: Console, hardware: Hardware, budget_seconds: float) -> None:
        super().__init__(console)
        self._hardware, self._budget = hardware, budget_seconds
        self._began = time.monotonic()
        self._counts: Counter[OutcomeKind] = Counter()
        self._best: tuple[float, Candidate, Outcome] | None = None
        self._running: dict[int, str] = {}  # by trial number
        self._phase = ""
        self._doing: tuple[str, float] | None = None  # (text, start time)
        self._searching = False
        self._failures: list[str] = []
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def start(self) -> None:
        """Start the view and its clock."""
        self._began = time.monotonic()
        self._searching = True
        self._live.start()

    def stop(self) -> None:
        """Stop the view."""
        self._live.stop()

    def doing(self, text: str) -> None:
        """Show the current preparation; an empty text ends it."""
        self._doing = (text, time.monotonic()) if text else None
        if not self._searching:  # before the search there is no view yet
            (self._live.start if text else self._live.stop)()

    def phase(self, name: str) -> None:
        """Show the name of the current phase."""
        self._phase = name

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        """Show a running trial."""
        what = {VERIFY: "verifying", RESUME: "resuming"}.get(role, "trial")
        self._running[number] = f"{what} {number}: {candidate}"

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        """Print a trial's outcome, and update the counts and the best candidate."""
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
    """Return a live view for a terminal, else plain output; nothing is printed if quiet."""
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
    """Return a record as JSON data."""
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
    lines = winner_lines(winner, comparable_trials(store), store.job, store.hardware) if winner else ["no winner yet"]
    for line in lines:
        print(line)


# -- winner ------------------------------------------------------------------------------------------------------------
#
# Text about a winner: its speed, its free memory, how to train with it; or the config that came closest.

DOUBTFUL = 0.5  # share of a step's seconds; half the 95 % interval above it makes a winner doubtful


def speed(measured: Measurement) -> str:
    """Return the text of a throughput."""
    tokens = f" ({format_count(measured.tokens_per_second).strip()} tokens/s)" if _has_tokens(measured) else ""
    return f"{measured.samples_per_second:.4g} samples/s{tokens}"


def _has_tokens(measured: Measurement) -> bool:
    """Return False for batches without sequences (images), which have no tokens or one a sample."""
    return measured.tokens_per_second > 1.001 * measured.samples_per_second


def winner_lines(record: Record, records: list[Record], job: Job, hardware: Hardware) -> list[str]:
    """Describe the winner, its margin over the next best, and its free memory."""
    assert record.outcome is not None
    assert record.outcome.measurement is not None
    measured = record.outcome.measurement
    samples, tokens = measured.per_gpu(job.ranks)
    spread = 100 * measured.step_seconds_spread / measured.step_seconds
    free = 100 * (1 - measured.peak_bytes / hardware.capacity_bytes)
    lines = [
        f"winner: {record.candidate}",
        f"  {speed(measured)}, ±{spread:.1f} %; a GPU: {samples:.4g} samples/s"
        + (f", {tokens:.5g} tokens/s" if _has_tokens(measured) else ""),
        f"  step {format_duration(measured.step_seconds)}; peak {format_bytes(measured.peak_bytes)} of "
        f"{format_bytes(hardware.capacity_bytes)} ({free:.0f} % free, headroom {100 * hardware.headroom:.0f} %)",
    ]
    if measured.step_seconds_spread > DOUBTFUL * measured.step_seconds:
        lines.append(
            f"  doubtful: its steps differ so much that {measured.steps} of them tell no better: train some hundred steps "
            "with it and with your own config before you rely on it"
        )
    if measured.predicted_seconds is not None:
        lines.append(f"  {slice_line(measured, hardware)}")
    if (peak_bytes := resumed_peak_bytes(records, record.candidate)) is not None:
        lines.append(f"  goes on from a checkpoint: peak {format_bytes(peak_bytes)}")
    if measured.mfu is not None:
        lines.append(f"  {measured.model_tflops_per_gpu:.1f} model TFLOP/s a GPU, MFU {100 * measured.mfu:.1f} %")
    times = _times_others(record, records)
    fits = {
        r.candidate
        for r in records
        if r.outcome and r.outcome.measurement and r.outcome.measurement.peak_bytes <= hardware.ceiling_bytes
    }
    if ratios := [ratio for other, ratio in times.items() if other in fits]:
        lines.append(
            f"  {100 * (min(ratios) - 1):+.1f} % against the next best, {max(ratios):.1f}x the slowest of "
            f"{len(ratios) + 1} that fit"
        )
    own = next((r.candidate for r in records if r.note == AS_IS), None)
    if own is not None and own in times:
        pair = measured_alike(record, records)[own]
        lines.append(
            f"  {times[own]:.2f}x {AS_IS}: {own}{unlike_steps(own, record.candidate, job)}{_basis(measured, *pair)}"
        )
    elif own == record.candidate:
        lines.append(f"  {AS_IS} has this config already")
    if other := other_batch(record.candidate, job):
        lines.append(f"  {other}")
    return [*lines, *(f"  it {line}" for line in lossy_settings(record.candidate, job))]


def _basis(shown: Measurement, mine: Measurement, theirs: Measurement) -> str:
    """Return the two speeds of a ratio, if the winner's shown speed is another measurement's."""
    if mine is shown:
        return ""
    return f" (in the search: {mine.samples_per_second:.4g} against {theirs.samples_per_second:.4g} samples/s)"


def unlike_steps(own: Candidate, winner: Candidate, job: Job) -> str:
    """Return a note if the two take steps of different size."""
    mine, theirs = (one.micro_batch * one.accumulation * job.ranks for one in (winner, own))
    return "" if mine == theirs else f" (in tokens/s: its steps are of {theirs} samples, the winner's of {mine})"


def _times_others(winner: Record, records: list[Record]) -> dict[Candidate, float]:
    """Return the winner's tokens per second divided by those of each other config."""
    return {
        other: mine.tokens_per_second / theirs.tokens_per_second
        for other, (mine, theirs) in measured_alike(winner, records).items()
    }


def measured_alike(winner: Record, records: list[Record]) -> dict[Candidate, tuple[Measurement, Measurement]]:
    """Return (the winner's Measurement, its own) for each other config.

    Both come from verification, or both from the search, as a machine's pace may change in between.
    """
    measured: dict[str, dict[Candidate, Measurement]] = {VERIFY: {}, SEARCH: {}}
    for record in records:
        if record.outcome and record.outcome.measurement and record.role in measured:
            measured[record.role][record.candidate] = record.outcome.measurement
    mine = winner.candidate
    alike: dict[Candidate, tuple[Measurement, Measurement]] = {}
    for found in measured.values():
        for other in found.keys() - {mine} - alike.keys():
            if mine in found:
                alike[other] = found[mine], found[other]
    return alike


@dataclass(frozen=True)
class HowToTrain:
    """Commands that train a study's script with its winner, by name, and the steps left to the user."""

    commands: tuple[tuple[str, str], ...] = ()
    instead: str = ""  # alternative to the commands
    hints: tuple[str, ...] = ()  # further changes that the training needs

    def lines(self) -> list[str]:
        """Return the commands and hints as lines of text."""
        besides = [self.instead] if self.instead else []
        return [
            *(f"  {name}: {text}" for name, text in self.commands),
            *(f"  {line}" for line in (*besides, *self.hints)),
        ]


def train_with(
    winner: Candidate,
    job: Job,
    study: str,
    config: Path,
    threads: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    nodes: int = 1,
    hostfile: Path | None = None,
    python: str | None = None,
) -> HowToTrain:
    """Return how to train the study's script with its winner, whose DeepSpeed config is in `config`; empty without a script.

    Args:
        threads: CPU threads a rank that it was measured with. The launchers hand on what the command's environment says,
            and give several ranks one each where it says nothing.
        environment: what the training needs set besides, see `results.export.environment_of`.
        nodes: machines that it was tuned on, which the hostfile names.
        python: that its ranks ran in, to be shown; None: the tuner's own.
    """
    if job.script is None:
        return HowToTrain()
    path, per_node = str(config.resolve()), job.ranks // nodes
    words, each = training_command(job.script, winner, per_node, path), False
    if nodes > 1:
        words, each = over_nodes(words, nodes, per_node, hostfile)
    words = launched(words, python)
    variables = {**variables_of(winner, threads, environment), **variables_for(job.script, per_node)}
    plain = f"{assignments(masked_data(variables))} {shlex.join(masked_words(words))}"
    where = f" --hostfile {shlex.quote(str(hostfile or 'HOSTFILE'))}" if nodes > 1 else ""
    watched = f"autotune launch {shlex.quote(study)}{where} -- {shlex.join(masked_words(typed(job.script)))}"
    instead, hints = "", [NOTE] if MASK in plain + watched else []
    if carried(job.script):
        commands = [("train with, on every node" if each else "train with", plain), ("or watched", watched)]
    else:
        commands = [("train with", watched)]
        instead = f"or put {config} where the script has its own config"
        if given := flags_to_give(job.script, winner):
            instead += f", and give it {shlex.join(given)}"
        if under_lightning(job.script) and not job.script.holds_batch:
            hints += [f"  {lightnings_own(winner)}"]
    hints += [f"  {line}" for line in _checkpointing(winner, job, job.script)]
    if whole := without_zero_init(winner, job):
        hints += [f"  {whole}"]
    started = job.script.profile.get(RELAUNCHED, 0)
    if started not in (0, per_node) and not job.script.launcher and framework_of(job.script) is None:
        hints += [f"  it starts its own ranks: have it start {per_node}"]
    loads = job.script.profile["loader_prepared"] and not job.script.holds_batch
    if loads and not carries_knob(job.script, MICRO_BATCH):
        size = winner.micro_batch * (job.ranks if job.script.profile.get(SPLIT) else 1)
        hints += [f"  with batch_size={size} in its data loader, which no config reaches"]
    if half := half_told(job.script, winner):
        hints += [f"  {half}"]
    return HowToTrain(tuple(commands), instead, tuple(hints))


def _checkpointing(winner: Candidate, job: Job, script: Script) -> list[str]:
    """Return the change of activation checkpointing that the script's code needs, if its command does not carry it.

    If the script has it on and the winner off, the change is always listed: no flag can switch off what the code
    switches on.
    """
    if winner.checkpointing:
        known = script.profile.get("checkpointed") or carries_knob(script, CHECKPOINTING)
        return [] if known else [with_checkpointing(job)]
    left = without_checkpointing(winner, job)
    return [left] if left else []


def _missing_bytes(outcome: Outcome, hardware: Hardware) -> int | None:
    """Return a lower bound of the bytes by which a config missed the ceiling.

    None if the config did not miss it, or failed for another reason.
    """
    if outcome.measurement is not None:
        over = outcome.measurement.peak_bytes - hardware.ceiling_bytes
        return over if over > 0 else None
    headroom = _headroom_bytes(hardware) if outcome.kind is not OutcomeKind.OOM_HOST else 0
    return (outcome.missing_bytes or 0) + headroom if outcome.kind.is_oom else None


def _headroom_bytes(hardware: Hardware) -> int:
    return hardware.capacity_bytes - hardware.ceiling_bytes


def short_of(outcome: Outcome, hardware: Hardware) -> str:
    """Describe the memory that a config lacked; empty if it failed for another reason."""
    missing = _missing_bytes(outcome, hardware)
    if missing is None:
        return ""
    if outcome.measurement is not None:
        return f"over the headroom, short of {format_bytes(missing)}"
    asked, headroom = outcome.missing_bytes or 0, _headroom_bytes(hardware)
    if outcome.kind is OutcomeKind.OOM_HOST:  # host memory has no headroom
        lacked = f", short of at least {format_bytes(asked)}" if asked else ""
        return f"ran out of main memory in {outcome.phase.value}{lacked}"
    parts = [f"{format_bytes(asked)} beyond what there is" if asked else "how much an allocation lacked is not known"]
    parts += [f"{format_bytes(headroom)} of headroom"] if headroom else []
    return f"ran out in {outcome.phase.value}, short of at least {format_bytes(missing)} ({', '.join(parts)})"


def nearest(records: Sequence[Record], hardware: Hardware) -> Record | None:
    """Return the trial closest to fitting: the furthest phase, then the fewest missing bytes. None if memory failed none."""
    order = [phase.value for phase in Phase]
    over = [
        (-order.index(record.outcome.phase.value), missing, record)
        for record in records
        if record.outcome is not None and (missing := _missing_bytes(record.outcome, hardware)) is not None
    ]
    return min(over, key=lambda item: item[:2])[2] if over else None


def closest_lines(records: list[Record], hardware: Hardware, untried: list[Candidate]) -> list[str]:
    """Describe the config that came closest if nothing fits: bytes missing, and the cheapest changes that would help."""
    record = nearest(records, hardware)
    if record is None or record.outcome is None:
        reasons = Counter(
            f"{r.outcome.kind.value}: {r.outcome.reason[:120]}" for r in records if r.outcome and not r.outcome.ok
        )
        return [f"no candidate ran: {reason} ({count}x)" for reason, count in reasons.most_common(3)]
    lines = [f"closest: {record.candidate}: {short_of(record.outcome, hardware)}"]
    candidate, changes = record.candidate, []
    if candidate.micro_batch > 1:
        changes.append(f"micro-batch {candidate.micro_batch} -> {candidate.micro_batch // 2}")
    if not candidate.checkpointing:
        changes.append("activation checkpointing on")
    if candidate.stage < 3:
        changes.append(f"ZeRO stage {candidate.stage} -> {candidate.stage + 1}")
    if candidate.offload_optimizer == "none":
        changes.append("optimizer offload to CPU")
    elif candidate.stage == 3 and candidate.offload_param == "none":
        changes.append("parameter offload to CPU")
    changes += ["a shorter --seq-len", "more GPUs (stages 1 to 3 split their states over them)", "--space low_memory"]
    tried = {r.candidate.but(**{MICRO_BATCH: 1, ACCUMULATION: 1}) for r in records}
    hint = (
        ""
        if any(c.but(**{MICRO_BATCH: 1, ACCUMULATION: 1}) not in tried for c in untried)
        else " (all of this space's tried)"
    )
    lines.append(f"cheapest changes to try{hint}: {'; '.join(changes[:5])}")
    return lines
