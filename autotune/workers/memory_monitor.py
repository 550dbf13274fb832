"""Memory monitor: sample memory and counters of a trial from outside its ranks, in a thread of the tuner."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from autotune.problem.host_memory import host_available_bytes, host_total_bytes
from autotune.util.linux import data_bytes
from autotune.workers.memory_peaks import MemoryPeaks

_LOOK_SECONDS = 1.0  # time limit of a requested sample
_SHORT = 0.1  # share of main memory left below which the host is sampled closely
_CLOSELY_SECONDS = 0.05  # interval of close sampling


class Meter:
    """Reader of one kind of device. The defaults suit a device without other users."""

    interval_seconds: float

    def external_usage_warnings(self) -> list[str]:
        """Return warnings about devices with less free memory than when the study began, and its holders.

        The list is empty once no wait is necessary.
        """
        return []

    def begin(self) -> None:
        """Record the state before ranks are launched."""

    def register_device(self, rank: int, device: str) -> None:
        """Record the device that a rank reports."""

    def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
        """Raise the peaks to the current values of the ranks with these pids."""
        raise NotImplementedError

    def busy(self) -> bool:
        """Return True if a device computes, according to its driver."""
        return False

    def sample_faster(self) -> None:
        """Allow the next sample to cost more, after a failure."""

    def unreleased_memory_warnings(self) -> list[str]:
        """Return warnings about devices that have not regained their memory after the ranks ended."""
        return []


class CpuMeter(Meter):
    """Sample the bytes that RLIMIT_DATA counts, for each rank.

    Ranks know their own peak (`rank.devices`). These samples serve ranks that die, and are rare to leave the cores to
    the ranks. Each sample takes a core from threads that wait for each other: every 4 ms slowed two ranks on two cores
    by 9 %.
    """

    interval_seconds = 0.25

    def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
        """Update the peaks with the data segments of the processes, in bytes."""
        for index, pid in enumerate(pids):
            with suppress(OSError, IndexError, ValueError):
                peaks.used[index] = max(peaks.used[index], data_bytes(pid))


class MemoryMonitor:
    """Sample a trial's processes in a thread until `stop`. No caller waits for a sample, because a driver may hang."""

    def __init__(self, meter: Meter, pids: list[int]) -> None:
        self._meter, self._pids = meter, pids
        self._peaks = MemoryPeaks(used=[0] * len(pids))  # replaced by a reset, so a late sample changes no new peaks
        self._begun = self._done = 0  # numbers of samples
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._begun += 1
            peaks = self._peaks
            with suppress(Exception):  # a GPU may answer late while a process dies
                self._meter.sample(self._pids, peaks)
            self._done = self._begun
            self._watch_host(peaks, _SHORT * host_total_bytes())  # the machine's memory may grow
            self._wake.clear()

    def _watch_host(self, peaks: MemoryPeaks, short_bytes: float) -> None:
        """Sample main memory until the next device sample, more often if it is short."""
        left_seconds = self._meter.interval_seconds
        while left_seconds > 0:
            left_bytes = host_available_bytes()
            peaks.host_low = min(peaks.host_low, left_bytes)
            seconds = min(left_seconds, _CLOSELY_SECONDS) if left_bytes < short_bytes else left_seconds
            if self._wake.wait(seconds):
                return
            left_seconds -= seconds

    def reset(self) -> None:
        """Reset the peaks."""
        self._peaks = MemoryPeaks(used=[0] * len(self._pids))

    def peaks(self) -> MemoryPeaks:
        """Return the peaks since the last reset."""
        return self._peaks

    def look(self) -> MemoryPeaks:
        """Return the peaks with one more accurate sample, or without it if the sample takes too long."""
        self._meter.sample_faster()
        wanted, until = self._begun + 1, time.monotonic() + _LOOK_SECONDS
        self._wake.set()
        while self._done < wanted and time.monotonic() < until:
            time.sleep(0.005)
        return self._peaks

    def stop(self) -> None:
        """Stop the sampling thread."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(timeout=2)
