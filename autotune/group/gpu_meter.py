"""What NVML shows of a group's GPUs: whose bytes, how fast they run, whether they are still there.

A device's growth since before the ranks were launched is theirs, less what other processes have taken meanwhile. Where NVML
shows the ranks' processes it is known who took what. In a container that hides them it is not: then the ranks' own figures
decide (`rank/devices.py`), and what the device has lost between two groups is somebody else's for certain.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from autotune.group.gauge import FOREIGN_BYTES, CpuMeter, Meter, Peaks
from autotune.problem.gpu_memory import memory, own_memory
from autotune.problem.gpus import GpuError, GpuLost, holders, holders_text, open_nvml, telling
from autotune.problem.hardware import Hardware
from autotune.units import GIB, MIB, format_bytes

HIDDEN = "processes that NVML does not show here"
HIDDEN_FOREIGN_BYTES = GIB  # the same where pids are hidden: NCCL's and CUDA's late buffers are in that figure
_IDLE_BYTES = 64 * MIB  # what a device may keep of a group that has ended: the driver's own bookkeeping
_HOLDERS_SECONDS = 1.0  # between two lists of processes: each costs 1-10 ms a device, under a lock of the driver

# NVML's clocks event reasons (nvml.h); that a GPU is idle is none.
CLOCK_LIMITS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature (driver)",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}


@dataclass
class _Watched:
    """One GPU, in bytes."""

    uuid: str
    label: str
    handle: Any
    clock_handle: Any  # the card's, where the device is a slice
    free_at_first: int  # when the study began: what its capacity was read from
    free_before: int  # when the present group was launched
    free: int  # when it was looked at last
    held_at_first: dict[int, int]  # by pid
    held_before: dict[int, int]
    held: dict[int, int]
    unified: bool = False  # its memory is main memory, of which only what NVML shows of processes is the GPU's
    shown: bool = False  # whether NVML has shown a rank of the present group
    accepted: int = 0  # how much less than at first is free, that was waited for in vain


class NvmlMeter(Meter):
    """Gauges the GPUs of these UUIDs; the rank of a number has the GPU of that place, until it says another."""

    interval_seconds = 0.25  # one cheap call a GPU; what happens in between the ranks know themselves

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._lib = open_nvml()
        self._gpus: list[_Watched] = []
        self._gone = ""
        self._ours: set[int] = set()  # pids of ranks, and of what they have started
        self._places: dict[int, int] = {}  # of a rank's GPU, where a rank has said
        self._listed_at = 0.0
        self._closely = True  # list processes in the next sample
        try:
            self._gpus = [self._open(uuid, f"GPU {place}") for place, uuid in enumerate(gpus)] if self._lib else []
        except GpuError as error:
            self._gone = str(error)

    def _open(self, uuid: str, label: str) -> _Watched:
        lib = self._lib
        with telling(label):
            handle = lib.nvmlDeviceGetHandleByUUID(uuid)
            try:
                clock_handle = lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            except lib.NVMLError:  # a whole card
                clock_handle = handle
            free, held = memory(lib, handle)[1], holders(lib, handle)
            unified = own_memory(lib, handle) is None
            return _Watched(uuid, label, handle, clock_handle, free, free, free, held, held, held, unified)

    # -- before a group ----------------------------------------------------------------------------------------------

    def crowd(self) -> list[str]:
        """See `Meter`. What was waited for in vain is not waited for again.

        Raises:
            GpuError: a GPU does not answer.
        """
        self._refuse_if_gone()
        lines = []
        for gpu in self._gpus:
            self._refresh(gpu)
            less = gpu.free_at_first - gpu.free
            if less > gpu.accepted + FOREIGN_BYTES:
                who = holders_text(_growth(gpu.held, gpu.held_at_first)) or HIDDEN
                lines.append(f"{gpu.label} has {format_bytes(less)} less free than when the study began: {who}")
        return lines

    def begin(self) -> None:
        """What is on the devices from here on is the ranks', but for what others take.

        Raises:
            GpuError: a GPU does not answer.
        """
        self._refuse_if_gone()
        for gpu in self._gpus:
            self._refresh(gpu)
            gpu.accepted = max(0, gpu.free_at_first - gpu.free)
            gpu.free_before, gpu.held_before, gpu.shown = gpu.free, gpu.held, False
        self._ours, self._places, self._closely = set(), {}, True

    def _refuse_if_gone(self) -> None:
        if self._gone:
            raise GpuLost(self._gone)

    def _refresh(self, gpu: _Watched) -> None:
        with telling(gpu.label):
            gpu.held = holders(self._lib, gpu.handle)
            gpu.free = self._free(gpu)

    def _free(self, gpu: _Watched) -> int:
        if gpu.unified:  # whatever else takes main memory, files and the tuner itself, is not on the GPU
            return gpu.free_at_first + sum(gpu.held_at_first.values()) - sum(gpu.held.values())
        return memory(self._lib, gpu.handle)[1]

    # -- while it runs -----------------------------------------------------------------------------------------------

    def place(self, rank: int, uuid: str) -> None:
        """Takes a rank's word for which GPU it has."""
        for place, gpu in enumerate(self._gpus):
            if gpu.uuid == uuid:
                self._places[rank] = place

    def sample(self, pids: list[int], peaks: Peaks) -> None:
        listing = self._closely or time.monotonic() - self._listed_at >= _HOLDERS_SECONDS
        if listing:
            self._closely, self._listed_at = False, time.monotonic()
        self._ours |= set(pids)
        try:
            self._refuse_if_gone()
            for place, gpu in enumerate(self._gpus):
                with telling(gpu.label):
                    if listing:
                        gpu.held = holders(self._lib, gpu.handle)
                        new = gpu.held.keys() - self._ours - gpu.held_before.keys()
                        self._ours |= {pid for pid in new if _descends(pid, pids)}
                    self._sample(gpu, {i: p for i, p in enumerate(pids) if self._places.get(i, i) == place}, peaks)
        except GpuLost as error:
            peaks.lost = peaks.lost or str(error)

    def busy(self) -> bool:
        for gpu in self._gpus:
            with suppress(self._lib.NVMLError):  # of a slice nobody is told
                if self._lib.nvmlDeviceGetUtilizationRates(gpu.clock_handle).gpu > 0:
                    return True
        return False

    def look_closely(self) -> None:
        self._closely = True  # until a sample begins: one that has begun may not see what is to be seen

    def _sample(self, gpu: _Watched, ranks: dict[int, int], peaks: Peaks) -> None:
        """Of one GPU and the pids of its ranks."""
        gpu.free = self._free(gpu)
        grown = max(0, gpu.free_before - gpu.free)
        for rank, pid in ranks.items():
            # One that was there before is another's: a container numbers its processes anew, NVML shows the host's numbers.
            own = gpu.held.get(pid, 0) if pid not in gpu.held_before else 0
            gpu.shown = gpu.shown or own > 0  # and stays so when the rank is gone
            peaks.used[rank] = max(peaks.used[rank], own)
            peaks.grown[rank] = max(peaks.grown.get(rank, 0), grown)
        others = {pid: held for pid, held in gpu.held.items() if pid not in self._ours} if gpu.shown else {}
        foreign = gpu.accepted + sum(_growth(others, gpu.held_before).values())
        if foreign > peaks.foreign:
            who = _growth(others if gpu.shown else gpu.held_before, gpu.held_at_first)
            peaks.foreign = foreign
            peaks.neighbours = f"{holders_text(who) or HIDDEN} on {gpu.label}"
        self._sample_clock(gpu, peaks)

    def _sample_clock(self, gpu: _Watched, peaks: Peaks) -> None:
        lib = self._lib
        with suppress(lib.NVMLError_NotSupported, lib.NVMLError_FunctionNotFound, lib.NVMLError_NoPermission):
            mhz = int(lib.nvmlDeviceGetClockInfo(gpu.clock_handle, lib.NVML_CLOCK_SM))
            peaks.clocks.setdefault(gpu.label, []).append(mhz)
            try:
                peaks.clock_reasons |= int(lib.nvmlDeviceGetCurrentClocksEventReasons(gpu.clock_handle))
            except lib.NVMLError_FunctionNotFound:  # before R535, under its old name
                peaks.clock_reasons |= int(lib.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.clock_handle))

    # -- after it ----------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """See `Meter`. A device that does not answer has nothing to give back."""
        lines = []
        for gpu in self._gpus:
            try:
                self._refresh(gpu)
            except GpuError:
                continue
            grown = _growth(gpu.held, gpu.held_before)
            ours = {pid: held for pid, held in grown.items() if pid in self._ours}
            missing = gpu.free_before - gpu.free - sum(held for pid, held in grown.items() if pid not in ours)
            if missing >= _IDLE_BYTES:
                who = f"ended ranks still hold it: {holders_text(ours)}" if ours else HIDDEN
                lines.append(
                    f"{gpu.label} has {format_bytes(missing)} less free than before its ranks were launched: {who}"
                )
        return lines


