"""NVML sampling of a group's GPUs: memory by owner, and failures.

Growth of a device since before the launch belongs to the ranks, except for the growth of other processes. If NVML shows
the ranks' processes, the owners are known. In a container that hides them, the ranks' own figures decide
(`rank/devices.py`). Memory that a device lost between two groups always belongs to other processes.

A peak reaches the database in these steps:

1. The thread of `MemoryMonitor` (`workers/memory_monitor.py`) calls `NvmlMeter.sample`. The sample increases
   `MemoryPeaks.used`, by process, and `MemoryPeaks.grown`, by GPU. On another node the agent does both.
2. Each measurement first calls `WorkerGroup.reset_peaks` (`LocalSession._ask_measure`, `executors/local.py`). The peak of the
   engine's start is therefore not stored, unless the start fails or loads a checkpoint to resume from.
3. `WorkerGroup.peaks` (`workers/group.py`) merges the peaks of all nodes. `LocalWorkers.peaks` (`workers/host_workers.py`)
   takes one more sample by `MemoryMonitor.look`. `RemoteWorkers.peaks` (`executors/cluster/rpc.py`) asks the agent of
   another node for its peaks.
4. `measurement_of` (`executors/local.py`) copies `MemoryPeaks.worst` to `Measurement.nvml_peak_bytes`: `MemoryPeaks.used`,
   or if NVML hides the ranks, `MemoryPeaks.grown`. Decisions use `Measurement.peak_bytes`, the maximum of
   `MemoryPeaks.used` and the ranks' own figures. If NVML hides the ranks, `nvml_peak_bytes` may therefore exceed it.
   `LocalSession._measured` raises only `peak_bytes`, to the ranks' own peaks while a checkpoint was loaded and while the
   engine was certified. NVML's peak includes the certification, but not the loading. `SliceExtrapolator.complete` adds
   NCCL's memory, also only to `peak_bytes`.
5. A failed trial has no Measurement. `WorkerGroup.evidence` takes its peaks, and `_peak_of` (`executors/local.py`) sets
   `Outcome.peak_bytes`.
6. `TrialRecorder.end` (`search/tuner.py`) passes the Outcome to `StudyStore.finish` (`search/study.py`). `store_outcome`
   (`search/trials.py`) stores its JSON as the user attribute `outcome` of the Optuna trial. The attribute `peak_gib` is a
   copy of `peak_bytes` for the dashboard.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from autotune.problem.hardware import Hardware
from autotune.problem.nvml import GpuError, GpuLost, holders, holders_text, memory, nvml_errors, open_nvml, own_memory
from autotune.util.units import GIB, MIB, format_bytes
from autotune.workers.memory_monitor import CpuMeter, Meter
from autotune.workers.memory_peaks import FOREIGN_BYTES, MemoryPeaks

HIDDEN = "processes that NVML does not show here"
HIDDEN_FOREIGN_BYTES = GIB  # threshold if pids are hidden, because the figure includes late buffers of NCCL and CUDA
_IDLE_BYTES = 64 * MIB  # a device may keep this much for the driver's bookkeeping after a group
_HOLDERS_SECONDS = 1.0  # interval of process lists, each of which costs 1-10 ms per device under a driver lock


@dataclass
class _GpuState:
    """State of one GPU, in bytes."""

    uuid: str
    label: str
    handle: Any
    card: Any  # handle of the card if the device is a MIG slice
    free_at_first: int  # when the study began, like the capacity
    free_before: int  # when the current group was launched
    free: int  # at the last sample
    held_at_first: dict[int, int]  # by pid
    held_before: dict[int, int]
    held: dict[int, int]
    unified: bool = False  # True if its memory is main memory: only processes that NVML shows count
    shown: bool = False  # True if NVML has shown a rank of the current group
    accepted: int = 0  # bytes lost since the study began for which a wait was in vain


class NvmlMeter(Meter):
    """Monitor the GPUs of these UUIDs. Rank N has the Nth GPU until it reports another."""

    interval_seconds = 0.25  # one cheap call per GPU; ranks record peaks between samples

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._lib = open_nvml()
        self._gpus: list[_GpuState] = []
        self._gone = ""
        self._ours: set[int] = set()  # pids of ranks and their descendants
        self._places: dict[int, int] = {}  # rank -> index of its GPU, if reported
        self._listed_at = 0.0
        self._closely = True  # list processes in the next sample
        try:
            self._gpus = [self._open(uuid, f"GPU {place}") for place, uuid in enumerate(gpus)] if self._lib else []
        except GpuError as error:
            self._gone = str(error)

    def _open(self, uuid: str, label: str) -> _GpuState:
        lib = self._lib
        with nvml_errors(label):
            handle = lib.nvmlDeviceGetHandleByUUID(uuid)
            try:
                card = lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            except lib.NVMLError:  # a whole card
                card = handle
            free, held = memory(lib, handle)[1], holders(lib, handle)
            unified = own_memory(lib, handle) is None
            return _GpuState(uuid, label, handle, card, free, free, free, held, held, held, unified)

    # -- before a group ----------------------------------------------------------------------------------------------

    def external_usage_warnings(self) -> list[str]:
        """Return warnings, see `Meter`. Memory that was awaited in vain is not reported again.

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
        """Attribute all later growth on the devices to the ranks, except that of other processes.

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

    def _refresh(self, gpu: _GpuState) -> None:
        with nvml_errors(gpu.label):
            gpu.held = holders(self._lib, gpu.handle)
            gpu.free = self._free(gpu)

    def _free(self, gpu: _GpuState) -> int:
        if gpu.unified:  # other users of main memory, files and the tuner included, are not on the GPU
            return gpu.free_at_first + sum(gpu.held_at_first.values()) - sum(gpu.held.values())
        return memory(self._lib, gpu.handle)[1]

    # -- while a group runs ------------------------------------------------------------------------------------------

    def register_device(self, rank: int, uuid: str) -> None:
        """Record the GPU that a rank reports."""
        for place, gpu in enumerate(self._gpus):
            if gpu.uuid == uuid:
                self._places[rank] = place

    def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
        """Update the peaks with the memory of the ranks' GPUs."""
        listing = self._closely or time.monotonic() - self._listed_at >= _HOLDERS_SECONDS
        if listing:
            self._closely, self._listed_at = False, time.monotonic()
        self._ours |= set(pids)
        try:
            self._refuse_if_gone()
            for place, gpu in enumerate(self._gpus):
                with nvml_errors(gpu.label):
                    if listing:
                        gpu.held = holders(self._lib, gpu.handle)
                        new = gpu.held.keys() - self._ours - gpu.held_before.keys()
                        self._ours |= {pid for pid in new if _descends(pid, pids)}
                    self._sample(gpu, {i: p for i, p in enumerate(pids) if self._places.get(i, i) == place}, peaks)
        except GpuLost as error:
            peaks.lost = peaks.lost or str(error)

    def busy(self) -> bool:
        """Return True if a GPU reads or writes its memory. Kernels that compute do; NCCL's that wait do not."""
        for gpu in self._gpus:
            with suppress(self._lib.NVMLError):  # not available for a MIG slice
                if self._lib.nvmlDeviceGetUtilizationRates(gpu.card).memory > 0:
                    return True
        return False

    def sample_faster(self) -> None:
        """List the GPU's processes in the next sample."""
        self._closely = True  # until the next sample begins, because a running one may miss the event

    def _sample(self, gpu: _GpuState, ranks: dict[int, int], peaks: MemoryPeaks) -> None:
        """Sample one GPU for the pids of its ranks."""
        gpu.free = self._free(gpu)
        grown = max(0, gpu.free_before - gpu.free)
        for rank, pid in ranks.items():
            # A pid from before the launch is another process: containers renumber processes, and NVML shows the host's
            # pids.
            own = gpu.held.get(pid, 0) if pid not in gpu.held_before else 0
            gpu.shown = gpu.shown or own > 0  # stays True after the rank has ended
            peaks.used[rank] = max(peaks.used[rank], own)
            peaks.grown[rank] = max(peaks.grown.get(rank, 0), grown)
        others = {pid: held for pid, held in gpu.held.items() if pid not in self._ours} if gpu.shown else {}
        foreign = gpu.accepted + sum(_growth(others, gpu.held_before).values())
        if foreign > peaks.foreign:
            who = _growth(others if gpu.shown else gpu.held_before, gpu.held_at_first)
            peaks.foreign = foreign
            peaks.neighbours = f"{holders_text(who) or HIDDEN} on {gpu.label}"

    # -- after a group -----------------------------------------------------------------------------------------------

    def unreleased_memory_warnings(self) -> list[str]:
        """Return warnings, see `Meter`. A device that does not answer is skipped."""
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


