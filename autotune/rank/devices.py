"""The two devices that a rank may run on, behind one interface. Imports torch: only ranks and traces import this."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from autotune.problem.gpus import bytes_of, free_by_uuid, visible_gpus
from autotune.rank import cuda
from autotune.units import GIB

# A context and NCCL's buffers on one to four GPUs, where NVML does not tell (CUDA 11 to 13: context 0.3-0.6 GiB, NCCL
# 0.1-0.4); and more than they have ever been seen to take, where others on the device may be in the figure.
OVERHEAD_BYTES, MOST_OVERHEAD_BYTES = int(0.8 * GIB), 4 * GIB
_PAGE = resource.getpagesize()


class Device(Protocol):
    """What a rank needs of its device; sizes in bytes."""

    name: str
    backend: str

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        """Takes this rank's device, with its memory capped at `cap_bytes` and so many CPU threads."""

    def joined(self) -> dict[str, Any]:
        """The process group is up, and its first collective done: from here on the cap holds. Tells which device it is, by
        `uuid`, and in bytes this process's `overhead` and all that lies `outside` its allocator, whoever holds it."""

    def engine_built(self) -> None:
        """Sets overhead and cap again. DeepSpeed has made process groups of its own, whose communicators have their buffers
        only now."""

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
    """A GPU. What this process has of it is what torch's allocator reserves, which torch knows exactly, and the overhead
    beside it: CUDA's context, NCCL's buffers, the kernels' code. The cap holds for both, and so does the peak."""

    name, backend = "cuda", "nccl"

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        if cuda.in_bad_fork():
            raise RuntimeError("autotune: CUDA was woken before the fork")
        torch.set_num_threads(threads)
        count = cuda.device_count()
        if local_rank >= count:
            raise RuntimeError(f"autotune: there is no GPU for rank {local_rank}: CUDA shows {count}")
        self.index, self._cap = local_rank, cap_bytes
        free = free_by_uuid()
        cuda.take(local_rank)
        self.uuid = _nvml_uuid(free)
        self._free_before = free.get(self.uuid)
        self._overhead = OVERHEAD_BYTES
        self._retries = cuda.retries()

    def joined(self) -> dict[str, Any]:
        self._overhead = self._current_overhead()
        free, total = cuda.free_and_total()
        self._limit_allocator(total)
        outside = total - free - cuda.reserved()
        return {"uuid": self.uuid, "overhead_bytes": self._overhead, "outside_bytes": outside}

    def engine_built(self) -> None:
        self._overhead = max(self._overhead, self._current_overhead())
        self._limit_allocator(cuda.free_and_total()[1])

    def _limit_allocator(self, total_bytes: int) -> None:
        """Leave the allocator what the cap leaves beside the overhead."""
        if self._cap is not None:
            cuda.limit(min(1.0, max(1, self._cap - self._overhead) / total_bytes))

    def _current_overhead(self) -> int:
        shown = self._shown_overhead()
        return self._grown_overhead() if shown is None else shown

    def _shown_overhead(self) -> int | None:
        """This process's bytes outside the allocator; None where NVML does not show the process."""
        own = bytes_of(os.getpid(), self.uuid)
        return max(0, own - cuda.reserved()) if own is not None else None

    def _grown_overhead(self) -> int:
        """The same by how much the device's free memory has shrunk since before this process woke it: others may have
        taken some meanwhile. The prior where there is no NVML."""
        free = free_by_uuid().get(self.uuid)
        if free is None or self._free_before is None:
            return self._overhead
        return max(0, min(self._free_before - free - cuda.reserved(), MOST_OVERHEAD_BYTES))

    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def synchronize(self) -> None:
        cuda.synchronize()

    def note(self) -> None:
        pass

    def reset_peaks(self) -> None:
        cuda.forget_peaks()
        self._retries = cuda.retries()
        _reset_high_water()

    def peaks(self) -> dict[str, Any]:
        self._overhead = max(self._overhead, self._shown_overhead() or 0)  # NCCL and CUDA load more at first use
        return {
            "allocated_bytes": cuda.most_allocated(),
            "reserved_bytes": cuda.most_reserved(),
            "overhead_bytes": self._overhead,
            "retries": cuda.retries() - self._retries,
            "host_bytes": _status()["VmHWM"],
            "pinned_bytes": cuda.pinned(),
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

    def joined(self) -> dict[str, Any]:
        return {}

    def engine_built(self) -> None:
        pass

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
        highest sample, or the resident high-water mark plus what is mapped and untouched now, if that is more: both were
        not at one time, but what the cap did not let it have it never had."""
        self.note()
        status = _status()
        untouched = max(0, status["VmData"] - status["RssAnon"])
        touched = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
        cap_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
        most = touched + untouched
        if cap_bytes != resource.RLIM_INFINITY:
            most = min(most, cap_bytes)
        return {"data_bytes": max(self._peak, most), "host_bytes": status["VmHWM"], "retries": 0, "pinned_bytes": 0}

    def lift_cap(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def make_device(name: str) -> Device:
    return CudaDevice() if name == "cuda" else CpuDevice()


def _nvml_uuid(known: Iterable[str]) -> str:
    """NVML's UUID of this process's device, which torch names without the `GPU-` or `MIG-`; an empty string where NVML knows
    none. A process that has a MIG slice has no other device, whatever name it goes by."""
    said = cuda.uuid()
    named = next((uuid for uuid in known if uuid.endswith(said)), "")
    return named or next((gpu.uuid for gpu in visible_gpus() if gpu.is_slice), "")


def used_bytes() -> int:
    """What this process has taken of its device at most, in a training that `setup` has not begun. Where NVML does not show
    the process, all that is in use outside the allocator counts as its own."""
    if not cuda.available():
        return data_bytes("self")
    free, total = cuda.free_and_total()
    own = bytes_of(os.getpid(), _nvml_uuid(free_by_uuid()))
    return cuda.most_reserved() + max(0, (total - free if own is None else own) - cuda.reserved())


def data_bytes(pid: int | str) -> int:
    """What RLIMIT_DATA counts of a process, from /proc/PID/statm."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[5]) * _PAGE


def _status() -> dict[str, int]:
    values = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(":")
        if key.startswith(("Vm", "Rss")):
            values[key] = int(rest.split()[0]) * 1024
    return values


def _reset_high_water() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
