"""Workers of a group on one host: liveness, and the wait for free memory."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from autotune.problem.hardware import Hardware
from autotune.problem.host_memory import host_available_bytes, kernel_oom_kills
from autotune.util.files import SocketFolder
from autotune.util.linux import NOTICES, has_signal_handler, is_open
from autotune.util.units import MIB
from autotune.workers.failure_classifier import log_tail
from autotune.workers.gpu_memory import make_meter
from autotune.workers.launchers import Launcher
from autotune.workers.memory_monitor import MemoryMonitor, Meter
from autotune.workers.memory_peaks import MemoryPeaks
from autotune.workers.process_tree import descendant_processes, processes
from autotune.workers.protocol import MALFORMED, Channel, Message, malformed

# -- host workers ------------------------------------------------------------------------------------------------------
#
# A group has one `HostWorkers` per machine. `LocalWorkers` serves this machine. For another machine, the
# same class runs in that machine's agent behind a stream (`executors/cluster`).


SHARED_MEMORY = Path("/dev/shm")


class HostWorkers(Protocol):
    """Ranks of one group on one machine. Rank numbers are those of the whole group."""

    numbers: Sequence[int]
    home: Path  # folder of this group only; an empty path for another machine
    pids: list[int]  # process ids of its ranks from the machine's launcher, in rank order
    waited_seconds: float  # of waiting for other processes to leave the devices

    def launch(self, entry: str, numbers: Sequence[int], *, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Launch ranks that run module `entry`, once the devices have enough free memory.

        On another machine the launch is only requested, and `receive` raises a refusal.

        Raises:
            OSError: the machine refuses to start them, or a GPU does not answer.
        """

    def sources(self) -> list[Any]:
        """Return the sources that become readable when messages arrive."""

    def receive(self) -> list[tuple[int, Message]]:
        """Return the ranks' new messages with their rank, `hello` included."""

    def send_specs(self, spec: Message, logs: Path | None) -> None:
        """Send each rank its spec, once all have sent hello: the common fields and its own. Start the memory monitor."""

    def send(self, verb: str, **fields: Any) -> None:
        """Send a message to every rank."""

    def statuses(self) -> dict[int, int]:
        """Return exit codes of ended ranks, negative for a signal."""

    @property
    def has_closed_channel(self) -> bool:
        """True if a rank has closed its channel."""

    @property
    def lost_device(self) -> str:
        """Description of a part of the machine that is gone, such as a GPU; otherwise empty."""

    @property
    def unreachable(self) -> str:
        """Reason why the machine is unreachable; empty while it is reachable."""

    def reset_liveness_baseline(self) -> None:
        """Make the next `is_progressing` start a new comparison."""

    def is_progressing(self, waiting: set[int]) -> bool:
        """Return True if silent ranks compute, read or write. Of ranks that wait, CPU time does not count."""

    def register_device(self, rank: int, device: str) -> None:
        """Record the device that a rank reports."""

    def peaks(self) -> MemoryPeaks:
        """Return the peaks since the last `reset_peaks` including now; without a monitor, the current memory."""

    def reset_peaks(self) -> None:
        """Reset the peaks of this host's ranks."""

    def log_tails(self, greeted: bool) -> dict[int, str]:
        """Return the end of each rank's log; `greeted` determines the log file."""

    def signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        """Pass a signal on to these ranks' process groups; one of `NOTICES` only to ranks that catch it."""

    def end(self, *, done: bool) -> None:
        """End every rank with all its descendants, and wait until processes and memory are released.

        Args:
            done: True if the ranks ended by themselves; processes that they left running are then kept.
        """


@dataclass(frozen=True)
class MultiHostLaunch:
    """Several machines over which a group's ranks are spread evenly."""

    # makes the workers of each machine, in order; takes True if memory is sampled continuously, and a printer of lines
    make_workers: Callable[[bool, Callable[[str], None]], list[HostWorkers]]
    store_host: str  # address of the first machine, at which all others reach the rendezvous


