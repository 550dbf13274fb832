"""Restart loop of a real training."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import ExitCode, MachineError, Stopped, UserError, one_line
from autotune.executors.base import LaunchTarget
from autotune.executors.machine import LocalMachine, Ops, RankRequirements, op_name
from autotune.masking import masked, masked_data
from autotune.problem.candidate import rank_variables
from autotune.problem.hardware import Hardware, threads_per_rank
from autotune.problem.job import Job
from autotune.problem.outcome import OutcomeKind, Source
from autotune.problem.training_trace import LEAST_STEPS, TrainingTrace
from autotune.rank.ds_config import all_ops, needed_ops
from autotune.recovery.ladder import Rung
from autotune.script.argument_writer import write_trial_files
from autotune.search.certificate import length_lines, rows_factor, structure_differs
from autotune.search.pruning import no_smaller
from autotune.util.entry_points import TRAIN_RANK
from autotune.util.files import write_atomically
from autotune.util.linux import NOTICES, handled_signals
from autotune.util.units import counted, format_bytes, format_duration
from autotune.workers.failure_classifier import classify_failure
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.protocol import Message

# -- supervisor --------------------------------------------------------------------------------------------------------

HELLO_SECONDS = 60.0  # for a rank's interpreter to start
LEAVE_SECONDS = 30.0  # for ranks without a heartbeat to end, after a signal was passed on
SETTLE_SECONDS = 0.5  # after the first failure, for the other ranks' reports
MOST_UNLOADED = 2  # most checkpoints in a row that are skipped
_LOOK_SECONDS = 0.1  # between checks for a signal, during a pause


@dataclass
class Attempt:
    """One start of the training, until its end."""

    rung: int
    candidate: str
    steps: int = 0
    seconds: float = 0.0
    ended: str = ""
    resumed_from: str = ""
    peak_bytes: float = 0.0  # expected for its config, per rank


@dataclass
class LaunchSummary:
    """Result of a launch."""

    code: int
    attempts: list[Attempt] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        restarts = len(self.attempts) - 1
        seconds = sum(one.seconds for one in self.attempts)
        steps = sum(one.steps for one in self.attempts)
        last = self.attempts[-1]
        end = f"training ended with exit code {self.code} after {steps} DeepSpeed steps in {format_duration(seconds)}"
        causes = Counter(one.ended.split(":")[0] for one in self.attempts[:-1])
        why = ", ".join(f"{count} {cause}" for cause, count in causes.items())
        times = f"{counted(restarts, 'restart')} ({why})" if restarts else "no restart"
        return [end, f"{times}; the last config was {last.candidate}"]

    def to_json(self) -> dict[str, Any]:
        """Return the exit code and all attempts as JSON data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class FirstStep:
    """The batch of a study, which the first optimizer step of a training must have."""

    study: str
    samples: int
    trace: TrainingTrace | None  # of the winner; None: the study measured no script, and a sample is a row

    def complaint(self, trace: TrainingTrace) -> str:
        """Return how the first step of a training differs; empty if it does not."""
        seen = trace.steps[0].rows
        if self.trace is not None:
            seen = round(self.samples * rows_factor(self.trace, trace))
        if not seen or seen == self.samples:
            return ""
        return (
            f"its first step has {seen} samples, and study {self.study} was tuned for {self.samples}. Restore the tuned batch, "
            "tune again, or add --global-batch-size free to train with this one"
        )


