"""Live view, tables and winner lines on the console."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from autotune.executors.cluster.transports import hostfile_of
from autotune.explain.explanation import explain_outcome
from autotune.masking import MASK, NOTE, masked, masked_data, masked_words
from autotune.predict.features import columns_of
from autotune.predict.zero_memory import reduce_bucket_bytes
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    KNOBS,
    MICRO_BATCH,
    RUNG_KNOBS,
    Candidate,
    Value,
    describe,
    job_with_candidate,
)
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script, weights_bytes
from autotune.problem.knobs import LEVERS
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.results.export import (
    code_changes,
    environment_of,
    exported_record,
    lossy_settings,
    needs_of_loss,
    trainer_flags,
)
from autotune.results.tables import WINNER, DataTable, print_line, print_lines
from autotune.script.argument_files import own_files
from autotune.script.command_line import framework_of
from autotune.script.environment import secrets_of
from autotune.script.profile import growth_line, other_batch
from autotune.script.recorded import options_to_type
from autotune.script.script import (
    carries_knob,
    command,
    command_names_config,
    training_command,
    typed_words,
    variables_for,
    wrong_batch_warning,
)
from autotune.search.certificate import certificate_lines
from autotune.search.leaderboard import Leaderboard, StudyFacts, missing_bytes
from autotune.search.stopping import StopReason
from autotune.search.trials import AS_IS, RESUME, VERIFY, Record, resumed_peak_bytes
from autotune.util.interpreter import launch_command
from autotune.util.streams import LOG, Command, is_watched
from autotune.util.units import counted, format_bytes, format_count, format_duration
from autotune.workers.launchers import assignments, variables_of

if TYPE_CHECKING:
    from autotune.search.study import StudyStore  # it imports databases, which `plan` needs none of

# -- console -----------------------------------------------------------------------------------------------------------
#
# Terminal output: the live view of a run, and tables of a study.

_STYLE = {
    OutcomeKind.OK: "default",
    OutcomeKind.OOM_DEVICE: "yellow",
    OutcomeKind.OOM_HOST: "yellow",
    OutcomeKind.TIMEOUT: "red",
    OutcomeKind.INVALID: "magenta",
    OutcomeKind.CRASH: "red",
    OutcomeKind.INFRASTRUCTURE: "cyan",
    OutcomeKind.GPU_CONTENTION: "cyan",
    OutcomeKind.INTERRUPTED: "dim",
}


# phrases for a phase in which memory ran out; other phases are named as they are
_PHASES = {Phase.START: "start-up", Phase.INIT: "setup"}
_MOST_REASON = 110  # characters of a reason in one line; `show --trial` has the rest


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters, cut between words, with … for the rest."""
    flat = " ".join(text.split())
    if len(flat) <= most:
        return flat
    cut = flat[: most - 1].rpartition(" ")[0] or flat[: most - 2]  # a word longer than the line
    return f"{cut} …"


def outcome_line(outcome: Outcome) -> str:
    """Format an outcome in one line: speed and peak, or the failure."""
    if outcome.measurement is not None:
        measured = outcome.measurement
        retries = f", {measured.alloc_retries} allocator retries" if measured.alloc_retries else ""
        return f"{throughput_text(measured)}, peak {format_bytes(measured.peak_bytes)}{retries}"
    who = f" on rank {outcome.rank}" if outcome.rank is not None else ""
    if outcome.kind.is_oom:
        missing = f", {format_bytes(outcome.missing_bytes)} short" if outcome.missing_bytes else ""
        return f"{outcome.kind.word} in {_PHASES.get(outcome.phase, outcome.phase.value)}{who}{missing}"
    return f"{outcome.kind.word} in {outcome.phase.value}{who}: {shortened(masked(outcome.reason), _MOST_REASON)}"


