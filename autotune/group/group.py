"""A group of ranks as its parent sees it: started together, heard in one place, ended as a whole.

Trials and trainings differ in how patient one is with them and in who may end them: that is their Policy.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.files import SocketFolder
from autotune.group.ending import end_ranks
from autotune.group.gauge import Gauge, Meter, Peaks
from autotune.group.gpu_meter import blame_hidden, make_meter
from autotune.group.launchers import Launcher
from autotune.group.policy import Policy, Stop
from autotune.group.protocol import Channel, Message
from autotune.group.room import wait_for_room, wait_until_back
from autotune.group.verdict import Evidence, is_secondary, log_tail
from autotune.group.vitals import Vitals
from autotune.problem.hardware import Hardware
from autotune.problem.host import host_available_bytes, kernel_oom_kills
from autotune.problem.outcome import Phase

_STATUS_SECONDS = 1.0  # for the exit status of a rank that said nothing of why it is gone
_LOOK_SECONDS = 5.0  # between looks at ranks that say nothing, at most


class Group:
    """The ranks of one engine, from launch to the last of them gone.

    Args:
        meter: samples memory all the time, and says at the end whether the device has it back; None for a training, which
            is left alone and shares its devices with what else the user runs: memory is looked at when something went wrong.
        cancelled: asked several times a second, also while ranks come up.
        on_message: takes every message of a rank, in order.
        on_phase: takes a phase as the group enters it.
        say: takes a line for people: what it waits for, and what could not be ended.
    """

    def __init__(
        self,
        launcher: Launcher,
        hardware: Hardware,
        meter: Meter | None,
        policy: Policy,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        on_message: Callable[[int, Message], None] = lambda rank, message: None,
        on_phase: Callable[[str], None] = lambda phase: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._launcher, self._hardware, self._meter, self._policy = launcher, hardware, meter, policy
        self._onlooker = meter or make_meter(hardware)
        self._say = say
        self._cancelled, self._on_message, self._on_phase = cancelled, on_message, on_phase
        self._folder = SocketFolder("autotune-")  # sockets and stores: a study may be on NFS
        self.home = self._folder.path
        self.pids: list[int] = []  # by rank, as the launcher knows them
        self._workers: dict[int, int] = {}  # by rank, as they know themselves: an interpreter may have a wrapper
        self.errors: list[Message] = []
        self.phase = Phase.START  # of the rank that is furthest behind
        self._phases: dict[int, Phase] = {}
        self._phase_seconds: dict[str, float] = {}
        self.waited_seconds = 0.0  # for other processes to leave the devices
        self.failed_at: float | None = None  # on the monotonic clock, when a failure was noticed
        self._world = 0
        self._logs: Path | None = None
        self._listener: socket.socket | None = None
        self._strangers: list[Channel] = []  # connected, and not yet known by their hello
        self._channels: dict[int, Channel] = {}  # by rank
        self._codes: dict[int, int] = {}  # the script's own exit codes, of ranks where it is over
        self._outside: dict[int, int] = {}  # bytes of a rank's device outside its allocator, once the group was up
        self._signalled: set[int] = set()
        self.silence: str | None = None  # what was not heard, where that ended the watching
        self._vitals = Vitals(self._onlooker.busy)
        self._places: dict[int, str] = {}  # where a rank's main thread was last
        self._waiting: set[int] = set()  # ranks that wait in a collective
        self._phase_began = time.monotonic()
        self._gauge: Gauge | None = None
        self._oom_kills = kernel_oom_kills()
        self._ended = False

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(
        self, entry: str, world: int, spec: dict[str, Any], *, deadline: float = math.inf, logs: Path | None = None
    ) -> Stop:
        """Launches `world` ranks that run module `entry`, waits until all have said hello and gives them their spec.

        Args:
            spec: what they are told, beside their rank, world size, the rendezvous file and their log.
            deadline: on the monotonic clock.
            logs: the folder of their logs, `rank0.log` and so on; None: they write where this process does.

        Raises:
            OSError: the machine refuses to start them, or a GPU does not answer.
        """
        self._world, self._logs = world, logs
        self.enter(Phase.START)
        if self._meter is not None:
            self.waited_seconds = wait_for_room(self._meter, self._say, deadline=deadline, cancelled=self._cancelled)
        address = str(self.home / "home.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(world)
        for rank in range(world):
            self.pids.append(self._launcher.launch(entry, address, rank))
        stop = self.watch(lambda: self.greeted, deadline)
        if stop is not Stop.ARRIVED:  # the socket stays: a rank that is refused would die of it, and hide the cause
            return stop
        self._close_listener()
        common = {**spec, "world": world, "store": str(self.home / "store"), "port": _free_port()}
        for rank, channel in self._channels.items():
            log = str(logs.resolve() / f"rank{rank}.log") if logs is not None else None
            channel.send("spec", **common, rank=rank, log=log)
        if self._meter is not None:
            self._gauge = Gauge(self._meter, [self._workers[rank] for rank in range(world)])
        return stop

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @property
    def greeted(self) -> bool:
        """Whether every rank has said hello. Before that nothing of what it is to run has reached it."""
        return self._world > 0 and len(self._channels) == self._world

    # -- hearing -----------------------------------------------------------------------------------------------------

    def watch(self, until: Callable[[], bool], deadline: float = math.inf) -> Stop:
        """Hears the ranks until `until` says that all is here, or something else ends the waiting.

        Args:
            deadline: on the monotonic clock.
        """
        last_alive = last_look = time.monotonic()
        self._vitals.forget()
        while True:
            if self._cancelled():
                return Stop.CANCELLED
            now = time.monotonic()
            if now > deadline:
                return Stop.DEADLINE
            patience = self._policy.silence_seconds(self.phase) if self.greeted else self._policy.hello_seconds
            if now - max(last_look, last_alive) > min(_LOOK_SECONDS, 0.4 * patience):
                last_look = now
                last_alive = now if self._get_on() else last_alive
            if now - last_alive > patience:
                self.failed_at = now
                self.silence = f"{self.phase.value}: no sign of life for {patience:.0f} s{self._stuck()}"
                return Stop.SILENT
            if self._hear(0.1) and self.greeted:  # hellos count together, however they trickle in
                last_alive = time.monotonic()
            if not self.errors and until():
                return Stop.ARRIVED
            if self._lost():
                self._hear(0.0)  # its last words may have come in between
            if self.errors or self._lost() or (self._gauge is not None and self._gauge.peaks().lost):
                self.failed_at = time.monotonic()
                return Stop.FAILED

    def _get_on(self) -> bool:
        """Whether ranks that say nothing compute, read or write."""
        known = {rank: self._workers.get(rank, pid) for rank, pid in enumerate(self.pids)}
        return self._vitals.alive(known.values(), [known[rank] for rank in self._waiting])

    def _stuck(self) -> str:
        """Where the ranks are, those that wait for others last."""
        order = sorted(self._places, key=lambda rank: (rank in self._waiting, rank))
        return "".join(f"; rank {rank} in {self._places[rank]}" for rank in order[:2])

    def _lost(self) -> bool:
        """Whether a rank is gone that should be there."""
        left = self.exit_codes()
        if self._policy.may_leave and self.greeted:
            return any(left.values())
        return bool(left) or any(channel.closed for channel in self._channels.values())

    def _hear(self, seconds: float) -> bool:
        """Takes in what the ranks have said, waiting for it at most so long; whether it was a sign of life."""
        channels = {channel: rank for rank, channel in self._channels.items() if not channel.closed}
        sources: list[Any] = [*channels, *self._strangers, *([self._listener] if self._listener else [])]
        heard = False
        for source in select.select(sources, [], [], seconds)[0]:
            if isinstance(source, socket.socket):
                self._strangers.append(Channel(source.accept()[0]))
            elif source in channels:
                for message in source.drain():
                    heard = self._take(channels[source], message) or heard
            else:
                heard = self._greet(source) or heard
        return heard

    def _greet(self, channel: Channel) -> bool:
        """Learns which rank a new connection is of; whether it said so."""
        hello = channel.receive(0)
        if hello is not None and hello["type"] == "hello":
            self._channels[int(hello["rank"])] = channel
            self._workers[int(hello["rank"])] = int(hello["pid"])
        elif not channel.closed:
            return False
        self._strangers.remove(channel)
        if hello is None:
            channel.close()
        return hello is not None

    def _take(self, rank: int, message: Message) -> bool:
        """Remembers what a message says; whether it is a sign of life."""
        kind = message["type"]
        if kind == "pulse":
            self._places[rank] = str(message["where"])
            (self._waiting.add if message["waits"] else self._waiting.discard)(rank)
            return bool(message["moved"])
        if kind == "error":
            self.errors.append(message)
        elif kind == "device" and "uuid" in message:
            self._onlooker.place(rank, message["uuid"])
            self._outside[rank] = message["outside_bytes"]
        elif kind == "bye" and message.get("code") is not None:
            self._codes[rank] = int(message["code"])
        elif kind == "phase" and message["phase"] in set(Phase):
            self._phases[rank] = Phase(message["phase"])
            self._enter(min(self._phases.values(), key=list(Phase).index))
        self._on_message(rank, message)
        return True

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends a message to every rank."""
        for channel in self._channels.values():
            channel.send(kind, **fields)

    def enter(self, phase: Phase) -> None:
        """Has every rank begin a phase: its own patience, and its own seconds."""
        self._phases = dict.fromkeys(range(self._world), phase)
        self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        if phase is self.phase:
            return
        self._phase_seconds = self.seconds_by_phase()
        self._phase_began, self.phase = time.monotonic(), phase
        self._on_phase(phase.value)

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds that each phase has taken, the present one so far."""
        so_far = self._phase_seconds.get(self.phase.value, 0.0)
        return {**self._phase_seconds, self.phase.value: so_far + time.monotonic() - self._phase_began}

    # -- what became of them -----------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, int]:
        """Exit codes of ranks that have ended, negative for a signal."""
        found = {rank: self._launcher.status(pid) for rank, pid in enumerate(self.pids)}
        return {rank: status for rank, status in found.items() if status is not None}

    def exit_codes(self) -> dict[int, int]:
        """The same, but a rank whose script was over has the script's code, whatever its interpreter died of on the way
        out: threads of libraries end in an abort there now and then."""
        return {
            rank: self._codes.get(rank, status) if status < 0 else status for rank, status in self.statuses().items()
        }

    @property
    def scripts_code(self) -> int | None:
        """The script's exit code, once it is over in every rank, whether they have left or not; None before."""
        return max(self._codes.values()) if len(self._codes) == self._world else None

    @property
    def all_left(self) -> bool:
        """Whether every rank has ended with exit code 0."""
        codes = self.exit_codes()
        return len(codes) == self._world and not any(codes.values())

    def peaks(self) -> Peaks:
        """Memory at its highest since the last `reset_peaks`, now included; of ranks that are not gauged, memory now."""
        peaks = self._gauge.look() if self._gauge is not None else self._memory_now()
        peaks.oom_kills = kernel_oom_kills() - self._oom_kills
        return peaks

    def _memory_now(self) -> Peaks:
        peaks = Peaks(used=[0] * len(self.pids), host_low=host_available_bytes())
        with suppress(Exception):  # a GPU may answer late while a process dies
            self._onlooker.sample([self._workers.get(i, pid) for i, pid in enumerate(self.pids)], peaks)
        return peaks

    def reset_peaks(self) -> None:
        if self._gauge is not None:
            self._gauge.reset()

    def evidence(self) -> Evidence:
        """Everything that is known of a group that failed or fell silent; call it before `end`."""
        peaks = self.peaks()
        statuses: dict[int, int] = {}
        if self.silence is None:
            self._settle()
            statuses = self._wait_for_statuses()
        phase = self.phase
        if self.errors and self.errors[0].get("phase") in set(Phase):
            phase = Phase(self.errors[0]["phase"])
        for error in self.errors:
            blame_hidden(peaks, error.get("numbers") or {}, self._outside.get(error.get("rank", -1)))
        return Evidence(
            self._hardware.device,
            self.errors,
            statuses,
            self.silence,
            phase,
            peaks,
            self._hardware.host_memory_bytes,
            {rank: log_tail(path) for rank in range(self._world) if (path := self._log_of(rank)) is not None},
        )

    def _log_of(self, rank: int) -> Path | None:
        """Where the rank has written last."""
        return self._logs / f"rank{rank}.log" if self.greeted and self._logs is not None else self._launcher.log

    def _settle(self) -> None:
        until = time.monotonic() + self._policy.settle_seconds
        while (left := until - time.monotonic()) > 0:
            self._hear(min(left, 0.05))

    def _wait_for_statuses(self) -> dict[int, int]:
        """Exit codes; where no rank has said what went wrong, there must be one soon."""
        unexplained = all(is_secondary(error) for error in self.errors)
        until = time.monotonic() + (_STATUS_SECONDS if unexplained else 0.0)
        while not (codes := self.exit_codes()) and time.monotonic() < until:
            time.sleep(0.02)
        return codes

    # -- ending ------------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Passes a signal on to every rank's process group; each gets it once."""
        for pid in self.pids:
            if pid not in self._signalled:
                self._signalled.add(pid)
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)

    def kill(self) -> None:
        """SIGKILL to every rank's process group, at once."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def wait_left(self, seconds: float) -> None:
        """Hears the ranks until all have ended, or the time is up."""
        until = time.monotonic() + seconds
        while len(self.statuses()) < len(self.pids) and time.monotonic() < until:
            self._hear(0.1)
        self._hear(0.0)

    def end(self) -> None:
        """Ends every rank with all that it has started, and waits until nothing of them is left, in memory either.

        What a training that is done has left running in sessions of its own was meant to run on, and does.
        """
        if self._ended:
            return
        self._ended = True
        done = self._policy.may_leave and self.greeted and self.all_left
        try:
            self.tell("stop")
            if self._gauge is not None:
                self._gauge.stop()
            left = end_ranks(self.pids, self._launcher.status, list if done else self._launcher.strays)
            for process in left:
                self._say(f"{process} cannot be ended: the kernel has not let it go")
        finally:
            for channel in (*self._channels.values(), *self._strangers):
                channel.close()
            self._close_listener()
            self._folder.close()
        if self._meter is not None:
            wait_until_back(self._meter, self._say)


def _free_port() -> int:
    """A port for whatever a script opens at MASTER_PORT itself: two groups on a machine do not meet there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
