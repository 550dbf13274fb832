"""`autotune launch`: the real training under a winner, watched, and brought back when memory runs out."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.executors.local import rank_environment, threads_per_rank
from autotune.files import write_atomically
from autotune.group.ending import end_ranks
from autotune.group.gauge import Peaks, kernel_oom_kills, make_meter
from autotune.group.protocol import Channel, Message
from autotune.group.verdict import Evidence, judge
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Phase
from autotune.recovery.ladder import Rung
from autotune.units import format_bytes, format_duration

START_SECONDS = 60.0  # for a rank's interpreter to come up
LEAVE_SECONDS = 30.0  # for ranks to end after a signal was passed on
_SETTLE_SECONDS = 0.5  # after the first failure: the other ranks' reports
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


@dataclass
class Summary:
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

    channels: list[Channel]  # one a rank
    say: Callable[[str], None]
    errors: list[Message] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)  # the script's own, of ranks where it is over
    steps: int = 0
    resumed: str = ""
    strayed: bool = False
    phase: Phase = Phase.START

    def listen(self) -> bool:
        """Takes what has come in by now; whether anything has."""
        messages = [(rank, message) for rank, channel in enumerate(self.channels) for message in channel.drain()]
        for rank, message in messages:
            self._take(rank, message)
        return bool(messages)

    def _take(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "error":
            self.errors.append(message)
        elif kind == "bye":
            self.codes[rank] = message["code"]
        elif kind == "resumed" and not self.resumed:
            self.resumed = message["path"]
            self.say(f"going on from {self.resumed}")
        elif kind == "note":
            self.say(message["text"])
        elif kind == "phase" and message["phase"] in set(Phase):
            self.phase = Phase(message["phase"])
        elif kind == "strayed" and not self.strayed:
            self.strayed = True
            self.say("the script trains without DeepSpeed: no config of ours is in it")
        self.steps = max(self.steps, int(message.get("steps") or 0))

    def scripts_own(self, statuses: dict[int, int]) -> dict[int, int]:
        """Exit codes of ranks that have ended: a rank whose script was over has the script's, whatever its interpreter
        died of on the way out (libraries' threads end in an abort there now and then)."""
        return {rank: self.codes.get(rank, status) if status < 0 else status for rank, status in statuses.items()}

    def end(self, code: int, kind: Kind | None, reason: str) -> _End:
        return _End(code, kind, reason, self.steps, self.resumed)


class Launcher:
    """Runs a script's ranks under the rungs of a ladder until it ends by itself.

    Args:
        max_restarts: after this many the training is left as it ended.
        silent_seconds: without a step for so long it hangs.
        convert: whether checkpoints are converted for a rung that cannot load them as they are.
        say: takes a line for people.
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
    ) -> None:
        self.job, self.hardware, self.ladder, self.folder = job, hardware, ladder, folder
        self.max_restarts, self.silent_seconds, self.convert, self._say = max_restarts, silent_seconds, convert, say
        self._signal: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Summary:
        """Trains; passes SIGINT and SIGTERM on."""
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            summary = self._run()
        finally:
            end_ranks([process.pid for process in self._processes], self._status)
            for number, old in before.items():
                signal.signal(number, old)
        write_atomically(self.folder / "launch.json", json.dumps(summary.to_json(), indent=2) + "\n")
        return summary

    def say(self, text: str) -> None:
        self._say(text)
        with suppress(OSError), (self.folder / "launch.log").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    def _run(self) -> Summary:
        began, at, barren = time.time(), 0, 0
        attempts: list[Attempt] = []
        while True:
            rung = self.ladder[at]
            how = "measured" if rung.measured else "predicted"
            self.say(f"starting under {rung.candidate} ({how} {format_bytes(rung.peak_bytes)} a rank)")
            attempt = Attempt(at, str(rung.candidate))
            attempts.append(attempt)
            started = time.monotonic()
            end = self._attempt(rung, began if len(attempts) > 1 else None)
            attempt.steps, attempt.seconds, attempt.resumed_from = (
                end.steps,
                time.monotonic() - started,
                end.resumed_from,
            )
            attempt.ended = f"{end.kind.value}: {end.reason}" if end.kind else end.reason
            if end.kind is None or self._signal is not None or (end.kind is Kind.INVALID and at == 0):
                return Summary(end.code, attempts)
            self.say(f"{end.kind.value} after {end.steps} steps: {end.reason}")
            barren = 0 if end.steps else barren + 1
            down = end.kind in (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID) or barren > 1
            if down and at + 1 == len(self.ladder):
                self.say("no config with less memory is left on the ladder: giving up")
                return Summary(end.code or 1, attempts)
            if len(attempts) > self.max_restarts:
                self.say(f"--max-restarts {self.max_restarts} reached: giving up")
                return Summary(end.code or 1, attempts)
            at += down
            self.say("stepping down" if down else "starting again under the same config")

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _attempt(self, rung: Rung, resume_since: float | None) -> _End:
        world = self.job.ranks
        with tempfile.TemporaryDirectory(prefix="autotune-") as name, socket.socket(socket.AF_UNIX) as listener:
            address, store = f"{name}/home.sock", f"{name}/store"
            listener.bind(address)
            listener.listen(world)
            env = rank_environment(self.hardware.device)
            assert self.job.script is not None
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "autotune.rank.train", address, str(rank)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=self.job.script.cwd,
                )
                for rank in range(world)
            ]
            channels = self._greet(listener)
            if channels is None:
                return self._ended(Evidence(self.hardware.device, statuses=self._statuses()), _Heard([], self.say))
            spec = {
                "job": self.job.to_json(),
                "world": world,
                "device": self.hardware.device,
                "store": store,
                "cap_bytes": self.hardware.memory_cap_bytes,
                "candidate": rung.candidate.as_dict,
                "threads": threads_per_rank(world),
                "folder": name,
                "resume_since": resume_since,
                "convert": self.convert,
            }
            for rank, channel in enumerate(channels):
                channel.send("spec", **spec, rank=rank)
            try:
                return self._watch(_Heard(channels, self.say))
            finally:
                for channel in channels:
                    channel.close()
                end_ranks([process.pid for process in self._processes], self._status)

    def _greet(self, listener: socket.socket) -> list[Channel] | None:
        """The ranks' channels in their order; None where one did not come up."""
        found: dict[int, Channel] = {}
        listener.settimeout(1.0)
        until = time.monotonic() + START_SECONDS
        while len(found) < self.job.ranks:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                    return None
                continue
            channel = Channel(sock)
            hello = channel.receive(10.0)
            if hello:
                found[hello["rank"]] = channel
        return [found[rank] for rank in sorted(found)]

    def _watch(self, heard: _Heard) -> _End:
        last = time.monotonic()
        kills = kernel_oom_kills()
        while True:
            select.select([channel for channel in heard.channels if not channel.closed], [], [], 0.2)
            if heard.listen():
                last = time.monotonic()
            if self._signal is not None:
                return self._leave(heard)
            if heard.errors or any(heard.scripts_own(self._statuses()).values()):
                self._settle(heard)
            statuses = heard.scripts_own(self._statuses())
            if len(statuses) == self.job.ranks and not any(statuses.values()):
                for rank, status in self._statuses().items():
                    if status < 0:
                        name = signal.Signals(-status).name
                        self.say(f"rank {rank} died by {name} on its way out, after the script's end")
                return heard.end(0, None, "done")
            if heard.errors or any(statuses.values()):
                peaks = self._peaks()
                peaks.oom_kills = kernel_oom_kills() - kills
                evidence = Evidence(
                    self.hardware.device,
                    heard.errors,
                    statuses,
                    None,
                    heard.phase,
                    peaks,
                    self.hardware.host_memory_bytes,
                )
                return self._ended(evidence, heard)
            silent = time.monotonic() - last
            if silent > self.silent_seconds:
                return self._hang(silent, heard)

    def _settle(self, heard: _Heard) -> None:
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            heard.listen()
            time.sleep(0.05)

    def _hang(self, silent: float, heard: _Heard) -> _End:
        """Silence: memory's doing where a device or the host is as good as full."""
        peaks = self._peaks()
        host_left = peaks.host_low < 0.03 * self.hardware.host_memory_bytes
        text = f"no step for {format_duration(silent)}"
        if peaks.worst > _NEAR_FULL * self.hardware.capacity_bytes:
            return heard.end(1, Kind.OOM_DEVICE, f"{text}, with the device's memory full")
        if host_left:
            return heard.end(1, Kind.OOM_HOST, f"{text}, with main memory full")
        self.say(f"{text} in {heard.phase.value}, with memory to spare: not memory's doing, ending it")
        return heard.end(1, None, "hang")

    def _ended(self, evidence: Evidence, heard: _Heard) -> _End:
        codes = [128 - status if status < 0 else status for status in evidence.statuses.values() if status]
        code = codes[0] if codes else 1
        verdict = judge(evidence)
        if verdict.kind.is_oom or verdict.kind is Kind.INVALID:
            return heard.end(code, verdict.kind, verdict.reason)
        if verdict.kind is Kind.CRASH and verdict.signal == signal.SIGKILL:
            return heard.end(code, Kind.CRASH, verdict.reason)
        if verdict.kind in (Kind.INFRASTRUCTURE, Kind.FOREIGN):
            return heard.end(code, verdict.kind, verdict.reason)
        return heard.end(code, None, f"the script's own failure ({verdict.reason})")

    def _leave(self, heard: _Heard) -> _End:
        """After a signal: the ranks have it too, and some time to end in their own way."""
        assert self._signal is not None
        until = time.monotonic() + LEAVE_SECONDS
        while len(self._statuses()) < self.job.ranks and time.monotonic() < until:
            time.sleep(0.1)
        heard.listen()
        statuses = heard.scripts_own(self._statuses())
        codes = [status for status in statuses.values() if status > 0]
        ended_well = len(statuses) == self.job.ranks and not any(statuses.values())
        code = codes[0] if codes else 0 if ended_well else 128 + self._signal
        return heard.end(code, None, f"stopped by {signal.Signals(self._signal).name}")

    # -- processes ---------------------------------------------------------------------------------------------------

    def _forward(self, number: int, frame: object) -> None:
        again = self._signal is not None
        self._signal = number
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if again else number)

    def _statuses(self) -> dict[int, int]:
        """Of the ranks that have ended."""
        polled = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: status for rank, status in polled.items() if status is not None}

    def _status(self, pid: int) -> int | None:
        return next((process.poll() for process in self._processes if process.pid == pid), None)

    def _peaks(self) -> Peaks:
        """Memory now."""
        import psutil

        peaks = Peaks(used=[0] * self.job.ranks, host_low=psutil.virtual_memory().available)
        with suppress(Exception):
            make_meter(self.hardware).sample([process.pid for process in self._processes], peaks)
        return peaks


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