class PlainObserver:
    """Observer that prints plain lines, for logs and pipes. A `with` block holds the output of a command."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._look: Callable[[], Leaderboard] | None = None
        self._leaderboard: Leaderboard | None = None
        self._last = ""

    def __enter__(self) -> PlainObserver:
        """Open the view."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the view, also after an error."""

    def begin_study(self, look: Callable[[], Leaderboard]) -> None:
        """Receive the function that returns the leaderboard of a study's trials so far."""
        self._look, self._leaderboard = look, look()

    def start(self, budget_seconds: float, used_seconds: float) -> None:
        """Receive the start of the search, with its budget and the seconds used before."""

    def phase(self, name: str) -> None:
        """Log a phase: plain output has none."""
        LOG.debug("phase %s", name)

    def doing(self, text: str) -> None:
        """Print a long operation other than a trial; an empty text ends it."""
        if text and text != self._last:
            self.print_line(text)

    def showing(self, text: str) -> None:
        """Log the operation: plain output has its own line about it."""
        LOG.debug(text)

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        """Log the start with its reason: plain output reports ends."""
        LOG.debug("%s %d starts: %s (%s)", role, number, candidate, note)

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        """Print a trial's outcome in one line; it is dimmed and says why if the trial cannot win."""
        what = role if role in (VERIFY, RESUME) else "trial"
        if outcome.evidence:
            LOG.debug("%s %d: %s", role, number, outcome.evidence)
        seconds, remark = format_duration(outcome.seconds), ""
        if self._look is not None:
            self._leaderboard = self._look()
            remark = self._leaderboard.remark(candidate, outcome)
        line, style = f"{what} {number:>3}  {candidate}  ->  {outcome_line(outcome)}", _STYLE[outcome.kind]
        if remark:
            line, style = f"{line}, {shortened(remark, _MOST_REASON)}", "dim"
        self.print_line(f"{line}  [{seconds}]", style)

    def print_line(self, text: str, style: str = "") -> None:
        """Print a message."""
        self._last = text
        print_line(text, self.console, style)


class LiveObserver(PlainObserver):
    """Live view: a bar to the end of the budget, counts, the best that can still win, running trials, the last failures.

    One Live is started and stopped once: a Live that is started again erases as many printed lines as its view had.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._began = time.monotonic()
        self._budget = 0.0  # s; 0 before the search
        self._counts: Counter[OutcomeKind] = Counter()
        self._running: dict[int, str] = {}  # by trial number
        self._phase = ""
        self._doing: tuple[str, float] = ("starting", self._began)  # (text, start time)
        self._failures: list[str] = []
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def __enter__(self) -> LiveObserver:
        """Open the view."""
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the view, also after an error."""
        self._live.stop()

    def start(self, budget_seconds: float, used_seconds: float) -> None:
        """Start the bar of the budget."""
        self._budget, self._began = budget_seconds, time.monotonic() - used_seconds
        self._doing = ("", 0.0)

    def doing(self, text: str) -> None:
        """Show the current preparation; an empty text ends it."""
        self._doing = (text, time.monotonic())

    def showing(self, text: str) -> None:
        """Show the current preparation, about which a line is printed elsewhere."""
        super().showing(text)
        self.doing(text)

    def phase(self, name: str) -> None:
        """Show the name of the current phase."""
        super().phase(name)
        self._phase = name

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        """Show a running trial."""
        super().trial_started(number, candidate, role, note)
        what = {VERIFY: "verifying", RESUME: "resuming"}.get(role, "trial")
        self._running[number] = f"{what} {number}: {candidate}"

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        """Print a trial's outcome, and update the counts."""
        super().trial_finished(number, candidate, role, outcome)
        self._running.pop(number, None)
        self._counts[outcome.kind] += 1
        if outcome.measurement is None and not outcome.ok:
            self._failures = [*self._failures[-2:], f"{candidate}: {outcome_line(outcome)}"]

    def _render(self) -> Panel:
        now, lines = time.monotonic(), list[RenderableType]()
        if self._budget:
            left = max(0.0, self._budget - (now - self._began))
            counts = "  ".join(f"[{_STYLE[kind]}]{kind.word} {n}[/]" for kind, n in sorted(self._counts.items()))
            bar = ProgressBar(self._budget, min(self._budget, now - self._began), width=24)
            told = f"left {format_duration(left)} of {format_duration(self._budget)}   {counts}"
            lines.append(Columns([bar, Text.from_markup(told)]))
        board = self._leaderboard
        if board is not None and board.best is not None:
            speed = throughput_text(board.measured[board.best][1])
            lines.append(Text(f"best  {board.best}  {speed}", style="bold green"))
        text, since = self._doing
        running = list(self._running.copy().values())
        if text:
            running = [f"{text}, {format_duration(now - since)} so far", *running]
        phase = f"  ({self._phase})" if len(running) == 1 and not text and self._phase else ""
        lines += [Text(f"now   {one}{phase}") for one in running or ["choosing the next config"]]
        lines += [Text(f"failed {line}", style="yellow") for line in self._failures]
        # A terminal echoes ^C behind the last border. In the last columns it would wrap, and the view would lose a line's place.
        return Panel(Group(*lines), title="autotune", border_style="dim", width=max(20, self.console.width - 6))


def make_observer(console: Console, quiet: bool) -> PlainObserver:
    """Return a live view for a terminal, else plain output; nothing is printed if quiet."""
    if quiet:
        return PlainObserver(Console(quiet=True))
    if console.is_terminal and is_watched(console.file):  # colours may be forced into a pipe
        return LiveObserver(console)
    return PlainObserver(console)