class Supervisor:
    """Run a script's ranks under the rungs of a ladder until the script ends by itself.

    Args:
        max_restarts: number of restarts without a newer checkpoint after which training is not restarted again.
        silent_seconds: time without a heartbeat from any rank that counts as a hang: no message, no step of a thread,
            nothing computed, read or written.
        convert: convert checkpoints for a rung that cannot load them directly.
        print_line: callback for one line of text to the user.
        machine: starts the ranks here, and is opened and closed by the caller; None: each rank is a separate interpreter,
            which ends as the script alone would.
        threads: CPU threads per rank, as the study was measured with; None: a share of this machine's.
        first_step: batch that the first step must have; None: any.
    """

    def __init__(
        self,
        job: Job,
        hardware: Hardware,
        ladder: list[Rung],
        folder: Path,
        *,
        max_restarts: int,
        silent_seconds: float,
        print_line: Callable[[str], None],
        convert: bool = False,
        machine: LaunchTarget | None = None,
        threads: int | None = None,
        first_step: FirstStep | None = None,
    ) -> None:
        assert job.script is not None
        self.job, self.hardware, self.ladder, self.folder = job, hardware, ladder, folder
        self.max_restarts, self.convert, self._print_line = max_restarts, convert, print_line
        self._silent_seconds = silent_seconds
        self._policy = GroupPolicy(HELLO_SECONDS, lambda phase: silent_seconds, SETTLE_SECONDS, may_exit=True)
        self.threads = threads or hardware.threads or threads_per_rank(job.ranks)
        self._own_machine = LocalMachine(folder, Ops(self.print_line), lambda: self.stopped)
        self.target: LaunchTarget = machine or self._own_machine
        self._opened = machine is not None
        self._is_local = True
        self._needs = RankRequirements(
            hardware.device, self.threads, training=True, cwd=job.script.cwd, interpreter=job.interpreter
        )
        self._least_host_bytes = math.inf  # of rungs that ran out of host memory
        self._too_large = np.zeros(len(ladder), dtype=bool)  # rungs with no smaller batch than one that failed
        self._signal: signal.Signals | None = None
        self._group: WorkerGroup | None = None
        self._earlier: dict[str, dict[str, Any]] = {}  # last messages about Trainer's output folders
        self._begun: set[str] = set()  # output folders into which an attempt may have written
        self._bad: list[str] = []  # folders of checkpoints that could not be loaded, since the last step
        self._reference: TrainingTrace | None = None  # facts of the first attempt
        self._first_step = first_step
        self._otherwise = ""  # how the first attempt differs from the study, or a later one from the first

    def run(self, cluster: LaunchTarget | None = None) -> LaunchSummary:
        """Train until the end. Pass SIGINT, SIGTERM and SIGHUP on, and SIGUSR1 and SIGUSR2 to ranks that catch them.

        Args:
            cluster: the nodes to train on, which poll `stopped` and are closed by the caller; None: this machine.
        """
        if cluster is not None:
            self.target, self._opened, self._is_local = cluster, False, False
        # A notice must not end the training either, such as Slurm's `--signal=USR1@600`.
        notices = [number for number in NOTICES if signal.getsignal(number) is signal.SIG_DFL]
        with handled_signals(self._forward), handled_signals(self._notify, notices), closing(self._own_machine):
            summary = self._run()
        try:
            write_atomically(self.folder / "launch.json", json.dumps(masked_data(summary.to_json()), indent=2) + "\n")
        except OSError as error:  # a full disk does not change how the training ended
            self.print_line(f"{self.folder / 'launch.json'} was not written: {one_line(error)}")
        return summary

    @property
    def stopped(self) -> bool:
        """True once a signal that ends the training has arrived."""
        return self._signal is not None

    def print_line(self, text: str) -> None:
        """Print a message and append it to `launch.log`."""
        self._print_line(text)
        with suppress(OSError), (self.folder / "launch.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {masked(text)}\n")

    def _run(self) -> LaunchSummary:
        way = RestartPolicy()
        attempts: list[Attempt] = []
        tries = 0  # since the last newer checkpoint
        while True:
            rung = self.ladder[way.at]
            how = "measured" if rung.measured else "predicted"
            self.print_line(f"starting under {rung.candidate} ({how} {format_bytes(rung.peak_bytes)} a rank)")
            attempts.append(attempt := Attempt(way.at, str(rung.candidate), peak_bytes=rung.peak_bytes))
            end = self._timed(rung, attempt, first=len(attempts) == 1)
            tries = 1 if way.made_progress(end.resumed_from) else tries + 1
            if self._sets_aside(end, first=len(attempts) == 1) and tries <= self.max_restarts:
                continue
            if end.kind is None or self._signal is not None or (end.kind is OutcomeKind.INVALID and way.at == 0):
                return LaunchSummary(end.code, attempts)
            self.print_line(f"{end.kind.value} after {end.steps} steps: {end.reason}")
            down = way.next_action(end.kind, end)
            below = self._rung_below(way.at, end.kind)
            reasons = [
                way.hopeless,
                "no config with less memory is left on the ladder" if down and below is None else "",
                f"--max-restarts {self.max_restarts} reached" if tries > self.max_restarts else "",
            ]
            if why := next(filter(None, reasons), ""):
                self.print_line(f"{why}: giving up")
                return LaunchSummary(ExitCode.MACHINE if end.kind in _OUTAGES else end.code or 1, attempts)
            if down and below is not None:
                way.down(below)
                self.print_line("stepping down")
                continue
            pause = f" in {format_duration(way.pause_seconds)}" if way.pause_seconds else ""
            self.print_line(f"starting again under the same config{pause}")
            self._wait(way.pause_seconds)
            if self._signal is not None:
                self.print_line(f"stopped by {self._signal.name}, before it was started again")
                return LaunchSummary(128 + self._signal, attempts)

    def _rung_below(self, at: int, kind: OutcomeKind) -> int | None:
        """Return the next rung that needs less of the memory that ran out; None if none is left."""
        if kind is OutcomeKind.OOM_HOST and self.hardware.device == "cuda":
            self._least_host_bytes = min(self._least_host_bytes, self.ladder[at].host_bytes or math.inf)
        self._too_large |= no_smaller([rung.candidate for rung in self.ladder], self.ladder[at].candidate)
        fits_host = [rung.host_bytes < self._least_host_bytes for rung in self.ladder]
        left = np.flatnonzero(~self._too_large & fits_host)
        return next(iter(left[left > at].tolist()), None)

    def _sets_aside(self, end: AttemptEnd, *, first: bool) -> bool:
        """Check that the restart failed to load its checkpoint, so that the next attempt must use an older one.

        This happens once per checkpoint, and for few in a row, as more point to another cause.
        """
        if end.steps:
            self._bad.clear()
        again = end.unloaded in self._bad or len(self._bad) >= MOST_UNLOADED
        if first or end.steps or not end.unloaded or again or self._signal is not None:
            return False
        self._bad.append(end.unloaded)
        self.print_line(
            f"{end.reason} in loading {end.unloaded}: starting again from an older checkpoint, if there is one"
        )
        return True

    def _wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a signal ends the training."""
        until = time.monotonic() + seconds
        while self._signal is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))

    def _timed(self, rung: Rung, attempt: Attempt, *, first: bool) -> AttemptEnd:
        """Run one attempt, and record its end.

        Raises:
            UserError: the first attempt cannot be prepared.
        """
        started, heard = time.monotonic(), AttemptMessages(self.print_line)
        try:
            end = self._prepare(rung, heard) or self._attempt(rung, heard)
        except (OSError, UserError) as error:  # no memory, process or disk for it
            if first and isinstance(error, UserError):  # input that worked once is not bad input
                raise
            end = heard.end(1, OutcomeKind.INFRASTRUCTURE, one_line(error), words=one_line(error))
        attempt.steps, attempt.seconds = end.steps, time.monotonic() - started
        attempt.resumed_from = end.resumed_from
        attempt.ended = f"{end.kind.value}: {end.reason}" if end.kind else end.reason
        return end

    def _prepare(self, rung: Rung, heard: AttemptMessages) -> AttemptEnd | None:
        """Build the missing ops that a rung needs, and reconnect to lost nodes.

        Ranks would build the ops without any message.

        Returns:
            The attempt's end if a signal stopped the preparation or it cannot be done; otherwise None.

        Raises:
            UserError: the process that starts ranks or builds ops died, or hangs.
            OSError: the machine refuses to start it.
        """
        try:
            if not self._opened:
                self.target.open(self._needs)
                self._opened = True
            if self.target.broken:
                self.target.reconnect()
            self.target.load_ops(all_ops([rung.candidate], self.job, self.hardware.device))
        except Stopped:
            assert self._signal is not None
            reason = f"stopped by {self._signal.name}, before DeepSpeed's ops were built"
            return heard.end(128 + self._signal, None, reason)
        except MachineError as trouble:  # a node that restarts is away for minutes
            return heard.end(ExitCode.MACHINE, OutcomeKind.INFRASTRUCTURE, str(trouble))
        failed = self.target.ops.failed
        for builder in needed_ops([rung.candidate], self.job, self.hardware.device):
            # its ranks would fail with an error that does not concern memory
            if builder in failed:
                why = f"DeepSpeed's {op_name(builder)} cannot be built ({failed[builder]})"
                return heard.end(1, OutcomeKind.INVALID, why)
        return None

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _attempt(self, rung: Rung, heard: AttemptMessages) -> AttemptEnd:
        def take(rank: int, message: Message) -> None:
            heard.process(rank, message)
            if message["type"] == "traced":
                self._compare(heard)

        group = self._group = WorkerGroup(
            self.target.launcher,
            self.hardware,
            None,
            self._policy,
            cancelled=lambda: self._signal is not None or bool(self._otherwise),
            on_message=take,
        )
        spec = {
            "job": self.job.order(),
            "device": self.hardware.device,
            "cap_bytes": self.hardware.limit_bytes,
            "candidate": rung.candidate.as_dict,
            "threads": self.threads,
            "env": rank_variables(rung.candidate, self.job, os.environ),
            "folder": str(group.home),
            "earlier": self._earlier,
            "begun": sorted(self._begun),
            "bad": self._bad,
            "convert": self.convert,
        }
        try:
            if self._is_local:  # a node writes its own files
                write_trial_files(self.job, rung.candidate, group.home, quiet=False)
            stop = group.start(TRAIN_RANK, self.job.ranks, spec)
            if stop is WatchEnd.ARRIVED:
                stop = group.watch(lambda: group.all_succeeded)
            if self._otherwise and self._signal is None:
                return heard.end(ExitCode.BAD_INPUT, None, f"stopped, because {self._otherwise}")
            if stop is WatchEnd.CANCELLED:
                return self._leave(group, heard)
            return end_of(stop, group, heard, self.hardware)
        finally:
            try:
                group.end()
            except OSError as error:  # does not change how the attempt ended
                self.print_line(f"the ranks' end: {one_line(error)}")
            self._group = None
            self._earlier |= heard.earlier
            self._begun |= heard.begun

    def _compare(self, heard: AttemptMessages) -> None:
        """Compare the first step with the study's batch, and the first steps of a restart with those of the first attempt.

        A training with other rows, or that goes on with another learning rate, is stopped.
        """
        if len(heard.traces) < self.job.ranks:
            return
        trace = TrainingTrace.merged([heard.traces[rank] for rank in sorted(heard.traces)])
        if trace is None:
            return
        if self._reference is None and self._first_step is not None:
            self._otherwise = self._first_step.complaint(trace)
        if self._otherwise:
            self.print_line(f"stopped: {self._otherwise}")
        elif len(trace.steps) < LEAST_STEPS:
            return
        elif self._reference is None:
            self._reference = trace
        elif why := structure_differs(self._reference, trace):
            self._otherwise = why
            self.print_line(f"stopped: {why}; start it again from its checkpoint under a config of the same batch")
        else:
            for line in length_lines(self._reference, trace):
                self.print_line(line)

    def _leave(self, group: WorkerGroup, heard: AttemptMessages) -> AttemptEnd:
        """Pass a signal on and give the ranks time to end in their own way."""
        assert self._signal is not None
        group.signal(self._signal)
        if group.greeted:
            self.print_line(f"{self._signal.name} is passed on, and the ranks may save; a second one ends them at once")
            group.wait_until_ended(LEAVE_SECONDS, max(LEAVE_SECONDS, self._silent_seconds))
        codes = [code for code in group.exit_codes().values() if code > 0]
        code = codes[0] if codes else 0 if group.all_succeeded else 128 + self._signal
        return heard.end(code, None, f"stopped by {self._signal.name}")

    def _notify(self, number: int, frame: object) -> None:
        if self._group is not None:
            self._group.notify(signal.Signals(number))

    def _forward(self, number: int, frame: object) -> None:
        again, self._signal = self._signal is not None, signal.Signals(number)
        if self._group is None:
            return
        if again:
            self._group.kill()
        else:
            self._group.signal(self._signal)


def check_script(study: str, job: Job, target: str) -> None:
    """Check that a study was made for this script.

    Raises:
        UserError: the study was made for another script.
    """
    if job.script is None:
        return
    own = job.script.target
    if Path(own).name != Path(target).name:
        raise UserError(
            f"study {study} is of {own}, not of {target}: tune this script first "
            f"(`autotune run … -- {target} …`), or give the study that is of it"
        )


# -- ends of attempts --------------------------------------------------------------------------------------------------

_NEAR_FULL = 0.97  # share of the capacity; a hang above it counts as an OOM
_TOO_MUCH = (OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_HOST, OutcomeKind.INVALID)
_OUTAGES = (OutcomeKind.INFRASTRUCTURE, OutcomeKind.GPU_CONTENTION)


@dataclass(frozen=True)
class AttemptEnd:
    """End of an attempt."""

    code: int
    kind: OutcomeKind | None  # None: the script ended by itself
    reason: str
    steps: int
    resumed_from: str
    unloaded: str = ""  # checkpoint that the script failed to load
    # checkpoint that it resumed from, and when that was written; empty: started from scratch; None: unknown
    origin: str | None = None
    words: str = ""  # message of a rank, or of the launcher, that reports a failing machine


@dataclass
class AttemptMessages:
    """State collected from the messages of one attempt's ranks."""

    print_line: Callable[[str], None]
    steps: int = 0
    resumed_from: str = ""
    origin: str = ""
    strayed: bool = False
    # fields of `rank.checkpoints.CheckpointLedger` by output folder
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)  # output folders of Trainer's arguments
    traces: dict[int, dict[str, Any]] = field(default_factory=dict)  # first steps, by rank

    def process(self, rank: int, message: Message) -> None:
        """Process a message of a rank."""
        verb = message["type"]
        if verb == "resumed":
            # the last one counts, as a script may train in phases
            self.origin = f"{message['path']} {message.get('written')}"
            if not self.resumed_from:
                self.resumed_from = message["path"]
                self.print_line(f"going on from {self.resumed_from}")
        elif verb == "checkpoints":
            self.earlier[message["folder"]] = message["ledger"]
        elif verb == "traced":
            self.traces[rank] = message["trace"]
        elif verb == "output":
            self.begun.add(message["folder"])
        elif verb == "note":
            self.print_line(message["text"])
        elif verb == "strayed" and not self.strayed:
            self.strayed = True
            self.print_line("the script trains without DeepSpeed, so without the tuned config: add --deepspeed FILE")
        self.steps = max(self.steps, int(message.get("steps") or 0))

    def end(
        self, code: int, kind: OutcomeKind | None, reason: str, *, words: str = "", unloaded: str = ""
    ) -> AttemptEnd:
        """Return the end of an attempt, with the collected steps and checkpoint."""
        # A script with Trainer's arguments reports each load. Other scripts may load through torch alone.
        origin = self.origin or ("" if self.begun else None)
        return AttemptEnd(code, kind, reason, self.steps, self.resumed_from, unloaded, origin, words)


