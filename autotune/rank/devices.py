"""The two devices that a rank may run on, behind one interface. Imports torch: only ranks and traces import this."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

_PAGE = resource.getpagesize()


class Device(Protocol):
    """What a rank needs of its device; sizes in bytes."""

    name: str
    backend: str

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        """Takes this rank's device, with its memory capped at `cap_bytes` and so many CPU threads."""

    def torch_device(self) -> torch.device: ...
    def synchronize(self) -> None:
        """Waits until all that was asked of the device is done."""

    def note(self) -> None:
        """Samples memory now, for `peaks`; the parent's gauge samples on its own."""

    def reset_peaks(self) -> None: ...
    def peaks(self) -> dict[str, Any]:
        """Highest bytes since `reset_peaks`, by name, and `retries`, how often the allocator had to free its cache."""

    def lift_cap(self) -> None:
        """Gives a rank that ran out of memory enough room to report it."""


class CudaDevice:
    """A GPU. The cap is torch's per-process memory fraction, less what the CUDA context takes outside the allocator."""

    name, backend = "cuda", "nccl"

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError("autotune: CUDA was woken before the fork")
        torch.set_num_threads(threads)
        self.index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(self.index)
        torch.zeros(1, device="cuda")  # wakes the context, so that its size is known
        if cap_bytes is not None:
            free, total = torch.cuda.mem_get_info(self.index)
            context = max(0, min(total - free - torch.cuda.memory_reserved(self.index), 2 * 2**30))
            share = max(1, cap_bytes - context) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.index)

    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def note(self) -> None:
        pass

    def reset_peaks(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a smaller rung's cached blocks would count as this rung's
        torch.cuda.reset_peak_memory_stats()
        self._retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        _reset_high_water()

    def peaks(self) -> dict[str, Any]:
        stats = torch.cuda.memory_stats()
        pinned = None
        with suppress(Exception):
            pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "retries": stats.get("num_alloc_retries", 0) - self._retries,
            "host_bytes": _status()["VmHWM"],
            "pinned_bytes": pinned,
        }

    def lift_cap(self) -> None:
        pass


class CpuDevice:
    """A CPU rank. RLIMIT_DATA caps its private writable memory, and the peak is of the same quantity.

    It allocates as the user's own process does. What malloc keeps of freed blocks is therefore in the peak, as it is in
    training's: a fresh process repeats within 2 %, and a batch that is measured after smaller ones in one engine shows up
    to 5 % more than alone (28M Gemma, bf16; docs/architecture.md).
    """

    name, backend = "cpu", "gloo"

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        torch.set_num_threads(threads)
        self._peak = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # kept open: looked at several times a micro-step
        if cap_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard))

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def note(self) -> None:
        pages = int(os.pread(self._statm, 256, 0).split()[5])  # as `data_bytes` reads it
        self._peak = max(self._peak, pages * _PAGE)

    def reset_peaks(self) -> None:
        self._peak = 0
        _reset_high_water()

    def peaks(self) -> dict[str, Any]:
        """The kernel keeps no high-water mark of what RLIMIT_DATA counts, only of resident pages. The peak is therefore the
        highest sample, or the resident high-water mark plus what is mapped and untouched now, if that is more."""
        self.note()
        status = _status()
        untouched = max(0, status["VmData"] - status["RssAnon"])
        touched = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
        return {
            "data_bytes": max(self._peak, touched + untouched),
            "host_bytes": status["VmHWM"],
            "retries": 0,
            "pinned_bytes": 0,
        }

    def lift_cap(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def make_device(name: str) -> Device:
    return CudaDevice() if name == "cuda" else CpuDevice()


def data_bytes(pid: int | str) -> int:
    """What RLIMIT_DATA counts of a process, from /proc/PID/statm."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[5]) * _PAGE


def _status() -> dict[str, int]:
    values = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key.startswith(("Vm", "Rss")):
            values[key] = int(rest.split()[0]) * 1024
    return values


def _reset_high_water() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