def trials_table(records: Sequence[Record], facts: StudyFacts) -> DataTable:
    """Build a table of every trial with its result or reason; trials that cannot win are dimmed."""
    table = DataTable(box=None, pad_edge=False, header_style="bold")
    for heading in ("#", "candidate", "outcome", "samples/s", "step", "peak", "why tried / what happened"):
        justify: JustifyMethod = "right" if heading in ("#", "samples/s", "step", "peak") else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for record in records:
        outcome = record.outcome
        if outcome is None:
            table.add_row(str(record.number), str(record.candidate), "running", "", "", "", record.note)
            continue
        speed, step, peak = "", "", outcome.peak_bytes
        remark, told = facts.remark(record.number), outcome_line(outcome)
        if measured := outcome.measurement:
            speed, step = f"{measured.samples_per_second:.4g}", format_duration(measured.step_seconds)
            peak = measured.peak_bytes
        if measured or outcome.ok:
            told = f"{shortened(remark, _MOST_REASON)}; {record.note}" if remark else record.note
        kind, style = outcome.kind.word, "dim" if remark else _STYLE[outcome.kind]
        if record.role in (VERIFY, RESUME):
            kind += f" ({record.role})"
        if facts.winner is not None and record.number == facts.winner.number:
            kind += ", winner"
        table.add_row(
            str(record.number),
            Text(str(record.candidate), style="dim" if remark else ""),
            Text(kind, style=style),
            speed,
            step,
            format_bytes(peak) if peak else "",
            told,
        )
    return table