def end_of(stop: WatchEnd, group: WorkerGroup, heard: AttemptMessages, hardware: Hardware) -> AttemptEnd:
    """Return the end of an attempt that was not stopped by a signal. The caller ends the group afterwards."""
    if stop is WatchEnd.SILENT and group.greeted:
        return _hang(group, heard, hardware)
    if stop is WatchEnd.ARRIVED:
        for rank, status in group.statuses().items():
            if status < 0:
                name = signal.Signals(-status).name
                heard.print_line(f"rank {rank} died by {name} on its way out, after the script's end")
        return heard.end(0, None, "done")
    evidence = group.evidence()
    codes = [128 - status if status < 0 else status for status in evidence.statuses.values() if status]
    code = codes[0] if codes else 1
    verdict = classify_failure(evidence)
    if not group.greeted:  # neither the script nor its config has reached the ranks
        reason = f"the ranks did not come up: {verdict.reason}"
        broken = verdict.source is Source.EXIT  # a half-upgraded environment ends each rank like this
        return heard.end(code, OutcomeKind.INFRASTRUCTURE, reason, words=verdict.reason if broken else "")
    # torch ends a rank with SIGABRT when its collective times out.
    deadly = (signal.SIGKILL, signal.SIGABRT) if heard.steps else (signal.SIGKILL,)
    died_by = -evidence.statuses[verdict.rank or 0] if verdict.source is Source.SIGNAL else 0
    killed = verdict.kind is OutcomeKind.CRASH and died_by in deadly
    if killed or verdict.kind in (*_TOO_MUCH, *_OUTAGES):
        own = verdict.kind is OutcomeKind.INFRASTRUCTURE and verdict.source in (Source.EXCEPTION, Source.EXIT)
        return heard.end(code, verdict.kind, verdict.reason, words=verdict.reason if own else "")
    unloaded = next((error["unloaded"] for error in evidence.errors if error.get("unloaded")), "")
    return heard.end(code, None, f"the script's own failure ({verdict.reason})", unloaded=unloaded)


