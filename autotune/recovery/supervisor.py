"""`autotune launch`: the real training under a winner, watched, and brought back when memory runs out."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import MachineTrouble, Stopped, UserError
from autotune.executors.base import Ground
from autotune.executors.ops import Ops
from autotune.executors.station import Needs
from autotune.files import write_atomically
from autotune.group.environment import training_environment
from autotune.group.extensions import FOLDER, is_built, own_folder
from autotune.group.group import Group
from autotune.group.launchers import Launcher, SpawnLauncher
from autotune.group.policy import Policy, Stop
from autotune.group.protocol import Message
from autotune.group.verdict import judge
from autotune.interpreter import current
from autotune.problem.argument_texts import write_trial_files
from autotune.problem.cpus import threads_per_rank
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind
from autotune.rank.config import needed_ops
from autotune.recovery.course import Course, Point
from autotune.recovery.ladder import Rung
from autotune.units import format_bytes, format_duration

TRAIN_RANK = "autotune.rank.train"
HELLO_SECONDS = 60.0  # for a rank's interpreter to come up
LEAVE_SECONDS = 30.0  # for ranks that show no life to end, after a signal was passed on
SETTLE_SECONDS = 0.5  # after the first failure: the other ranks' reports
_NEAR_FULL = 0.97  # of the capacity: a hang this near to it is memory's


@dataclass
class Attempt:
    """One start of the training, to its end."""

    rung: int
    candidate: str
    steps: int = 0
    seconds: float = 0.0
    ended: str = ""
    resumed_from: str = ""
    peak_bytes: float = 0.0  # expected of its config, a rank
    course: list[Point] = field(default_factory=list)  # memory and steps over its time


@dataclass
class LaunchSummary:
    """How a launch went."""

    code: int
    attempts: list[Attempt] = field(default_factory=list)

    def lines(self) -> list[str]:
        restarts = len(self.attempts) - 1
        seconds = sum(one.seconds for one in self.attempts)
        steps = sum(one.steps for one in self.attempts)
        last = self.attempts[-1]
        text = f"training ended with exit code {self.code} after {steps} steps in {format_duration(seconds)}"
        causes = Counter(one.ended.split(":")[0] for one in self.attempts[:-1])
        why = ", ".join(f"{count} {cause}" for cause, count in causes.items())
        times = f"{restarts} restart{'s' if restarts > 1 else ''} ({why})" if restarts else "no restart"
        return [text, f"{times}; the last config was {last.candidate}"]

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "attempts": [dataclasses.asdict(one) for one in self.attempts]}


@dataclass(frozen=True)
class _End:
    code: int
    kind: Kind | None  # None: the script's own end
    reason: str
    steps: int
    resumed_from: str


@dataclass
class _Heard:
    """What the ranks of one attempt have said."""

    say: Callable[[str], None]
    steps: int = 0
    resumed_from: str = ""
    strayed: bool = False
    earlier: dict[str, dict[str, int]] = field(default_factory=dict)  # see `rank.train.checkpoints`; by output folder

    def take(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "resumed" and not self.resumed_from:
            self.resumed_from = message["path"]
            self.say(f"going on from {self.resumed_from}")
        elif kind == "checkpoints":
            self.earlier.setdefault(message["folder"], message["found"])
        elif kind == "note":
            self.say(message["text"])
        elif kind == "strayed" and not self.strayed:
            self.strayed = True
            self.say("the script trains without DeepSpeed: no config of ours is in it")
        self.steps = max(self.steps, int(message.get("steps") or 0))

    def end(self, code: int, kind: Kind | None, reason: str) -> _End:
        return _End(code, kind, reason, self.steps, self.resumed_from)


class Supervisor:
    """Runs a script's ranks under the rungs of a ladder until it ends by itself.

    Args:
        max_restarts: after this many the training is left as it ended.
        silent_seconds: where no rank shows life for so long it hangs: no message, no step of a main thread, nothing
            computed, read or written.
        convert: whether checkpoints are converted for a rung that cannot load them as they are.
        say: takes a line for people.
        launcher: starts the ranks, and is the caller's to close; None: each is an interpreter of its own, which ends as
            the script alone would.
        threads: CPU threads a rank, as the study was measured with; None: a share of this machine's.
        ground: the nodes to train on, which are the caller's to close; None: this machine.
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
        say: Callable[[str], None],
        convert: bool = False,
        launcher: Launcher | None = None,
        threads: int | None = None,
        ground: Ground | None = None,
    ) -> None:
        assert job.script is not None
        self.job, self.hardware, self.ladder, self.folder = job, hardware, ladder, folder
        self.max_restarts, self.convert, self._say = max_restarts, convert, say
        self._silent_seconds = silent_seconds
        self._policy = Policy(HELLO_SECONDS, lambda phase: silent_seconds, SETTLE_SECONDS, may_leave=True)
        self.threads = threads or hardware.threads or threads_per_rank(job.ranks)
        self._env = training_environment(hardware.device, self.threads)
        self._ops = Ops(self.say)
        self._own_launcher = SpawnLauncher(self._env, cwd=job.script.cwd)
        self._launcher = launcher or self._own_launcher
        self._ground, self._opened = ground, False
        self._needs = Needs(hardware.device, self.threads, training=True, cwd=job.script.cwd)
        self._signal: signal.Signals | None = None
        self._group: Group | None = None
        self._earlier: dict[str, dict[str, int]] = {}  # checkpoints that are none of this launch's, by output folder

    def run(self) -> LaunchSummary:
        """Trains; passes SIGINT, SIGTERM and SIGHUP on."""
        passed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # a signal that is ignored stays so: nohup's trainings outlive their terminal
        before = {
            number: signal.signal(number, self._forward)
            for number in passed
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            summary = self._run()
        finally:
            self._own_launcher.close()
            for number, old in before.items():
                signal.signal(number, old)
        write_atomically(self.folder / "launch.json", json.dumps(summary.to_json(), indent=2) + "\n")
        return summary

    @property
    def stopped(self) -> bool:
        """Whether a signal has come that ends the training."""
        return self._signal is not None

    def say(self, text: str) -> None:
        self._say(text)
        with suppress(OSError), (self.folder / "launch.log").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    def _run(self) -> LaunchSummary:
        at, barren = 0, 0
        attempts: list[Attempt] = []
        while True:
            rung = self.ladder[at]
            how = "measured" if rung.measured else "predicted"
            self.say(f"starting under {rung.candidate} ({how} {format_bytes(rung.peak_bytes)} a rank)")
            attempt = Attempt(at, str(rung.candidate), peak_bytes=rung.peak_bytes)
            attempts.append(attempt)
            started = time.monotonic()
            course = Course()
            end = self._prepare(rung) or self._attempt(rung, course)
            attempt.course = course.points
            attempt.steps, attempt.seconds = end.steps, time.monotonic() - started
            attempt.resumed_from = end.resumed_from
            attempt.ended = f"{end.kind.value}: {end.reason}" if end.kind else end.reason
            if end.kind is None or self._signal is not None or (end.kind is Kind.INVALID and at == 0):
                return LaunchSummary(end.code, attempts)
            self.say(f"{end.kind.value} after {end.steps} steps: {end.reason}")
            barren = 0 if end.steps else barren + 1
            down = end.kind in (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID) or barren > 1
            if down and at + 1 == len(self.ladder):
                self.say("no config with less memory is left on the ladder: giving up")
                return LaunchSummary(end.code or 1, attempts)
            if len(attempts) > self.max_restarts:
                self.say(f"--max-restarts {self.max_restarts} reached: giving up")
                return LaunchSummary(end.code or 1, attempts)
            at += down
            self.say("stepping down" if down else "starting again under the same config")

    def _prepare(self, rung: Rung) -> _End | None:
        """Builds the ops that a rung needs and that are not there, which ranks would do in silence, and reaches nodes again that
        were lost; how it ended where that was stopped, or cannot be done."""
        try:
            if self._ground is None:
                self._build(rung)
            else:
                self._ready(self._ground, rung)
        except Stopped:
            assert self._signal is not None
            reason = f"stopped by {self._signal.name}, before DeepSpeed's ops were built"
            return _Heard(self.say).end(128 + self._signal, None, reason)
        except MachineTrouble as trouble:
            self.say(str(trouble))
            return _Heard(self.say).end(1, None, str(trouble))
        return None

    def _ready(self, ground: Ground, rung: Rung) -> None:
        if not self._opened:
            ground.open(self._needs)
            self._opened = True
        if ground.broken:
            ground.mend()
        ground.load_ops(needed_ops([rung.candidate], self.job, self.hardware.device), self._needs)

    def _build(self, rung: Rung) -> None:
        device = self.hardware.device
        folder = Path(os.environ.get(FOLDER) or own_folder(device))
        needed = needed_ops([rung.candidate], self.job, device)
        # whose folder an environment beside this one has is known there
        missing = [name for name in needed if current().beside or not is_built(name, folder)]
        if missing:
            log = self.folder / "server.log"
            self._ops.load(self._launcher, missing, self._env, log, lambda: self._signal is not None)

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _attempt(self, rung: Rung, course: Course) -> _End:
        heard = _Heard(self.say)

        def take(rank: int, message: Message) -> None:
            heard.take(rank, message)
            if message["type"] == "progress":
                with suppress(Exception):  # a device that cannot be asked costs a point, not the training
                    course.note(heard.steps, lambda: group.peaks().worst)

        group = self._group = Group(
            self._ground.launcher if self._ground is not None else self._launcher,
            self.hardware,
            None,
            self._policy,
            cancelled=lambda: self._signal is not None,
            on_message=take,
        )
        spec = {
            "job": self.job.to_json(),
            "device": self.hardware.device,
            "cap_bytes": self.hardware.memory_cap_bytes,
            "candidate": rung.candidate.as_dict,
            "threads": self.threads,
            "env": rung.candidate.environment(os.environ),
            "folder": str(group.home),
            "earlier": self._earlier,
            "convert": self.convert,
        }
        try:
            if self._ground is None:  # a node writes its own
                write_trial_files(self.job, rung.candidate, group.home, quiet=False)
            stop = group.start(TRAIN_RANK, self.job.ranks, spec)
            if stop is Stop.ARRIVED:
                stop = group.watch(lambda: group.all_left)
            return self._ended(stop, group, heard)
        finally:
            group.end()
            self._earlier = {**heard.earlier, **self._earlier}

    def _ended(self, stop: Stop, group: Group, heard: _Heard) -> _End:
        """What an attempt came to."""
        if stop is Stop.CANCELLED:
            return self._leave(group, heard)
        if stop is Stop.SILENT and group.greeted:
            return self._hang(group, heard)
        if stop is Stop.ARRIVED:
            for rank, status in group.statuses().items():
                if status < 0:
                    name = signal.Signals(-status).name
                    self.say(f"rank {rank} died by {name} on its way out, after the script's end")
            return heard.end(0, None, "done")
        evidence = group.evidence()
        codes = [128 - status if status < 0 else status for status in evidence.statuses.values() if status]
        code = codes[0] if codes else 1
        verdict = judge(evidence)
        # by SIGABRT torch ends a rank whose collective has timed out
        deadly = (signal.SIGKILL, signal.SIGABRT) if heard.steps else (signal.SIGKILL,)
        killed = verdict.kind is Kind.CRASH and verdict.signal in deadly
        if verdict.kind.is_oom or killed or verdict.kind in (Kind.INVALID, Kind.INFRASTRUCTURE, Kind.FOREIGN):
            return heard.end(code, verdict.kind, verdict.reason)
        return heard.end(code, None, f"the script's own failure ({verdict.reason})")

    def _hang(self, group: Group, heard: _Heard) -> _End:
        """No rank shows life: memory's doing where a device or the host is as good as full."""
        if (code := group.scripts_code) is not None:
            self.say("the script is over, and ranks do not leave: ended")
            return heard.end(code, None, "done")
        peaks = group.peaks()
        text = f"hang in {group.silence}"
        if peaks.worst > _NEAR_FULL * self.hardware.capacity_bytes:
            return heard.end(1, Kind.OOM_DEVICE, f"{text}, with the device's memory full")
        if peaks.host_low < 0.03 * self.hardware.host_memory_bytes:
            return heard.end(1, Kind.OOM_HOST, f"{text}, with main memory full")
        return heard.end(1, Kind.TIMEOUT, f"{text}, with memory to spare")

    def _leave(self, group: Group, heard: _Heard) -> _End:
        """After a signal: the ranks have it too, and some time to end in their own way."""
        assert self._signal is not None
        group.signal(self._signal)
        if group.greeted:
            self.say(f"{self._signal.name} is passed on, and the ranks may save; a second one ends them at once")
            group.wait_left(LEAVE_SECONDS, max(LEAVE_SECONDS, self._silent_seconds))
        codes = [code for code in group.exit_codes().values() if code > 0]
        code = codes[0] if codes else 0 if group.all_left else 128 + self._signal
        return heard.end(code, None, f"stopped by {self._signal.name}")

    def _forward(self, number: int, frame: object) -> None:
        again, self._signal = self._signal is not None, signal.Signals(number)
        if self._group is None:
            return
        if again:
            self._group.kill()
        else:
            self._group.signal(self._signal)


def check_script(study: str, job: Job, target: str) -> None:
    """Whether a study is of this script.

    Raises:
        UserError: it is of another.
    """
    if job.script is None:
        return
    own = job.script.target
    if Path(own).name != Path(target).name:
        raise UserError(
            f"study {study} is of {own}, not of {target}: tune this script first "
            f"(`autotune run … -- {target} …`), or give the study that is of it"
        )