def study_json(store: StudyStore) -> dict[str, Any]:
    """Return everything that `show` prints, for JSON."""
    facts = store.facts()
    return {
        "study": store.name,
        "folder": str(store.folder or ""),
        "winner": facts.winner and record_json(facts.winner),
        "verified": facts.verified,
        "ended": facts.call.ended,
        "used_seconds": facts.call.used_seconds,
        "lines": verdict_lines(facts, store.job, store.hardware),
        "verdict": facts.to_json(),
        "hardware": store.hardware.to_json(),
        "fingerprint": store.fingerprint,
        "calls": [vars(call) for call in store.calls()],
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


def show_study(store: StudyStore, out: Console) -> None:
    """Print a study's trials with their reasons, what was not tried and why, its calls, and its verdict."""
    records, calls, facts = store.records(), store.calls(), store.facts()
    out.print(trials_table(records, facts))
    if legend := code_legend(*(record.candidate for record in records)):
        print_line(f"codes: {legend}", out, "dim")
    for reason, count in sorted(store.skips.items(), key=lambda item: -item[1])[:12]:
        print_line(f"not tried ({count}): {reason}", out)
    if calls:
        total, last = sum(call.used_seconds for call in calls), calls[-1]
        print_line(
            f"\n{counted(len(records), 'trial')}; this study used {format_duration(total)} in "
            f"{counted(len(calls), 'call')}, the last {format_duration(last.used_seconds)} of "
            f"{format_duration(last.budget_seconds)} ({last.ended or 'not ended'})",
            out,
        )
    print_lines(verdict_lines(facts, store.job, store.hardware), out)
    print_lines(detail_lines(facts, records, store.job, store.hardware), out)
    if facts.winner:
        print_lines(how_to_train(store, facts.winner.candidate).lines(), out)


def trial_lines(store: StudyStore, record: Record) -> list[str]:
    """Return lines with everything that is stored of one trial: config, outcome, evidence, logs."""
    number, facts = record.number, store.facts()
    lines = [f"trial {number} ({record.role}): {config_sentence(record.candidate, store.job, store.hardware)}"]
    lines += [f"  config: {record.candidate}", f"  why tried: {record.note}"]
    outcome = record.outcome
    if outcome is None:
        return [*lines, "  running"]
    lines.append(f"  outcome: {outcome_line(outcome)}, after {format_duration(outcome.seconds)}")
    if remark := facts.remark(number):
        lines.append(f"  {remark}")
    told = {"reason": outcome.reason, "evidence": outcome.evidence, "exceptions": ", ".join(outcome.exceptions)}
    told |= {"peak": format_bytes(outcome.peak_bytes) if outcome.peak_bytes else "", "logs": outcome.log or ""}
    told["batch"] = "\n  batch: ".join(store.job.profile.attempts if record.note == AS_IS else ())
    return [*lines, *(f"  {name}: {masked(text)}" for name, text in told.items() if text)]


# -- winner ------------------------------------------------------------------------------------------------------------
#
# Text about a winner: its speed, its free memory, how to train with it; or the config that came closest.

DOUBTFUL = 0.5  # share of a step's seconds; half the 95 % interval above it makes a winner doubtful


def throughput_text(measured: Measurement) -> str:
    """Return the text of a throughput."""
    tokens = f" ({format_count(measured.tokens_per_second).strip()} tokens/s)" if _has_tokens(measured) else ""
    return f"{measured.samples_per_second:.4g} samples/s{tokens}"


def _has_tokens(measured: Measurement) -> bool:
    """Return False for batches without sequences (images), which have no tokens or one a sample."""
    return measured.tokens_per_second > 1.001 * measured.samples_per_second


KNOB_WORDS = {
    MICRO_BATCH: "micro-batch",
    ACCUMULATION: "accumulation",
    CHECKPOINTING: "checkpointing",
    "zero_stage": "ZeRO stage",
}


def knob_words(name: str) -> str:
    """Return a knob's name for display, in words between which a narrow column may break."""
    return KNOB_WORDS.get(name, name.rpartition(".")[2].replace("_", " "))


def config_sentence(candidate: Candidate, job: Job, hardware: Hardware) -> str:
    """Describe a config in words: ZeRO stage, batch, devices, offload and checkpointing. Other knobs are in its short codes."""
    if not candidate.knobs:
        return AS_IS
    unit = _unit(hardware)
    by_hand = round(job.samples_per_row) if job.script is not None else 1  # backwards that its loop sums
    batch = candidate.rows_per_rank * job.data_ranks * by_hand
    return ", ".join(
        [
            f"ZeRO-{candidate.stage}",
            f"micro-batch {candidate.micro_batch}",
            f"accumulation {candidate.accumulation}",
            f"{job.ranks} {unit}{'s' if job.ranks > 1 else ''} (global batch {batch})",
            *(_offloads(candidate) or ["no offload"]),
            *(_checkpoints(candidate) or ["no checkpointing"] * (CHECKPOINTING in candidate.as_dict)),
        ]
    )


def _checkpoints(candidate: Candidate) -> list[str]:
    share = candidate.checkpointed_share
    return ["checkpointing" if share == 1 else f"checkpointing of {share:.0%} of the layers"] * candidate.checkpointing


def _offloads(candidate: Candidate) -> list[str]:
    places = {"cpu": "CPU", "nvme": "NVMe"}
    kept = {"optimizer": candidate.offload_optimizer, "parameters": candidate.offload_param}
    return [f"{what} offloaded to {places.get(where, where)}" for what, where in kept.items() if where != "none"]


def _briefly(candidate: Candidate) -> str:
    """Describe a config in a few words: `ZeRO-2, micro-batch 4 x 2`."""
    if not candidate.knobs:
        return AS_IS
    parts = [f"ZeRO-{candidate.stage}", f"micro-batch {candidate.micro_batch} x {candidate.accumulation}"]
    return ", ".join([*parts, *_offloads(candidate), *_checkpoints(candidate)])


def code_legend(*candidates: Candidate) -> str:
    """Explain the short codes of configs: `z: ZeRO stage, mb: micro-batch`."""
    known = [(one, name, KNOBS[name].short if name in KNOBS else "") for one in candidates for name, _ in one.knobs]
    shown = {short: name for one, name, short in known if short and describe({name: one.get(name)})}
    codes = " ".join(map(str, candidates))
    ordered = sorted((one for one in shown if one in codes), key=codes.index)
    return ", ".join(f"{short}: {knob_words(shown[short])}" for short in ordered)


def own_line(facts: StudyFacts, job: Job) -> str:
    """Compare the winner with the script's own config; empty without a script."""
    own = facts.own
    if own is None or own.outcome is None:
        return ""
    yours = f"yours ({_briefly(own.candidate)})"
    winner = facts.winner
    measured = facts.winning
    if own.outcome.measurement is None:
        won = f"; winner: {throughput_text(measured)}" if measured else ""
        ended = _oom_text(own.candidate, own.outcome, job)
        return f"{yours}: {ended}{won}"
    if winner is not None and winner.candidate == own.candidate:
        return f"{yours} is the winner: {AS_IS} has this config already"
    ratio, remark = facts.own_ratio, facts.remark(own.number)
    if winner is None or ratio is None:
        return f"{yours}: {throughput_text(own.outcome.measurement)}{f', {remark}' if remark else ''}"
    alike = f"{ratio.speeds}{batch_size_note(own.candidate, winner.candidate, job)}"
    barred = f"; yours cannot win: {remark}" if remark else ""
    if ratio.is_noise:
        return f"{yours}: tied with the winner, {ratio.times:.2f}x is below noise ({alike}){barred}"
    gains = ", ".join(f"{gain:.2f}x by {' and '.join(map(knob_words, names))}" for names, gain in facts.gains)
    return f"{yours}: the winner is {ratio.times:.2f}x yours{gains and f': {gains}'} ({alike}){barred}"


def _oom_text(candidate: Candidate, outcome: Outcome, job: Job) -> str:
    """Format an outcome, and the tensor for which memory ran out if it is known."""
    explained = explain_outcome(candidate, outcome, job)
    if not explained:
        return outcome_line(outcome)
    return f"{outcome_line(dataclasses.replace(outcome, missing_bytes=None))}: {explained}"


def verdict_lines(facts: StudyFacts, job: Job, hardware: Hardware) -> list[str]:
    """Describe the verdict: the script's own config, the winner in words, its speed, memory and certainty, and warnings."""
    return [*filter(None, [own_line(facts, job)]), *winner_lines(facts, job, hardware)]


def winner_lines(facts: StudyFacts, job: Job, hardware: Hardware) -> list[str]:
    """Describe the winner, or why there is none."""
    record, measured = facts.winner, facts.winning
    if record is None or measured is None:
        return no_winner_lines(facts, job, hardware)
    free = 100 * (1 - measured.peak_bytes / hardware.capacity_bytes)
    mfu = f", MFU {100 * measured.mfu:.1f} %" if measured.mfu is not None else ""
    lines = [
        f"{WINNER}{config_sentence(record.candidate, job, hardware)} ({record.candidate})",
        f"  speed: {throughput_text(measured)}, step {format_duration(measured.step_seconds)}{mfu}",
        f"  memory: peak {format_bytes(measured.peak_bytes)} of {format_bytes(hardware.capacity_bytes)} "
        f"({free:.0f} % free, headroom {100 * hardware.headroom:.0f} %)",
        f"  certainty: {_certainty(facts, measured)}",
    ]
    if measured.step_seconds_spread > DOUBTFUL * measured.step_seconds:
        lines.append(
            f"  doubtful: its steps differ so much that {measured.steps} of them prove little: train some hundred steps "
            "with it and with your own config before you rely on it"
        )
    lines += [f"  {line}" for line in facts.better]
    if other := other_batch(record.candidate, job):
        lines.append(f"  {other}")
    if grows := job.profile.grows:
        lines.append(f"  {growth_line(grows)}")
    lines += [f"  your training must {line}" for line in needs_of_loss(job_with_candidate(job, record.candidate))]
    return [*lines, *(f"  it {line}" for line in lossy_settings(record.candidate, job))]


def _certainty(facts: StudyFacts, measured: Measurement) -> str:
    """Describe how sure a winner is: its verification, the interval of its speed, ties, and the bound of untried configs."""
    verified = "verified" if facts.verified else "not verified, run again to verify it"
    tied = f", tied with {counted(len(facts.tied), 'other')}" if facts.tied else ""
    spread = 100 * measured.step_seconds_spread / measured.step_seconds
    return "; ".join(filter(None, [f"{verified}, ±{spread:.1f} % (95 %){tied}", facts.call.confidence]))


def detail_lines(facts: StudyFacts, records: Sequence[Record], job: Job, hardware: Hardware) -> list[str]:
    """Describe what the verdict leaves out: speed per rank, training compared, other configs, torch without DeepSpeed."""
    record, measured = facts.winner, facts.winning
    if record is None or measured is None:
        return []
    lines = [_per_rank(measured, job, hardware)] if job.ranks > 1 else []
    if measured.mfu is not None:
        lines.append(f"{measured.model_tflops_per_gpu:.1f} model TFLOP/s per GPU")
    if hardware.reserve_bytes:
        left = sync_note(job, record.candidate.stage, hardware.capacity_bytes - measured.peak_bytes)
        lines.append(f"{format_bytes(hardware.reserve_bytes)} of each device are left to another process (--reserve)")
        lines.append(f"weight sync: {left}")
    if (peak_bytes := resumed_peak_bytes(list(records), record.candidate)) is not None:
        lines.append(f"resumes from a checkpoint: peak {format_bytes(peak_bytes)}")
    lines += certificate_lines(job, records, record)
    return [f"  {line}" for line in [*lines, *facts.comparison()] if line not in facts.better]


def _per_rank(measured: Measurement, job: Job, hardware: Hardware) -> str:
    """Return the speed of one of several ranks."""
    samples, tokens = measured.per_gpu(job.ranks)
    text = f"per {_unit(hardware)}: {samples:.4g} samples/s"
    return text + (f", {format_count(tokens).strip()} tokens/s" if _has_tokens(measured) else "")


def _unit(hardware: Hardware) -> str:
    return "GPU" if hardware.device == "cuda" else "CPU rank"


def batch_size_note(own: Candidate, winner: Candidate, job: Job) -> str:
    """Return a note if the two take steps of different size."""
    mine, theirs = (one.rows_per_rank * job.data_ranks for one in (winner, own))
    return "" if mine == theirs else f"; its steps are of {theirs} samples, the winner's of {mine}"


@dataclass(frozen=True)
class HowToTrain:
    """Commands that train a study's script with its winner, the shortest first, and the steps left to the user."""

    commands: tuple[tuple[str, str], ...] = ()
    hints: tuple[str, ...] = ()  # further changes that the training needs

    def lines(self, most: int | None = None) -> list[str]:
        """Return the commands, at most so many, and the hints as lines of text."""
        commands = [Command(f"  {name}: {text}") for name, text in self.commands[:most]]
        return [*commands, *(f"    {line}" for line in self.hints)]


def how_to_train(store: StudyStore, winner: Candidate, config: Path | None = None) -> HowToTrain:
    """Return how to train with a study's winner, whose DeepSpeed config is in `config`; None: where `run` exports it."""
    config = config or Path(store.folder or "", f"{store.name}.json")
    about = (winner, store.job, store.name, config, store.threads, environment_of(store, winner))
    hostfile = hostfile_of(store.folder or Path())
    return train_with(*about, nodes=store.hardware.nodes, hostfile=hostfile, python=store.python)


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
    """Return how to train with a study's winner, whose DeepSpeed config is in `config`.

    Args:
        threads: CPU threads a rank that it was measured with. The launchers hand on what the command's environment says,
            and give several ranks one each where it says nothing.
        environment: what the training needs set besides, see `results.export.environment_of`.
        nodes: machines that it was tuned on, which the hostfile names.
        python: that its ranks ran in, to be shown; None: the tuner's own.
    """
    if job.script is None:
        train = ("autotune", "launch", study, "--", "train.py", "--deepspeed", str(config))
        return HowToTrain(
            (
                ("train with", shlex.join(train)),
                ("config for Trainer", f"autotune export {shlex.quote(study)} --format hf"),
            )
        )
    per_node = job.ranks // nodes
    words = launch_command(training_command(job.script, winner, per_node, str(config.resolve())), python)
    variables = {**variables_of(winner, threads, environment), **variables_for(job.script, winner, per_node)}
    plain = f"{assignments(masked_data(variables))} {shlex.join(masked_words(words))}"
    options = [options_to_type(job.script, dataclasses.replace(job.script, flags=(), ds_config=None))]
    if nodes > 1:
        options.append(f"--hostfile {shlex.quote(str(hostfile or 'HOSTFILE'))}")
    if python:
        options.append(f"--python {shlex.quote(python)}")
    typed = shlex.join(masked_words(typed_words(job.script)))
    watched = " ".join(["autotune launch", shlex.quote(study), *filter(None, options), "--", typed])
    otherwise, hints = "or without autotune", [NOTE] if MASK in plain + watched else []
    if not command_names_config(job.script):
        otherwise = f"or put {config} where the script has its own config, and train with"
    carried = job.profile.checkpointed or carries_knob(job.script, CHECKPOINTING)
    hints += code_changes(winner, job, carried=carried)
    carriers = [knob for knob in (*RUNG_KNOBS, *LEVERS) if not carries_knob(job.script, knob)]
    left = [(KNOBS[knob], value) for knob, value in winner.passed_knobs(job.script) if knob in carriers]
    if job.profile.through_arguments and left:
        named = ", ".join(f"{one.trainer}={value}" for one, value in left)
        hints += [f"with {named} in its TrainingArguments, which the config does not set"]
    elif not job.profile.through_arguments:
        hints += [f"{one.in_code}, as `autotune launch` does: it was measured so" for one, _ in left if one.in_code]
    if secrets := secrets_of(job.profile.environment):
        hints += [f"it reads {', '.join(secrets)}: set your own"]
    started = job.profile.relaunched
    if started not in (0, per_node) and not job.script.launcher and framework_of(job.script) is None:
        hints += [f"it starts its own ranks: have it start {per_node}"]
    loads = job.profile.loader_prepared and not job.script.holds_batch
    if loads and not carries_knob(job.script, MICRO_BATCH):
        size = winner.micro_batch * (job.ranks if job.profile.loader_split else 1)
        hints += [f"with batch_size={size} in its data loader, which no config reaches"]
    if half := wrong_batch_warning(job.script, winner):
        hints.append(half)
    commands = [("train with", watched)]
    if nodes == 1:
        commands.append((otherwise, plain))
    return HowToTrain(tuple(commands), tuple(hints))


def usage_lines(style: str, files: Sequence[Path], store: StudyStore, trial: int | None) -> list[str]:
    """Return lines that say how to use an exported file. The command of a script's study has its values for the batch."""
    file, own, job = shlex.quote(str(files[0])), store.job.script, store.job
    candidate = exported_record(store, trial).candidate
    flags = shlex.join(trainer_flags(candidate, job, store.hardware.device))
    script, front = " YOUR_SCRIPT.py ITS_ARGUMENTS", ""
    below = script if style == "fsdp" else f"{script} {flags}"
    training = f"deepspeed{script} --deepspeed_config {file}"
    further = [f"with transformers' Trainer: deepspeed{script} --deepspeed {file} {flags}"]
    if own is not None:
        how = how_to_train(store, candidate, files[0])
        below = _below_accelerate(own, candidate, style, files) or script
        script, further = "", [*how.hints]
        training = how.commands[-1][1]
        if variables := variables_for(own, candidate, job.ranks // store.hardware.nodes):
            front = f"{assignments(masked_data(variables))} "
        configs = {"deepspeed": files[0], "sbatch": files[1]}
        if style in configs and not command_names_config(own):
            further.insert(0, f"put {configs[style]} where the script has its own config")
    started = f"{front}accelerate launch --config_file {file}{below}"
    uses = {
        "deepspeed": training,
        "accelerate": started,
        "fsdp": started,
        "hf": f"TrainingArguments(output_dir=…, **json.load(open({str(files[0])!r}))) in your script",
        "sbatch": f"sbatch {file}{script}",
    }
    lines = [f"use: {uses[style]}"]
    if style == "deepspeed" or own is not None:
        lines += [f"     {line}" for line in further]
    remark = store.facts().remark(trial) if trial is not None else ""
    if remark:
        lines.append(f"note: trial {trial} cannot win: {remark}")
    return lines


def exported_json(store: StudyStore, files: Sequence[Path], style: str, trial: int | None) -> dict[str, Any]:
    """Return an export as JSON data."""
    record = exported_record(store, trial)
    return {
        "study": store.name,
        "trial": record.number,
        "candidate": record.candidate.as_dict,
        "files": [*map(str, files)],
        "lines": usage_lines(style, files, store, trial),
    }


def _below_accelerate(script: Script, candidate: Candidate, style: str, files: Sequence[Path]) -> str:
    """Return a script's command behind `accelerate launch`, with a space before it; empty if the export lacks a file for it.

    Exports for accelerate have no copies of argument files, and exports for FSDP2 no DeepSpeed config.
    """
    config = str(files[1] if style == "accelerate" else files[0])
    words = command(script, candidate, config)
    lacks_config = style != "accelerate" and any(config in word for word in words)
    return "" if lacks_config or own_files(script) else f" {shlex.join(masked_words(words))}"


def sync_note(job: Job, stage: int, free_bytes: float) -> str:
    """Describe the device memory for passing the weights to a rollout engine.

    Trainers gather partitioned weights for it: TRL all at once with adapters, else parameter by parameter (trl 1.16.0,
    generation/vllm_generation.py, `_iter_named_params`). Other stages hold them in full.

    Args:
        free_bytes: bytes of a device that are free at the peak, without the engine's own.
    """
    if stage < 3:
        return "it needs no further room: below stage 3 a rank holds the full weights"
    if job.model.parameters is None:
        return "room for a full copy of the weights if they are gathered at once; the peak does not include it"
    need = weights_bytes(job.model.parameters, job.element_bytes)
    what = f"{format_bytes(need)} on a rank if the weights are gathered at once; {format_bytes(free_bytes)} are free at the peak"
    return (
        what
        if need <= free_bytes
        else f"{what}: gather them layer by layer, or between steps when activations are freed"
    )


def missing_memory(outcome: Outcome, hardware: Hardware) -> str:
    """Describe the memory that a config lacked; empty if it failed for another reason."""
    missing = missing_bytes(outcome, hardware)
    if missing is None:
        return ""
    if outcome.measurement is not None:
        return f"over by {format_bytes(missing)}"
    headroom = missing - (outcome.missing_bytes or 0)
    if not outcome.missing_bytes or not headroom:
        return outcome_line(outcome)
    return f"{outcome_line(outcome)}, plus {format_bytes(headroom)} of headroom"


def larger_budget(seconds: float) -> str:
    """Return the next minute that is at least `seconds`, as --budget takes it."""
    return f"--budget {math.ceil(seconds / 60)}m"


def startup_used_all(budget_seconds: float, used_seconds: float) -> str:
    """Say that start-up left no budget for a trial, and which budget to try."""
    budget, took = format_duration(budget_seconds), format_duration(used_seconds)
    more = larger_budget(budget_seconds + used_seconds)
    return f"no trial ran: start-up took {took}, too much for a trial in the budget of {budget}; use {more}"


_NOTHING_IS_LEFT = (StopReason.NOTHING_FITS, StopReason.ALL_TRIED)


def no_winner_lines(facts: StudyFacts, job: Job, hardware: Hardware) -> list[str]:
    """Describe why there is no winner.

    "Nothing fits" is only said about memory, with the config that came closest and the cheapest changes that would help.
    Otherwise the lines say that no trial ran, or that none ended well, and why.
    """
    if facts.best is not None:
        return ["no winner yet"]
    if facts.closest is not None and facts.closest.outcome is not None:
        first = "nothing fits" if StopReason.of(facts.call.ended) in _NOTHING_IS_LEFT else "nothing fits yet"
        return [first, *_closest_lines(facts, facts.closest, facts.closest.outcome, job, hardware)]
    budget_seconds, used, ended = facts.call.budget_seconds, facts.call.used_seconds, facts.call.ended
    budget = format_duration(budget_seconds)
    if not facts.trials:
        if StopReason.of(ended) is StopReason.BUDGET_USED:
            return [startup_used_all(budget_seconds, used)]
        return [f"no trial ran: {ended}" if ended else "no trial has ended yet"]
    lines = [
        f"no candidate ran: {shortened(reason, 2 * _MOST_REASON)} ({count}x)" for reason, count in facts.failures[:3]
    ]
    if facts.cut_short:
        more = larger_budget(2 * max(used, budget_seconds))
        return [f"no trial ended within the budget of {budget}, so nothing is known of memory; use {more}", *lines]
    if not lines:  # measured, and rejected for another reason than memory
        lines = [
            f"no measured config can win: trial {number} is {why}" for number, why in list(facts.remarks.items())[:3]
        ]
    return lines or ["no winner yet"]


def _closest_lines(facts: StudyFacts, record: Record, outcome: Outcome, job: Job, hardware: Hardware) -> list[str]:
    lines = [f"closest: {record.candidate}: {missing_memory(outcome, hardware)}"]
    if outcome.measurement is not None and (used := outcome.measurement.peak_bytes) <= hardware.capacity_bytes:
        free = math.floor(100 * (1 - used / hardware.capacity_bytes))
        share = f"{format_bytes(used)} of {format_bytes(hardware.capacity_bytes)}"
        lines.append(f"it ran with {share}: the same command with --headroom {free}% may let it win")
    # a setup and an optimizer step hold no activations
    has_activations = outcome.measurement is not None or outcome.phase in (Phase.FORWARD, Phase.BACKWARD)
    changes = _open_changes(record.candidate, facts.too_large, hardware.device == "cuda", has_activations)
    buckets = float(reduce_bucket_bytes(columns_of([record.candidate], job), job.element_bytes)[0])
    if buckets > (missing_bytes(outcome, hardware) or 0):
        changes.insert(0, f"smaller reduce_bucket_size, whose buffers take {format_bytes(buckets)}")
    return [*lines, f"cheapest changes to try: {'; '.join(changes[:5])}"]


def _open_changes(
    candidate: Candidate, too_large: Collection[Candidate], on_gpu: bool, has_activations: bool
) -> list[str]:
    """Return the changes of a config that save memory and that no trial has refuted, cheapest first.

    A change is refuted if a config without larger first-order settings was too large. Offloading saves a GPU's memory; a CPU
    rank keeps what it offloads.

    Args:
        too_large: configs that ran out of memory or exceeded the ceiling.
        has_activations: memory ran out while activations were held, so that fewer of them help.
    """
    changes: dict[str, dict[str, Value]] = {}
    if has_activations:
        changes[f"micro-batch {candidate.micro_batch} -> {candidate.micro_batch // 2}"] = {
            MICRO_BATCH: max(1, candidate.micro_batch // 2)
        }
        changes["activation checkpointing on"] = {CHECKPOINTING: True}
    changes |= {f"ZeRO stage {candidate.stage} -> {one}": {"zero_stage": one} for one in range(candidate.stage + 1, 4)}
    if on_gpu:
        changes["optimizer offload to CPU"] = {"offload_optimizer": "cpu"}
        changes["parameter offload to CPU"] = {"offload_param": "cpu"}
    found = []
    for text, knobs in changes.items():
        changed = candidate.but(**knobs)
        refuted = any(
            one.stage == changed.stage
            and one.micro_batch <= changed.micro_batch
            and one.checkpointing >= changed.checkpointing
            and (not on_gpu or {*one.offloaded} >= {*changed.offloaded})
            for one in too_large
        )
        if changed != candidate and not refuted:
            found.append(text)
    found += ["shorter sequences"] * has_activations
    return [*found, "more GPUs (stages 1 to 3 split their states over them)", "--space low_memory"]
