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
from pathlib import Path
from typing import Any, TypeVar

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Phase
from autotune.versions import StrEnum
from autotune.workers.failure_classifier import FailureEvidence, is_secondary
from autotune.workers.gpu_memory import blame_hidden
from autotune.workers.host_workers import HostWorkers, LocalWorkers, MultiHostLaunch
from autotune.workers.launchers import Launcher
from autotune.workers.memory_monitor import MemoryPeaks, Meter, merged
from autotune.workers.protocol import Message

# -- group -------------------------------------------------------------------------------------------------------------
#
# Parent's view of a worker group: start the ranks together, receive their messages, and end them as a whole.
#
# Trials and trainings differ in their time limits and in the ends that they allow. Both are in their Policy.

T = TypeVar("T")

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
        say: called with a line for people: reasons of a wait, and processes that could not be ended.
    """

    def __init__(
        self,
        launcher: Launcher | MultiHostLaunch,
        hardware: Hardware,
        meter: Meter | None,
        policy: Policy,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        on_message: Callable[[int, Message], None] = lambda rank, message: None,
        on_phase: Callable[[str], None] = lambda phase: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._hardware, self._policy, self._say = hardware, policy, say
        self._cancelled, self._on_message, self._on_phase = cancelled, on_message, on_phase

        def told(text: str) -> None:
            self._say(text)

        self._store_host = launcher.store_host if isinstance(launcher, MultiHostLaunch) else ""
        self._squads: list[HostWorkers] = (
            launcher.squads(meter is not None, told)
            if isinstance(launcher, MultiHostLaunch)
            else [LocalWorkers(launcher, hardware, meter, told)]
        )
        self._workers: dict[int, int] = {}  # rank -> its own pid, not that of an interpreter's wrapper
        self.errors: list[Message] = []
        self.phase = Phase.START  # phase of the rank that is furthest behind
        self._phases: dict[int, Phase] = {}
        self._phase_seconds: dict[str, float] = {}
        self.failed_at: float | None = None  # monotonic clock at which a failure was noticed
        self._world = 0
        self._meeting: Message | None = None  # rendezvous of several machines, as the first rank reported it
        self._codes: dict[int, int] = {}  # rank -> exit code of its script, once it has ended
        self._outside: dict[int, int] = {}  # rank -> bytes of its device outside its allocator, once the group was up
        self._signalled: set[int] = set()
        self.silence: str | None = None  # description of the missing heartbeat that ended the watch
        self._places: dict[int, str] = {}  # rank -> last position of its main thread
        self._waiting: set[int] = set()  # ranks that wait in a collective
        self._phase_began = time.monotonic()
        self._ended = False

    @property
    def home(self) -> Path:
        """Folder of this group only; an empty path if its first machine is remote."""
        return self._squads[0].home

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks as their launchers know them, in rank order."""
        return [pid for squad in self._squads for pid in squad.pids]

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting for other processes to leave the devices."""
        return max(squad.waited_seconds for squad in self._squads)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(
        self, entry: str, world: int, spec: dict[str, Any], *, deadline: float = math.inf, logs: Path | None = None
    ) -> Stop:
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
        share = world // len(self._squads)
        for at, squad in enumerate(self._squads):
            numbers = range(at * share, (at + 1) * share)
            squad.launch(entry, numbers, deadline=deadline, cancelled=self._cancelled)
        stop = self.watch(lambda: self.greeted, deadline)
        if stop is not Stop.ARRIVED:  # the socket stays open, because a refused rank would die of it and hide the cause
            return stop
        common = {**spec, "world": world}
        if len(self._squads) > 1:
            return self._brief_spread(common, logs, deadline)
        self._brief(self._squads[0], common, logs)
        return stop

    def _brief(self, squad: HostWorkers, spec: Message, logs: Path | None) -> None:
        squad.brief(spec, logs)
        squad.begin([self._workers[rank] for rank in squad.numbers])

    def _brief_spread(self, common: Message, logs: Path | None, deadline: float) -> Stop:
        """Send the specs to several machines: the first rank opens the store, then the other machines follow."""
        first, *others = self._squads
        store = {"host": self._store_host, "token": uuid.uuid4().hex}
        self._brief(first, {**common, "store": {**store, "port": None}}, logs)
        stop = self.watch(lambda: self._meeting is not None, deadline)
        if stop is Stop.ARRIVED and self._meeting is not None:
            found = {"store": {**store, "port": self._meeting["port"]}, "port": self._meeting["scripts_port"]}
            for squad in others:
                self._brief(squad, {**common, **found}, logs)
        return stop

    @property
    def greeted(self) -> bool:
        """True if every rank has sent hello. Before that, no rank has received its job."""
        return self._world > 0 and len(self._workers) == self._world

    # -- receiving messages ------------------------------------------------------------------------------------------

    def watch(self, until: Callable[[], bool], deadline: float = math.inf) -> Stop:
        """Receive messages until `until` returns True, or another event ends the watch.

        Args:
            deadline: on the monotonic clock.
        """
        quiet = Quiet()
        for squad in self._squads:
            squad.reset_liveness_baseline()
        while True:
            if self._cancelled():
                return Stop.CANCELLED
            quiet.turn()
            if quiet.now > deadline:
                return Stop.DEADLINE
            patience = self._policy.silence_seconds(self.phase) if self.greeted else self._policy.hello_seconds
            if quiet.now - max(quiet.last_look, quiet.last_alive) > min(_LOOK_SECONDS, 0.4 * patience):
                quiet.last_look = quiet.now
                quiet.last_alive = quiet.now if self._check_progress() else quiet.last_alive
            if quiet.now - quiet.last_alive > patience:
                self.failed_at = quiet.now
                self.silence = f"{self.phase.value}: no sign of life for {patience:.0f} s{self._stuck()}"
                return Stop.SILENT
            if self._hear(0.1) and self.greeted:  # hellos count only together, so a slow one does not extend the wait
                quiet.last_alive = time.monotonic()
            if not self.errors and until():
                return Stop.ARRIVED
            if self._lost():
                self._hear(0.0)  # its last message may have arrived in between
            if self.errors or self._lost() or any(squad.lost or squad.cut_off for squad in self._squads):
                self.failed_at = time.monotonic()
                return Stop.FAILED

    def _check_progress(self) -> bool:
        """Return True if silent ranks compute, read or write."""
        alive = self._each(lambda squad: squad.get_on(self._waiting))
        return any(alive)

    def _stuck(self) -> str:
        """Return the positions of the ranks, those waiting in a collective last."""
        order = sorted(self._places, key=lambda rank: (rank in self._waiting, rank))
        return "".join(f"; rank {rank} in {self._places[rank]}" for rank in order[:2])

    def _lost(self) -> bool:
        """Return True if a rank has ended that should still run."""
        left = self.exit_codes()
        if self._policy.may_leave and self.greeted:
            return any(left.values())
        return bool(left) or any(squad.hung_up for squad in self._squads)

    def _hear(self, seconds: float) -> bool:
        """Receive messages for at most `seconds`. Return True if one was a heartbeat."""
        select.select([source for squad in self._squads for source in squad.sources()], [], [], seconds)
        heard = False
        for squad in self._squads:
            for rank, message in squad.hear():
                heard = self._take(rank, message) or heard
        return heard

    def _take(self, rank: int, message: Message) -> bool:
        """Process a message. Return True if it is a heartbeat."""
        verb = message["type"]
        if verb == "hello":
            self._workers[rank] = int(message["pid"])
            return True
        if verb == "pulse":
            self._places[rank] = str(message["where"])
            (self._waiting.add if message["waits"] else self._waiting.discard)(rank)
            return bool(message["moved"])
        if verb == "error":
            self.errors.append(message)
        elif verb == "store":
            self._meeting = self._meeting or message
        elif verb == "device" and "uuid" in message:
            next(squad for squad in self._squads if rank in squad.numbers).place(rank, message["uuid"])
            self._outside[rank] = message["outside_bytes"]
        elif verb == "bye" and message.get("code") is not None:
            self._codes[rank] = int(message["code"])
        elif verb == "phase" and message["phase"] in set(Phase):
            self._phases[rank] = Phase(message["phase"])
            self._enter(min(self._phases.values(), key=list(Phase).index))
        self._on_message(rank, message)
        return True

    def tell(self, verb: str, **fields: Any) -> None:
        """Send a message to every rank."""
        for squad in self._squads:
            squad.tell(verb, **fields)

    def enter(self, phase: Phase) -> None:
        """Set the phase of all ranks, which has its own time limit and its own duration."""
        self._phases = dict.fromkeys(range(self._world), phase)
        self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        if phase is self.phase:
            return
        self._phase_seconds = self.seconds_by_phase()
        self._phase_began, self.phase = time.monotonic(), phase
        self._on_phase(phase.value)

    def seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase, including the current one so far."""
        so_far = self._phase_seconds.get(self.phase.value, 0.0)
        return {**self._phase_seconds, self.phase.value: so_far + time.monotonic() - self._phase_began}

    # -- results -----------------------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, int]:
        """Return exit codes of ended ranks, negative for a signal."""
        return {rank: status for squad in self._squads for rank, status in squad.statuses().items()}

    def exit_codes(self) -> dict[int, int]:
        """Return exit codes, with the script's code for a rank whose script had ended.

        At the interpreter's exit, threads of libraries sometimes abort.
        """
        return {
            rank: self._codes.get(rank, status) if status < 0 else status for rank, status in self.statuses().items()
        }

    @property
    def scripts_code(self) -> int | None:
        """The script's exit code once all ranks have finished it, even if they still run; None before."""
        return max(self._codes.values()) if len(self._codes) == self._world else None

    @property
    def all_left(self) -> bool:
        """True if every rank has ended with exit code 0."""
        codes = self.exit_codes()
        return len(codes) == self._world and not any(codes.values())

    def peaks(self) -> MemoryPeaks:
        """Return the peaks since the last `reset_peaks` including now; without a monitor, the current memory."""
        return merged(self._each(lambda squad: squad.peaks()))

    def reset_peaks(self) -> None:
        """Reset the peaks on all hosts."""
        for squad in self._squads:
            squad.reset_peaks()

    def evidence(self) -> FailureEvidence:
        """Collect all facts about a failed or silent group. Call this before `end`."""
        peaks = self.peaks()  # before the ranks are gone
        statuses: dict[int, int] = {}
        if self.silence is None:
            self._settle()
            statuses = self._wait_for_statuses()
        logs = self._each(lambda squad: squad.last_words(self.greeted))
        phase = self.phase
        if self.errors and self.errors[0].get("phase") in set(Phase):
            phase = Phase(self.errors[0]["phase"])
        for error in self.errors:
            blame_hidden(peaks, error.get("numbers") or {}, self._outside.get(error.get("rank", -1)))
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
            cut_off=next((squad.cut_off for squad in self._squads if squad.cut_off), ""),
        )

    def _settle(self) -> None:
        """Receive further messages about a failure until each rank has reported or ended."""
        until = time.monotonic() + self._policy.settle_seconds
        while not self._all_told() and (left := until - time.monotonic()) > 0:
            self._hear(min(left, 0.05))
        self._hear(0.0)  # last messages of ended ranks

    def _all_told(self) -> bool:
        """Return True if no more messages can come. In a training, only the exit code of a rank is final."""
        told = set() if self._policy.may_leave else {error.get("rank") for error in self.errors}
        return len(told | self.exit_codes().keys()) >= self._world > 0

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
        for squad in self._squads:
            squad.signal(number, squad.pids)

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on to every rank's process group, once per group."""
        for squad in self._squads:
            fresh = [pid for pid in squad.pids if pid not in self._signalled]
            self._signalled.update(fresh)
            squad.signal(number, fresh)

    def kill(self) -> None:
        """Send SIGKILL to every rank's process group immediately."""
        for squad in self._squads:
            squad.signal(signal.SIGKILL, squad.pids)

    def wait_left(self, seconds: float, longest_seconds: float) -> None:
        """Receive messages until all ranks have ended, or none has made progress for `seconds`.

        Saves may take any time. Once a rank has ended, progress of its peers no longer counts, because they may wait
        for it in a collective and spin.

        Args:
            longest_seconds: limit of the whole wait.
        """
        quiet = Quiet()
        for squad in self._squads:
            squad.reset_liveness_baseline()
        while (ended := len(self.statuses())) < len(self.pids):
            quiet.turn()
            if quiet.now - quiet.last_alive > seconds or quiet.now - quiet.began > longest_seconds:
                break
            alive = self._hear(0.1)
            if quiet.now - quiet.last_look > min(_LOOK_SECONDS, 0.4 * seconds):
                quiet.last_look, alive = quiet.now, self._check_progress() or alive
            if alive and not ended:
                quiet.last_alive = quiet.now
        self._hear(0.0)

    def end(self) -> None:
        """End every rank with all its descendants, and wait until processes and memory are released.

        Processes that a finished training left running are kept on purpose. After a signal, only those in
        separate sessions are kept.
        """
        if self._ended:
            return
        self._ended = True
        done = self._policy.may_leave and self.greeted and self.all_left
        self.tell("stop")
        self._each(lambda squad: squad.end(done=done))

    def _each(self, ask: Callable[[HostWorkers], T]) -> list[T]:
        """Call a function for all machines in parallel, so that unreachable machines time out at the same time."""
        if len(self._squads) == 1:
            return [ask(self._squads[0])]
        with ThreadPoolExecutor(len(self._squads)) as pool:
            return list(pool.map(ask, self._squads))