class LocalWorkers:
    """Ranks on this machine.

    Args:
        meter: samples memory continuously; None reads memory only after a failure.
        print_line: called with a line for people.
        node: index of this machine in the group, and number of machines.
    """

    unreachable = ""

    def __init__(
        self,
        launcher: Launcher,
        hardware: Hardware,
        meter: Meter | None,
        print_line: Callable[[str], None],
        node: tuple[int, int] = (0, 1),
    ) -> None:
        self._launcher, self._meter, self._print_line, self._node = launcher, meter, print_line, node
        self._any_meter = meter or make_meter(hardware)
        self._folder = SocketFolder("autotune-ranks-")  # sockets and stores; a study may be on NFS
        self.home = self._folder.path
        self.numbers: Sequence[int] = ()
        self.pids: list[int] = []
        self.waited_seconds = 0.0
        self._logs: Path | None = None
        self._listener: socket.socket | None = None
        self._unidentified: list[Channel] = []  # connections without a hello so far
        self._channels: dict[int, Channel] = {}  # by rank
        self._rank_pids: dict[int, int] = {}  # rank -> its own pid, not that of an interpreter's wrapper
        self._liveness = LivenessCheck(self._any_meter.busy)
        self._signalled = False  # True once a signal to end was sent
        self._final: dict[int, int] | None = None  # exit statuses at the end: the launcher serves later groups
        self._monitor: MemoryMonitor | None = None
        self._oom_kills = kernel_oom_kills()
        self._segments = {*SHARED_MEMORY.glob("nccl-*")}  # of others

    # -- starting ----------------------------------------------------------------------------------------------------

    def launch(self, entry: str, numbers: Sequence[int], *, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Wait for free memory, then start the ranks."""
        self.numbers = numbers
        if self._meter is not None:
            self.waited_seconds = wait_for_free_memory(self._meter, self._print_line, deadline, cancelled)
        address = str(self.home / "home.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(len(numbers))
        for number in numbers:
            self.pids.append(self._launcher.launch(entry, address, number))

    def send_specs(self, spec: Message, logs: Path | None) -> None:
        """Send each rank its spec, with its log file."""
        self._close_listener()
        self._logs = logs
        here = {"local_world": len(self.numbers), "node": self._node[0], "nodes": self._node[1]}
        own = {**here, "store": str(self.home / "store"), "port": _free_port()}
        for local, rank in enumerate(self.numbers):
            log = str(logs.resolve() / f"rank{rank}.log") if logs is not None else None
            each = {"rank": rank, "local_rank": local, "log": log, "pid": self._rank_pids[rank]}
            self._channels[rank].send("spec", **{**own, **spec, **each})
        if self._meter is not None:
            self._monitor = MemoryMonitor(self._meter, [self._rank_pids[rank] for rank in self.numbers])

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- receiving messages ------------------------------------------------------------------------------------------

    def sources(self) -> list[Any]:
        """Return the sockets to wait on."""
        open_ones = [channel for channel in self._channels.values() if not channel.closed]
        return [*open_ones, *self._unidentified, *([self._listener] if self._listener else [])]

    def receive(self) -> list[tuple[int, Message]]:
        """Return the ranks' messages, and accept new connections."""
        ranks = {channel: rank for rank, channel in self._channels.items()}
        heard: list[tuple[int, Message]] = []
        for source in select.select(self.sources(), [], [], 0)[0]:
            if isinstance(source, socket.socket):
                self._unidentified.append(Channel(source.accept()[0]))
            elif source in ranks:
                heard += [(ranks[source], message) for message in source.drain()]
            else:
                heard += self._identify(source)
        return heard

    def _identify(self, channel: Channel) -> list[tuple[int, Message]]:
        """Identify the rank of a new connection."""
        hello = channel.receive(0)
        if hello is None and not channel.closed:
            return []
        self._unidentified.remove(channel)
        if hello is None:
            channel.close()
            return []
        hello["pid"] = channel.peer_pid  # as this process knows it, also from another PID namespace
        why = malformed(hello)
        if why or hello["type"] != "hello" or hello["rank"] not in self.numbers:
            channel.close()
            text = why or f"a connection began with {str(hello)[:100]}, not with a rank's hello"
            return [(self.numbers[0], {"type": MALFORMED, "text": text})]
        self._channels[hello["rank"]] = channel
        self._rank_pids[hello["rank"]] = hello["pid"]
        return [(hello["rank"], hello)]

    def send(self, verb: str, **fields: Any) -> None:
        """Send a message to all ranks."""
        for channel in self._channels.values():
            channel.send(verb, **fields)

    # -- results -----------------------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, int]:
        """Return the exit status of each rank that has ended."""
        if self._final is not None:
            return self._final
        found = {rank: self._launcher.status(pid) for rank, pid in zip(self.numbers, self.pids, strict=False)}
        return {rank: status for rank, status in found.items() if status is not None}

    @property
    def has_closed_channel(self) -> bool:
        """Return True if a rank closed its connection."""
        return any(channel.closed for channel in self._channels.values())

    @property
    def lost_device(self) -> str:
        """Return the failure of a lost GPU, or an empty text."""
        return self._monitor.peaks().lost if self._monitor is not None else ""

    def is_progressing(self, waiting: set[int]) -> bool:
        """Return True if the ranks make progress, given the ranks that wait in a collective."""
        known = self._known_pids()
        return self._liveness.made_progress(known.values(), [known[rank] for rank in waiting & known.keys()])

    def reset_liveness_baseline(self) -> None:
        """Restart the liveness check of the ranks."""
        self._liveness.reset()

    def _known_pids(self) -> dict[int, int]:
        """Return the best known process id of each rank."""
        return {rank: self._rank_pids.get(rank, pid) for rank, pid in zip(self.numbers, self.pids, strict=False)}

    def register_device(self, rank: int, device: str) -> None:
        """Register the device of a rank."""
        self._any_meter.register_device(self.numbers.index(rank), device)

    def peaks(self) -> MemoryPeaks:
        """Return the peaks of the ranks, and the kernel's OOM kills since the launch."""
        if self._monitor is not None:
            peaks = self._monitor.look()
        else:
            peaks = MemoryPeaks(used=[0] * len(self.pids), host_low=host_available_bytes())
            with suppress(Exception):  # a GPU may answer late while a process dies
                self._any_meter.sample(list(self._known_pids().values()), peaks)
        peaks.oom_kills = kernel_oom_kills() - self._oom_kills
        return peaks

    def reset_peaks(self) -> None:
        """Reset the peaks of the ranks."""
        if self._monitor is not None:
            self._monitor.reset()

    def log_tails(self, greeted: bool) -> dict[int, str]:
        """Return the end of each rank's log."""
        if greeted and self._logs is not None:
            return {rank: log_tail(self._logs / f"rank{rank}.log") for rank in self.numbers}
        return {rank: log_tail(self._launcher.log) for rank in self.numbers if self._launcher.log is not None}

    # -- ending ------------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        """Send a signal to ranks; notices go to their scripts only."""
        if number not in NOTICES:
            self._signalled = True
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
            return
        for pid, own in zip(self.pids, self._known_pids().values(), strict=False):
            if pid in pids and has_signal_handler(own, number):
                with suppress(ProcessLookupError):
                    os.kill(own, number)

    def end(self, *, done: bool) -> None:
        """Stop sampling, kill the ranks that are left, and close all connections."""
        try:
            if self._monitor is not None:
                self._monitor.stop()
            left = []
            if not done or self._signalled:
                left = self._launcher.end(self.pids, strays=not done)
            for process in left:
                self._print_line(f"{process} cannot be ended: the kernel has not let it go")
        finally:
            if len(found := self.statuses()) == len(self.pids):  # else one may still end
                self._final = found
                self._launcher.forget(self.pids)
            for channel in (*self._channels.values(), *self._unidentified):
                channel.close()
            self._close_listener()
            self._folder.close()
            for path in {*SHARED_MEMORY.glob("nccl-*")} - self._segments:  # NCCL does not remove those of killed ranks
                with suppress(OSError):
                    if path.stat().st_uid == os.getuid() and not is_open(path):
                        path.unlink()
        if self._meter is not None:
            wait_for_released_memory(self._meter, self._print_line)


def _free_port() -> int:
    """Return a free port for uses of MASTER_PORT by a script, so that two groups on a machine do not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- wait for free memory ----------------------------------------------------------------------------------------------

RELEASED_MEMORY_SECONDS = 10.0  # limit for a device's memory to return after the last rank
FREE_MEMORY_SECONDS = 30.0  # limit for other processes to release memory taken since the study began; awaited once
_POLL_SECONDS = 0.05


def wait_for_free_memory(
    meter: Meter, print_line: Callable[[str], None], deadline: float, cancelled: Callable[[], bool]
) -> float:
    """Wait until the devices have as much free memory as when the study began.

    The holders are reported. If they stay, the study continues next to them. Ranks may be launched after the call.

    Args:
        deadline: on the monotonic clock.

    Returns:
        The seconds waited.

    Raises:
        GpuError: a GPU does not answer.
    """
    began, waited = time.monotonic(), False
    until = min(deadline, began + FREE_MEMORY_SECONDS)
    while warnings := meter.external_usage_warnings():
        if not waited:
            for line in warnings:
                print_line(f"{line}; waiting at most {FREE_MEMORY_SECONDS:.0f} s for it")
        waited = True
        if time.monotonic() > until or cancelled():
            print_line("going on beside it: until it is free again, running out of memory says nothing of a candidate")
            break
        time.sleep(_POLL_SECONDS)
    meter.begin()
    return time.monotonic() - began if waited else 0.0


def wait_for_released_memory(meter: Meter, print_line: Callable[[str], None]) -> None:
    """Wait until the devices regain the memory of ended ranks, and report its holders if they do not."""
    until = time.monotonic() + RELEASED_MEMORY_SECONDS
    while (left := meter.unreleased_memory_warnings()) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    for line in left:
        print_line(line)


# -- liveness ----------------------------------------------------------------------------------------------------------

_ANSWER_SECONDS = 0.5  # a driver answers within milliseconds
LEAST_CPU_SHARE = 0.05  # share of one core; idle ranks with their helper threads stay far below
LEAST_IO_BYTES_PER_SECOND = 0.05 * MIB  # a slow network disk is faster


@dataclass(frozen=True)
class _Sample:
    at: float  # on the monotonic clock
    cpu_seconds: float
    io_bytes: int


class LivenessCheck:
    """Compare the ranks' counters between checks.

    Args:
        busy: returns True if the ranks' devices compute, according to their driver.
    """

    def __init__(self, busy: Callable[[], bool] = lambda: False) -> None:
        self._last: _Sample | None = None
        self._busy = _BackgroundCall(busy)

    def reset(self) -> None:
        """Make the next check start a new comparison."""
        self._last = None

    def made_progress(self, ranks: Iterable[int], waiting: Iterable[int] = ()) -> bool:
        """Return True if any of the processes made progress since the last check; False on the first.

        Args:
            ranks: their process ids.
            waiting: ranks that may spin, as in a collective. Of their own counters only I/O counts.
        """
        now, before = _sample(ranks, set(waiting)), self._last
        self._last = now
        if before is None:
            return False
        seconds = max(now.at - before.at, 1e-3)
        return (
            now.cpu_seconds - before.cpu_seconds > LEAST_CPU_SHARE * seconds
            or now.io_bytes - before.io_bytes > LEAST_IO_BYTES_PER_SECOND * seconds
            or self._busy.latest()
        )


class _BackgroundCall:
    """Call a function in a thread, one call at a time, so that a hanging driver does not block the tuner."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask, self._answer = ask, False
        self._thread: threading.Thread | None = None

    def latest(self) -> bool:
        """Return the last result, and start the next call unless one is running."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            self._thread.join(_ANSWER_SECONDS)
        return self._answer

    def _run(self) -> None:
        self._answer = False
        self._answer = self._ask()


def _sample(ranks: Iterable[int], waiting: set[int]) -> _Sample:
    cpu_seconds, io_bytes = 0.0, 0
    pids = list(ranks)
    for process in [*processes(pids), *descendant_processes(*pids)]:
        with suppress(psutil.Error, OSError):  # process gone, or of another user
            if process.pid not in waiting:
                times = process.cpu_times()
                cpu_seconds += times.user + times.system
            # bytes of the disks and of the calls: libaio's, as of NVMe offload, are not in the latter
            io_bytes += sum(process.io_counters()[2:])
    return _Sample(time.monotonic(), cpu_seconds, io_bytes)