def _hang(group: WorkerGroup, heard: AttemptMessages, hardware: Hardware) -> AttemptEnd:
    """Return the end of an attempt without a heartbeat: an OOM if a device or the host is nearly full."""
    if (code := group.script_exit_code) is not None:
        heard.print_line("the script is over, and ranks do not leave: ended")
        return heard.end(code, None, "done")
    peaks = group.peaks()
    text = f"hang in {group.silence}"
    if peaks.worst > _NEAR_FULL * hardware.capacity_bytes:
        return heard.end(1, OutcomeKind.OOM_DEVICE, f"{text}, with the device's memory full")
    if peaks.host_low < 0.03 * hardware.host_memory_bytes:
        return heard.end(1, OutcomeKind.OOM_HOST, f"{text}, with main memory full")
    return heard.end(1, OutcomeKind.TIMEOUT, f"{text}, with memory to spare")


# -- restart policy ----------------------------------------------------------------------------------------------------

PAUSES_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0)  # before the next attempt in an outage; the last one repeats
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, ports and process ids differ each time
_MOST_ALIKE = 3  # attempts that end at the same step after the same checkpoint
_NEAR = 0.02  # share of the steps; not every step is reported, so steps this close count as equal
_MOST_BARREN = 2  # attempts under one config that were killed or hung without a step


