"""Memory and counters of a trial as seen from outside its ranks, sampled by a thread of the tuner."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from autotune.problem.host import host_available_bytes, host_total_bytes
from autotune.units import MIB

FOREIGN_BYTES = 256 * MIB  # others must have grown by this much to be blamed
_LOOK_SECONDS = 1.0  # for a sample that is asked for
_SHORT = 0.1  # of main memory: while so little is left,
_CLOSELY_SECONDS = 0.05  # so often is looked at what is left


@dataclass
class Peaks:
    """The highest values since the last reset, in bytes; lists have one entry a rank."""

    used: list[int] = field(default_factory=list)  # of the rank's own process; 0 where nothing shows it
    grown: dict[int, int] = field(default_factory=dict)  # by rank: of its whole GPU, since before it was launched
    foreign: int = 0  # how much more of a device others hold than when the study began
    neighbours: str = ""  # who they are, for people
    lost: str = ""  # which GPU is gone, and how
    clocks: dict[str, list[int]] = field(default_factory=dict)  # samples in MHz, by GPU
    clock_reasons: int = 0  # NVML's bits of all of them
    host_low: int = 2**62  # least main memory that was left to this process and its ranks
    oom_kills: int = 0  # the kernel's kills since the group started

    @property
    def worst(self) -> int:
        """Of the rank with most: its process's bytes, or its GPU's growth where its process is hidden."""
        return max(self.used, default=0) or max(self.grown.values(), default=0)


def merged(parts: list[Peaks]) -> Peaks:
    """Of several machines' ranks, in the machines' order: whoever ran out, it is everybody's."""
    if len(parts) == 1:
        return parts[0]
    whole = Peaks()
    for number, part in enumerate(parts):
        before = len(whole.used)
        whole.grown |= {before + rank: bytes_ for rank, bytes_ in part.grown.items()}
        whole.used += part.used
        if part.foreign > whole.foreign:
            whole.foreign, whole.neighbours = part.foreign, part.neighbours
        whole.lost = whole.lost or part.lost
        whole.clocks |= {
            f"machine {number}, {gpu}": samples for gpu, samples in part.clocks.items()
        }  # each has a GPU 0
        whole.clock_reasons |= part.clock_reasons
        whole.host_low = min(whole.host_low, part.host_low)
        whole.oom_kills += part.oom_kills
    return whole


class Meter:
    """Reads one device kind. What is here suits a device that nobody else is on."""

    interval_seconds: float

    def crowd(self) -> list[str]:
        """Lines for people: which devices have less free than when the study began, and who holds it. Empty once there is
        nothing to wait for."""
        return []

    def begin(self) -> None:
        """Ranks are launched next."""

    def place(self, rank: int, device: str) -> None:
        """Takes a rank's word for which device it has."""

    def sample(self, pids: list[int], peaks: Peaks) -> None:
        """Raises the peaks to what the ranks with these pids have now."""
        raise NotImplementedError

    def busy(self) -> bool:
        """Whether a device computes, as its driver says."""
        return False

    def look_closely(self) -> None:
        """Something has gone wrong: the next sample may cost more."""

    def left(self) -> list[str]:
        """Lines for people: which devices do not have their memory back after the ranks were ended."""
        return []


class CpuMeter(Meter):
    """What RLIMIT_DATA counts, of each rank. Ranks know their own high water (`rank.devices`): this is for those that
    die, and seldom enough to leave them their cores: whatever wakes this process takes a core from threads that wait for each
    other (every 4 ms slowed two ranks on two cores by 9 %)."""

    interval_seconds = 0.25

    def sample(self, pids: list[int], peaks: Peaks) -> None:
        for index, pid in enumerate(pids):
            with suppress(OSError, IndexError, ValueError):
                pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[5])
                peaks.used[index] = max(peaks.used[index], pages * 4096)


class Gauge:
    """Samples a trial's processes in a thread, until it is stopped. Nothing waits for a sample: a driver may hang."""

    def __init__(self, meter: Meter, pids: list[int]) -> None:
        self._meter, self._pids = meter, pids
        self._peaks = Peaks(used=[0] * len(pids))  # a reset puts others in their place: a late sample spoils none
        self._begun = self._done = 0  # samples
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauge", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._begun += 1
            peaks = self._peaks
            with suppress(Exception):  # a GPU may answer late while a process dies
                self._meter.sample(self._pids, peaks)
            self._done = self._begun
            self._watch_host(peaks, _SHORT * host_total_bytes())  # of a machine whose memory may grow
            self._wake.clear()

    def _watch_host(self, peaks: Peaks, short_bytes: float) -> None:
        """Until the next sample. Where main memory is short it is looked at more often than devices are."""
        left_seconds = self._meter.interval_seconds
        while left_seconds > 0:
            left_bytes = host_available_bytes()
            peaks.host_low = min(peaks.host_low, left_bytes)
            seconds = min(left_seconds, _CLOSELY_SECONDS) if left_bytes < short_bytes else left_seconds
            if self._wake.wait(seconds):
                return
            left_seconds -= seconds

    def reset(self) -> None:
        self._peaks = Peaks(used=[0] * len(self._pids))

    def peaks(self) -> Peaks:
        """Since the last reset."""
        return self._peaks

    def look(self) -> Peaks:
        """The same with one more sample, as close as the meter can; without it where it takes too long."""
        self._meter.look_closely()
        wanted, until = self._begun + 1, time.monotonic() + _LOOK_SECONDS
        self._wake.set()
        while self._done < wanted and time.monotonic() < until:
            time.sleep(0.005)
        return self._peaks

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join(timeout=2)