# -- group policy ------------------------------------------------------------------------------------------------------
#
# Time limits for a worker group, and the reasons for which a watch ends.

_LAPSE_SECONDS = 5.0  # seconds; a normal turn of the watch loop takes tenths of a second


class Stop(StrEnum):
    """Reason for which the watch of a group ended."""

    ARRIVED = "arrived"  # the awaited event has happened
    FAILED = "failed"  # a rank reported an error, or is gone
    SILENT = "silent"  # no heartbeat for longer than the policy allows
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Policy:
    """Differences between the ranks of a trial and those of a training.

    Args:
        hello_seconds: limit for all ranks to start and connect.
        silence_seconds: limit without a heartbeat per phase. A heartbeat is a message, progress of the main thread, or
            computing, reading or writing.
        settle_seconds: wait after the first failure, because a peer's consequential error may arrive before the cause.
        may_leave: True if a rank may end by itself with exit code 0. A trial's ranks wait for the order.
    """

    hello_seconds: float
    silence_seconds: Callable[[Phase], float]
    settle_seconds: float
    may_leave: bool


class Quiet:
    """Time without a heartbeat, in a loop that marks its turns.

    A loop that stands still was suspended itself, usually with its ranks (`scontrol suspend`, `docker pause`). The
    suspended time does not count.

    Attributes:
        now: start of this turn. All times are on the monotonic clock.
        began: start of the loop.
        last_alive: last heartbeat of a rank.
        last_look: last check of silent ranks.
    """

    def __init__(self) -> None:
        self.now = self.began = self.last_alive = self.last_look = time.monotonic()

    def turn(self) -> None:
        """Begin the next turn."""
        before, self.now = self.now, time.monotonic()
        if (lapse := self.now - before) > _LAPSE_SECONDS:
            self.began += lapse
            self.last_alive = min(self.now, self.last_alive + lapse)
            self.last_look = min(self.now, self.last_look + lapse)