class RestartPolicy:
    """Position of a training on the recovery ladder, and the choice to retry, step down or give up.

    Another attempt is hopeless in two cases. One case: no attempt has ever stepped, and the last two failed with the same
    message. The user's mistake is then more likely than an outage: a folder that cannot be written to, a name that does
    not exist, too few GPUs. The other case: attempts end at the same step again and again, as with a save to a full disk
    or a batch that hangs.
    """

    def __init__(self) -> None:
        self.at = 0  # index of the current rung
        self.pause_seconds = 0.0  # before the next attempt
        self.hopeless = ""  # why another attempt would end in the same way; empty if a retry may help
        self._barren = self._outages = 0  # in a row
        self._stepped = False
        self._words = ""  # message of the last attempt
        self._alike = self._steps = 0  # for the last attempt that has stepped
        self._place: tuple[OutcomeKind, str] | None = None
        self._origins: set[str] = set()

    def made_progress(self, resumed_from: str) -> bool:
        """Record the checkpoint that an attempt resumed from. Return True if no earlier attempt resumed from it."""
        newer = bool(resumed_from) and resumed_from not in self._origins
        self._origins.add(resumed_from)
        return newer

    def next_action(self, kind: OutcomeKind, end: AttemptEnd) -> bool:
        """Record an attempt's end. Return True if the failure is attributable to its config, so that the next rung is due.

        An infrastructure failure or GPU contention affects all configs alike, so it is followed by a pause and a retry.
        """
        words = _CHANGING.sub("#", end.words)
        self._stepped = self._stepped or end.steps > 0
        self.hopeless = ""
        if words and words == self._words and not self._stepped:
            self.hopeless = "it has failed so before its first step twice in a row, which no waiting mends"
        elif self._comes_alike(kind, end.steps, end.origin):
            self.hopeless = (
                f"it has ended so {_MOST_ALIKE} times in a row at the same step, which starting again does not mend"
            )
        self._words = words
        if end.steps:
            self._barren = self._outages = 0
        if kind in _OUTAGES:
            self.pause_seconds = PAUSES_SECONDS[min(self._outages, len(PAUSES_SECONDS) - 1)]
            self._outages += 1
            return False
        self.pause_seconds, self._outages = 0.0, 0
        self._barren += not end.steps
        return kind in _TOO_MUCH or self._barren >= _MOST_BARREN

    def _comes_alike(self, kind: OutcomeKind, steps: int, origin: str | None) -> bool:
        """Check that enough attempts in a row ended at the same step in the same way.

        Attempts without a step do not count. Without a known origin, a script may start from a different place each
        time.
        """
        if not steps or origin is None or kind in _TOO_MUCH:
            return False
        place, near = (kind, origin), abs(steps - self._steps) <= max(1.0, _NEAR * steps)
        self._alike = self._alike + 1 if place == self._place and near else 1
        self._place, self._steps = place, steps
        return self._alike >= _MOST_ALIKE

    def down(self, at: int) -> None:
        """Step down to a rung and reset the counts of attempts."""
        self.at = at
        self._barren = self._alike = 0