def clock_mhz(peaks: Peaks) -> int | None:
    """The median clock of the slowest GPU, since the peaks began; None where NVML does not tell."""
    return min((int(statistics.median(clocks)) for clocks in peaks.clocks.values()), default=None)


def clock_limits(peaks: Peaks) -> list[str]:
    """What has kept a GPU below its clock, since the peaks began."""
    return [name for bit, name in CLOCK_LIMITS.items() if peaks.clock_reasons & bit]


def make_meter(hardware: Hardware) -> Meter:
    return NvmlMeter(hardware.gpus) if hardware.device == "cuda" else CpuMeter()


def blame_hidden(peaks: Peaks, numbers: dict[str, int], outside_before: int | None) -> None:
    """Adds by how much a rank's device has filled outside the rank's allocator. That counts where NVML hides processes;
    elsewhere it knows whose it is.

    Args:
        numbers: bytes that came with the rank's error.
        outside_before: bytes outside its allocator, once its group was up; None where it has not told.
    """
    if outside_before is None or not {"total_bytes", "free_bytes", "reserved_bytes"} <= numbers.keys():
        return
    grown = numbers["total_bytes"] - numbers["free_bytes"] - numbers["reserved_bytes"] - outside_before
    if not any(peaks.used) and grown > max(HIDDEN_FOREIGN_BYTES, peaks.foreign):
        peaks.foreign, peaks.neighbours = grown, HIDDEN


def _growth(now: dict[int, int], before: dict[int, int]) -> dict[int, int]:
    """Bytes by pid that were not there before."""
    more = {pid: held - before.get(pid, 0) for pid, held in now.items()}
    return {pid: grown for pid, grown in more.items() if grown > 0}


def _descends(pid: int, ancestors: list[int]) -> bool:
    """Whether a process was started by one of these, or by what they have started."""
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False
