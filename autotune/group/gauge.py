"""Memory and counters of a trial as seen from outside its ranks, sampled by a thread of the tuner."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from autotune.problem.hardware import Hardware, nvml, nvml_handle, visible_gpus
from autotune.problem.host import host_available_bytes
from autotune.units import MIB

FOREIGN_BYTES = 256 * MIB  # another process must have grown by this much to be blamed


@dataclass
class Peaks:
    """The highest values since the last reset, in bytes; lists have one entry a rank."""

    used: list[int] = field(default_factory=list)
    foreign: int = 0  # how much other processes' share of a device grew meanwhile
    host_low: int = 2**62  # least main memory that was left to this process and its ranks
    oom_kills: int = 0  # the kernel's kills since the group started

    @property
    def worst(self) -> int:
        return max(self.used, default=0)


class Meter(Protocol):
    """Reads one device kind."""

    interval_seconds: float

    def sample(self, pids: list[int], peaks: Peaks) -> None: ...
    def is_idle(self) -> bool:
        """Whether the devices are back at the level they had before the first trial."""


class CpuMeter:
    """What RLIMIT_DATA counts, of each rank. Ranks know their own high water (`rank.devices`): this is for those that
    die, and seldom enough to leave them their cores (every 4 ms slowed two ranks on two cores by 9 %)."""

    interval_seconds = 0.05

    def sample(self, pids: list[int], peaks: Peaks) -> None:
        for index, pid in enumerate(pids):
            with suppress(OSError, IndexError, ValueError):
                pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[5])
                peaks.used[index] = max(peaks.used[index], pages * 4096)

    def is_idle(self) -> bool:
        return True


class NvmlMeter:
    """NVML: per process where the driver shows it, the device's growth since idle where a container hides pids."""

    interval_seconds = 0.01

    def __init__(self, count: int) -> None:
        self._context = nvml()
        self._lib = self._context.__enter__()
        self._handles = [nvml_handle(self._lib, one) for one in visible_gpus()[:count]] if self._lib else []
        self._idle = [self._used(handle) for handle in self._handles]

    def _used(self, handle: object) -> int:
        return int(self._lib.nvmlDeviceGetMemoryInfo(handle).used)

    def sample(self, pids: list[int], peaks: Peaks) -> None:
        for index, handle in enumerate(self._handles):
            used = self._used(handle)
            shown = {}
            with suppress(Exception):
                for process in self._lib.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.usedGpuMemory:
                        shown[process.pid] = int(process.usedGpuMemory)
            mine = [shown.get(pid, 0) for i, pid in enumerate(pids) if i % len(self._handles) == index]
            grown = max(0, used - self._idle[index])
            if sum(mine):
                peaks.foreign = max(peaks.foreign, grown - sum(mine))
                worst = max(mine)
            else:
                worst = grown // max(1, len(mine))
            for i in range(index, len(pids), len(self._handles)):
                peaks.used[i] = max(peaks.used[i], shown.get(pids[i], worst))

    def is_idle(self) -> bool:
        return all(self._used(h) - idle < 64 * MIB for h, idle in zip(self._handles, self._idle, strict=True))


def make_meter(hardware: Hardware) -> Meter:
    return NvmlMeter(hardware.count) if hardware.device == "cuda" else CpuMeter()


class Gauge:
    """Samples a trial's processes until it is stopped."""

    def __init__(self, meter: Meter, pids: list[int]) -> None:
        self._meter, self._pids = meter, pids
        self._lock = threading.Lock()
        self._peaks = Peaks(used=[0] * len(pids))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauge", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        next_host = 0.0
        while not self._stopped.is_set():
            with self._lock:
                with suppress(Exception):  # a GPU may answer late while a process dies
                    self._meter.sample(self._pids, self._peaks)
                if time.monotonic() > next_host:
                    self._peaks.host_low = min(self._peaks.host_low, host_available_bytes())
                    next_host = time.monotonic() + 0.1
            self._stopped.wait(self._meter.interval_seconds)

    def reset(self) -> None:
        with self._lock:
            self._peaks = Peaks(used=[0] * len(self._pids))

    def peaks(self) -> Peaks:
        """Since the last reset."""
        with self._lock:
            return self._peaks

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2)
