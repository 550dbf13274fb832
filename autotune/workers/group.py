"""Worker group: start, watch, collect evidence, end."""

from __future__ import annotations

import math
import select
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Phase
from autotune.workers.failure_classifier import UNEQUAL_COLLECTIVES, FailureEvidence, is_secondary
from autotune.workers.gpu_memory import attribute_hidden_usage
from autotune.workers.host_workers import HostWorkers, LocalWorkers, MultiHostLaunch
from autotune.workers.launchers import Launcher
from autotune.workers.memory_monitor import Meter
from autotune.workers.memory_peaks import MemoryPeaks, merged
from autotune.workers.protocol import Message, malformed

# -- group -------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

_MALFORMED_KIND = "autotune.MalformedMessage"  # in the place of an exception's type
_STATUS_SECONDS = 1.0  # longest wait for the exit status of a rank that sent no error
_LOOK_SECONDS = 5.0  # maximum interval between checks of silent ranks


class WorkerGroup:
    """Ranks of one engine, from launch until all have ended.

    Args:
        launcher: starts the ranks on this machine, or the machines over which they are spread.
        meter: samples memory continuously, and reports at the end if a device keeps some. None for a training, which
            shares its devices with other programs of the user. Its memory is read only after a failure.
        cancelled: polled several times a second, also while ranks start.
        on_message: called with every message of a rank, in order.
        on_phase: called with a phase when the group enters it.
        print_line: called with a line for people: reasons of a wait, and processes that could not be ended.
    """

    def __init__(
        self,
        launcher: Launcher | MultiHostLaunch,
        hardware: Hardware,
        meter: Meter | None,
        policy: GroupPolicy,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        on_message: Callable[[int, Message], None] = lambda rank, message: None,
        on_phase: Callable[[str], None] = lambda phase: None,
        print_line: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._hardware, self._policy = hardware, policy
        self._cancelled, self._on_message, self._on_phase = cancelled, on_message, on_phase

        self._store_host, self._hosts = "", list[HostWorkers]()
        if isinstance(launcher, MultiHostLaunch):
            self._store_host, self._hosts = launcher.store_host, launcher.make_workers(meter is not None, print_line)
        else:
            self._hosts = [LocalWorkers(launcher, hardware, meter, print_line)]
        self._rank_pids: dict[int, int] = {}  # rank -> its own pid, not that of an interpreter's wrapper
        self.errors: list[Message] = []
        self.phase = Phase.START  # phase of the rank that is furthest behind
        self._phases: dict[int, Phase] = {}
        self.failed_at: float | None = None  # monotonic clock at which a failure was noticed
        self._world = 0
        self._rendezvous: Message | None = None  # rendezvous of several machines, as the first rank reported it
        self._script_codes: dict[int, int] = {}  # rank -> exit code of its script, once it has ended
        self._bytes_outside_allocator: dict[int, int] = {}  # bytes on its device, by rank
        self._signalled: set[int] = set()
        self.silence: str | None = None  # description of the missing heartbeat that ended the watch
        self._pulses: dict[int, Message] = {}  # rank -> its last heartbeat
        self._ended = False

    @property
    def home(self) -> Path:
        """Folder of this group only; an empty path if its first machine is remote."""
        return self._hosts[0].home

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks as their launchers know them, in rank order."""
        return [pid for host in self._hosts for pid in host.pids]

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting for other processes to leave the devices."""
        return max(host.waited_seconds for host in self._hosts)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(
        self, entry: str, world: int, spec: dict[str, Any], *, deadline: float = math.inf, logs: Path | None = None
    ) -> WatchEnd:
        """Launch `world` ranks that run module `entry`, wait until all have sent hello, and send their specs.

        Args:
            spec: common fields of the specs. Rank, world size, rendezvous file and log are added.
            deadline: on the monotonic clock.
            logs: folder of their logs, `rank0.log` and so on. None writes to this process's output.

        Raises:
            OSError: the machine refuses to start them, or a GPU does not answer.
        """
        self._world = world
        self.enter(Phase.START)
        share = world // len(self._hosts)
        for at, host in enumerate(self._hosts):
            numbers = range(at * share, (at + 1) * share)
            host.launch(entry, numbers, deadline=deadline, cancelled=self._cancelled)
        stop = self.watch(lambda: self.greeted, deadline)
        # the socket stays open, because a refused rank would die of it and hide the cause
        if stop is not WatchEnd.ARRIVED:
            return stop
        common = {**spec, "world": world}
        if len(self._hosts) > 1:
            return self._send_specs_to_hosts(common, logs, deadline)
        self._hosts[0].send_specs(common, logs)
        return stop

    def _send_specs_to_hosts(self, common: Message, logs: Path | None, deadline: float) -> WatchEnd:
        """Send the specs to several machines: the first rank opens the store, then the other machines follow."""
        first, *others = self._hosts
        store = {"host": self._store_host, "token": uuid.uuid4().hex}
        first.send_specs({**common, "store": {**store, "port": None}}, logs)
        stop = self.watch(lambda: self._rendezvous is not None, deadline)
        if stop is WatchEnd.ARRIVED and self._rendezvous is not None:
            found = {"store": {**store, "port": self._rendezvous["port"]}, "port": self._rendezvous["scripts_port"]}
            for host in others:
                host.send_specs({**common, **found}, logs)
        return stop

    @property
    def greeted(self) -> bool:
        """True if every rank has sent hello. Before that, no rank has received its job."""
        return self._world > 0 and len(self._rank_pids) == self._world

    # -- receiving messages ------------------------------------------------------------------------------------------

    def watch(self, until: Callable[[], bool], deadline: float = math.inf) -> WatchEnd:
        """Receive messages until `until` returns True, or another event ends the watch.

        Args:
            deadline: on the monotonic clock.
        """
        timer = SilenceTimer()
        for host in self._hosts:
            host.reset_liveness_baseline()
        while True:
            if self._cancelled():
                return WatchEnd.CANCELLED
            timer.tick()
            if timer.now > deadline:
                return WatchEnd.DEADLINE
            patience = self._policy.silence_seconds(self.phase) if self.greeted else self._policy.hello_seconds
            if timer.now - max(timer.last_check, timer.last_alive) > min(_LOOK_SECONDS, 0.4 * patience):
                timer.last_check = timer.now
                if self._check_progress():
                    timer.last_alive = timer.now
            if timer.now - timer.last_alive > patience:
                self.failed_at = timer.now
                self.silence = f"{self.phase.value}: no sign of life for {patience:.0f} s{self._positions_text()}"
                return WatchEnd.SILENT
            # hellos count only together, so a slow one does not extend the wait
            if self._receive(0.1) and self.greeted:
                timer.last_alive = time.monotonic()
            if not self.errors and until():
                return WatchEnd.ARRIVED
            if self._has_lost_rank():
                self._receive(0.0)  # its last message may have arrived in between
            has_lost_part = any(host.lost_device or host.unreachable for host in self._hosts)
            if self.errors or has_lost_part or self._has_lost_rank():
                self.failed_at = time.monotonic()
                return WatchEnd.FAILED

    def _check_progress(self) -> bool:
        """Return True if silent ranks compute, read or write.

        In a trial's steps on GPUs, CPU time of a rank that has said that it stands still proves nothing: it may spin for a
        hanging kernel. A rank that computes with the interpreter's lock held, like DeepSpeed's CPU Adam, says nothing.
        """
        waiting = self._ranks_that("waits")
        if self._hardware.device == "cuda" and self.phase in _STEPS and not self._policy.may_exit:
            waiting = set(self._pulses) - self._ranks_that("moved") - self._ranks_that("compiles")
        return any(self._on_all_hosts(lambda host: host.is_progressing(waiting)))

    @property
    def compiles(self) -> bool:
        """True if torch.compile was at work in a rank when it last sent a heartbeat."""
        return bool(self._ranks_that("compiles"))

    def _ranks_that(self, field: str) -> set[int]:
        """Return the ranks whose last heartbeat says so."""
        return {rank for rank, pulse in self._pulses.items() if pulse.get(field)}

    def _positions_text(self) -> str:
        """Return the positions of the ranks, those waiting in a collective last, and the cause if all wait."""
        order = sorted(self._pulses, key=lambda rank: (self._pulses[rank]["waits"], rank))
        text = "".join(f"; rank {rank} in {self._pulses[rank]['where']}" for rank in order[:2])
        all_wait = self._world > 1 and len(self._ranks_that("waits")) == self._world
        if not all_wait or self.phase not in _STEPS[:2]:
            return text
        return f"{text}; every rank waits in a collective, so that {UNEQUAL_COLLECTIVES}; a network that fails looks the same"

    def _has_lost_rank(self) -> bool:
        """Return True if a rank has ended that should still run."""
        left = self.exit_codes()
        if self._policy.may_exit and self.greeted:
            return any(left.values())
        return bool(left) or any(host.has_closed_channel for host in self._hosts)

    def _receive(self, seconds: float) -> bool:
        """Receive messages for at most `seconds`. Return True if one was a heartbeat."""
        select.select([source for host in self._hosts for source in host.sources()], [], [], seconds)
        heard = False
        for host in self._hosts:
            for rank, message in host.receive():
                heard = self._process(rank, message) or heard
        return heard

    def _process(self, rank: int, message: Message) -> bool:
        """Process a message. Return True if it is a heartbeat. A malformed message is an error of its rank."""
        if why := malformed(message):
            text = f"rank {rank} sent a message that cannot be read: {why}"
            self.errors.append({"kinds": [_MALFORMED_KIND], "text": text, "rank": rank, "phase": self.phase.value})
            return True
        verb = message["type"]
        if verb == "hello":
            self._rank_pids[rank] = int(message["pid"])
            return True
        if verb == "pulse":
            self._pulses[rank] = message
            return bool(message["moved"])
        if verb == "error":
            self.errors.append(message)
        elif verb == "store":
            self._rendezvous = self._rendezvous or message
        elif verb == "device" and "uuid" in message:
            next(host for host in self._hosts if rank in host.numbers).register_device(rank, message["uuid"])
            self._bytes_outside_allocator[rank] = message.get("outside_bytes") or 0
        elif verb == "bye" and message.get("code") is not None:
            self._script_codes[rank] = int(message["code"])
        elif verb == "phase" and message["phase"] in set(Phase):
            self._phases[rank] = Phase(message["phase"])
            self._enter(min(self._phases.values(), key=list(Phase).index))
        self._on_message(rank, message)
        return True

    def send(self, verb: str, **fields: Any) -> None:
        """Send a message to every rank."""
        for host in self._hosts:
            host.send(verb, **fields)

    def enter(self, phase: Phase) -> None:
        """Set the phase of all ranks, which has its own time limit."""
        self._phases = dict.fromkeys(range(self._world), phase)
        self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        if phase is self.phase:
            return
        self.phase = phase
        self._on_phase(phase.value)

    # -- results -----------------------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, int]:
        """Return exit codes of ended ranks, negative for a signal."""
        return {rank: status for host in self._hosts for rank, status in host.statuses().items()}

    def exit_codes(self) -> dict[int, int]:
        """Return exit codes, with the script's code for a rank whose script had ended.

        At the interpreter's exit, threads of libraries sometimes abort.
        """
        return {
            rank: self._script_codes.get(rank, status) if status < 0 else status
            for rank, status in self.statuses().items()
        }

    @property
    def script_exit_code(self) -> int | None:
        """The script's exit code once all ranks have finished it, even if they still run; None before."""
        return max(self._script_codes.values()) if len(self._script_codes) == self._world else None

    @property
    def all_succeeded(self) -> bool:
        """True if every rank has ended with exit code 0."""
        codes = self.exit_codes()
        return len(codes) == self._world and not any(codes.values())

    def peaks(self) -> MemoryPeaks:
        """Return the peaks since the last `reset_peaks` including now; without a monitor, the current memory."""
        return merged(self._on_all_hosts(lambda host: host.peaks()))

    def reset_peaks(self) -> None:
        """Reset the peaks on all hosts."""
        for host in self._hosts:
            host.reset_peaks()

    def evidence(self) -> FailureEvidence:
        """Collect all facts about a failed or silent group. Call this before `end`."""
        peaks = self.peaks()  # before the ranks are gone
        statuses: dict[int, int] = {}
        if self.silence is None:
            self._await_reports()
            statuses = self._wait_for_statuses()
        logs = self._on_all_hosts(lambda host: host.log_tails(self.greeted))
        phase = self.phase
        if self.errors and self.errors[0].get("phase") in set(Phase):
            phase = Phase(self.errors[0]["phase"])
        for error in self.errors:
            outside = self._bytes_outside_allocator.get(error.get("rank", -1))
            attribute_hidden_usage(peaks, error.get("numbers") or {}, outside)
        return FailureEvidence(
            self._hardware.device,
            self.errors,
            statuses,
            self.silence,
            phase,
            peaks,
            self._hardware.host_memory_bytes,
            self._hardware.capacity_bytes,
            {rank: log for machine in logs for rank, log in machine.items()},
            unreachable=next((host.unreachable for host in self._hosts if host.unreachable), ""),
        )

    def _await_reports(self) -> None:
        """Receive further messages about a failure until each rank has reported or ended."""
        until = time.monotonic() + self._policy.settle_seconds
        while not self._all_reported() and (left := until - time.monotonic()) > 0:
            self._receive(min(left, 0.05))
        self._receive(0.0)  # last messages of ended ranks

    def _all_reported(self) -> bool:
        """Return True if no more messages can come. In a training, only the exit code of a rank is final."""
        reported = set() if self._policy.may_exit else {error.get("rank") for error in self.errors}
        return len(reported | self.exit_codes().keys()) >= self._world > 0

    def _wait_for_statuses(self) -> dict[int, int]:
        """Return exit codes; wait for one briefly if no rank has reported a cause."""
        unexplained = all(is_secondary(error) for error in self.errors)
        until = time.monotonic() + (_STATUS_SECONDS if unexplained else 0.0)
        while not (codes := self.exit_codes()) and time.monotonic() < until:
            time.sleep(0.02)
        return codes

    # -- ending ------------------------------------------------------------------------------------------------------

    def notify(self, number: signal.Signals) -> None:
        """Pass on a signal that informs and does not end, to ranks that catch it. Signals may repeat."""
        for host in self._hosts:
            host.signal(number, host.pids)

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on to every rank's process group, once per group."""
        for host in self._hosts:
            fresh = [pid for pid in host.pids if pid not in self._signalled]
            self._signalled.update(fresh)
            host.signal(number, fresh)

    def kill(self) -> None:
        """Send SIGKILL to every rank's process group immediately."""
        for host in self._hosts:
            host.signal(signal.SIGKILL, host.pids)

    def wait_until_ended(self, seconds: float, longest_seconds: float) -> None:
        """Receive messages until all ranks have ended, or none has made progress for `seconds`.

        Saves may take any time. Once a rank has ended, progress of its peers no longer counts, because they may wait
        for it in a collective and spin.

        Args:
            longest_seconds: limit of the whole wait.
        """
        timer = SilenceTimer()
        for host in self._hosts:
            host.reset_liveness_baseline()
        while (ended := len(self.statuses())) < len(self.pids):
            timer.tick()
            if timer.now - timer.last_alive > seconds or timer.now - timer.began > longest_seconds:
                break
            alive = self._receive(0.1)
            if timer.now - timer.last_check > min(_LOOK_SECONDS, 0.4 * seconds):
                timer.last_check, alive = timer.now, self._check_progress() or alive
            if alive and not ended:
                timer.last_alive = timer.now
        self._receive(0.0)

    def end(self) -> None:
        """End every rank with all its descendants, and wait until processes and memory are released.

        Processes that a finished training left running are kept on purpose. After a signal, only those in
        separate sessions are kept.
        """
        if self._ended:
            return
        self._ended = True
        done = self._policy.may_exit and self.greeted and self.all_succeeded
        self.send("stop")
        self._on_all_hosts(lambda host: host.end(done=done))

    def _on_all_hosts(self, ask: Callable[[HostWorkers], T]) -> list[T]:
        """Call a function for all machines in parallel, so that unreachable machines time out at the same time."""
        if len(self._hosts) == 1:
            return [ask(self._hosts[0])]
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            return list(pool.map(ask, self._hosts))


# -- group policy ------------------------------------------------------------------------------------------------------

_STEPS = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
_LAPSE_SECONDS = 5.0  # seconds; a normal turn of the watch loop takes tenths of a second


class WatchEnd(StrEnum):
    """Reason for which the watch of a group ended."""

    ARRIVED = "arrived"  # the awaited event has happened
    FAILED = "failed"  # a rank reported an error, or is gone
    SILENT = "silent"  # no heartbeat for longer than the policy allows
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class GroupPolicy:
    """Differences between the ranks of a trial and those of a training."""

    hello_seconds: float  # limit for all ranks to start and connect
    # Limit without a heartbeat per phase: a message, progress of a thread, or computing, reading or writing.
    silence_seconds: Callable[[Phase], float]
    settle_seconds: float  # wait after the first failure: a peer's consequential error may arrive before the cause
    may_exit: bool  # a rank may end by itself with exit code 0; a trial's ranks wait for the order


class SilenceTimer:
    """Time without a heartbeat, in a loop that marks its turns.

    A loop that stands still was suspended itself, usually with its ranks (`scontrol suspend`, `docker pause`). The
    suspended time does not count. All times are on the monotonic clock; `now` is the start of a turn, and `last_check`
    the last check of silent ranks.
    """

    def __init__(self) -> None:
        self.now = self.began = self.last_alive = self.last_check = time.monotonic()

    def tick(self) -> None:
        """Begin the next turn."""
        before, self.now = self.now, time.monotonic()
        if (lapse := self.now - before) > _LAPSE_SECONDS:
            self.began += lapse
            self.last_alive = min(self.now, self.last_alive + lapse)
            self.last_check = min(self.now, self.last_check + lapse)
