"""The two devices of a rank, CUDA and CPU, behind one interface. Only ranks and traces import this, as it imports torch."""

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

# Prior for a context and NCCL's buffers on one to four GPUs if NVML reports nothing. CUDA 11 to 13 take 0.3-0.6 GiB for
# the context, and NCCL takes 0.1-0.4 GiB. The second value exceeds all observed overheads. It bounds figures that may
# include other processes.
OVERHEAD_BYTES, MOST_OVERHEAD_BYTES = int(0.8 * GIB), 4 * GIB
_PAGE = resource.getpagesize()


class Device(Protocol):
    """Interface between a rank and its device. Sizes are in bytes."""

    name: str
    backend: str

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        """Take this rank's device, cap its memory at `cap_bytes` and set the number of CPU threads."""

    def joined(self) -> dict[str, Any]:
        """Apply the cap, once the process group is up and its first collective is done.

        Returns:
            The device's `uuid`, and in bytes this process's `overhead_bytes` and all `outside_bytes`, which any process
            holds outside this allocator. Empty on a CPU.
        """

    def engine_built(self) -> None:
        """Update overhead and cap after DeepSpeed created its process groups, whose communicators allocate late."""

    def torch_device(self) -> torch.device: ...
    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def note(self) -> None:
        """Sample memory for `peaks`. The parent's memory monitor samples independently."""

    def reset_peaks(self) -> None: ...
    def peaks(self) -> dict[str, Any]:
        """Return peak bytes since `reset_peaks` by name, and `retries`: how often the allocator freed its cache."""

    def lift_cap(self) -> None:
        """Give a rank after an OOM enough memory to report it."""


class CudaDevice:
    """A GPU. Cap and peak cover the allocator's reserved bytes and the overhead.

    torch knows the reserved bytes exactly. The overhead is CUDA's context, NCCL's buffers and the kernels' code.
    """

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
        """Limit the allocator to the cap minus the overhead."""
        if self._cap is not None:
            cuda.limit(min(1.0, max(1, self._cap - self._overhead) / total_bytes))

    def _current_overhead(self) -> int:
        shown = self._shown_overhead()
        return self._grown_overhead() if shown is None else shown

    def _shown_overhead(self) -> int | None:
        """Return this process's bytes outside the allocator, or None if NVML does not list the process."""
        own = bytes_of(os.getpid(), self.uuid)
        return max(0, own - cuda.reserved()) if own is not None else None

    def _grown_overhead(self) -> int:
        """Return the overhead as the drop in the device's free memory since before this process initialized it.

        The figure may include allocations of other processes. Without NVML, return the previous value.
        """
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
    """A CPU rank. RLIMIT_DATA caps its private writable memory, and the peak measures the same quantity.

    Allocation works as in the user's own process. The peak therefore includes freed blocks that malloc keeps, as
    training does. A fresh process repeats within 2 %. A batch measured after smaller ones in one engine shows up to 5 %
    more than alone (28M Gemma, bf16; docs/architecture.md).
    """

    name, backend = "cpu", "gloo"

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        torch.set_num_threads(threads)
        self._peak = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # kept open: read several times per micro-step
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
        pages = int(os.pread(self._statm, 256, 0).split()[5])  # the same field as in `data_bytes`
        self._peak = max(self._peak, pages * _PAGE)

    def reset_peaks(self) -> None:
        self._peak = 0
        _reset_high_water()

    def peaks(self) -> dict[str, Any]:
        """Return the peaks since `reset_peaks`.

        The kernel keeps a high-water mark of resident pages, but not of the quantity that RLIMIT_DATA limits. The peak
        is therefore the highest sample, or the resident high-water mark plus currently untouched mappings if that is
        more. Both parts of that sum need not have been simultaneous, so the cap bounds it.
        """
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
    """Return NVML's UUID of this process's device, or an empty string if NVML knows none.

    torch omits the prefix `GPU-` or `MIG-`. A process with a MIG slice has no other device, so the slice is returned
    under any name.
    """
    said = cuda.uuid()
    named = next((uuid for uuid in known if uuid.endswith(said)), "")
    return named or next((gpu.uuid for gpu in visible_gpus() if gpu.is_slice), "")


def used_bytes() -> int:
    """Return the peak device bytes of this process in a training that did not start with `setup`.

    If NVML does not list the process, all used memory outside the allocator counts as its own.
    """
    if not cuda.available():
        return data_bytes("self")
    free, total = cuda.free_and_total()
    own = bytes_of(os.getpid(), _nvml_uuid(free_by_uuid()))
    return cuda.most_reserved() + max(0, (total - free if own is None else own) - cuda.reserved())


def data_bytes(pid: int | str) -> int:
    """Return the bytes of a process that RLIMIT_DATA counts, from /proc/PID/statm."""
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