def make_meter(hardware: Hardware) -> Meter:
    """Return the memory meter of the hardware."""
    return NvmlMeter(hardware.gpus) if hardware.device == "cuda" else CpuMeter()


def attribute_hidden_usage(peaks: MemoryPeaks, numbers: dict[str, int], outside_before: int | None) -> None:
    """Attribute growth outside the rank's allocator to hidden processes, if NVML hides processes.

    Elsewhere NVML knows the owner.

    Args:
        numbers: bytes that came with the rank's error.
        outside_before: bytes outside the rank's allocator once its group was up; None if not reported.
    """
    if outside_before is None or not {"total_bytes", "free_bytes", "reserved_bytes"} <= numbers.keys():
        return
    grown = numbers["total_bytes"] - numbers["free_bytes"] - numbers["reserved_bytes"] - outside_before
    if not any(peaks.used) and grown > max(HIDDEN_FOREIGN_BYTES, peaks.foreign):
        peaks.foreign, peaks.neighbours = grown, HIDDEN


def _growth(now: dict[int, int], before: dict[int, int]) -> dict[int, int]:
    """Return growth in bytes by pid, for pids that grew."""
    more = {pid: held - before.get(pid, 0) for pid, held in now.items()}
    return {pid: grown for pid, grown in more.items() if grown > 0}


def _descends(pid: int, ancestors: list[int]) -> bool:
    """Return True if a process descends from one of these."""
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False
