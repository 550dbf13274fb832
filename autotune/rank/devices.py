"""CUDA and CPU devices: memory caps, peaks, and bytes of live tensors. Only ranks and traces import this module and torch."""

from __future__ import annotations

import functools
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune.problem.nvml import bytes_of, free_by_uuid, visible_gpus
from autotune.util.linux import data_bytes
from autotune.util.units import GIB

# Prior for a context and NCCL's buffers on one to four GPUs if NVML reports nothing. CUDA 11 to 13 take 0.3-0.6 GiB for
# the context, and NCCL takes 0.1-0.4 GiB. The second value exceeds all observed overheads. It bounds figures that may
# include other processes.
OVERHEAD_BYTES, MOST_OVERHEAD_BYTES = int(0.8 * GIB), 4 * GIB
_PAGE = resource.getpagesize()


class Device:
    """Interface between a rank and its device. Sizes are in bytes. A method that a device does not override does nothing."""

    backend: str

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        """Take this rank's device, cap its memory at `cap_bytes` and set the number of CPU threads."""
        raise NotImplementedError

    def joined(self) -> dict[str, Any]:
        """Apply the cap. This is repeated once the process group is up and its first collective is done.

        Returns:
            The device's `uuid`, and in bytes this process's `overhead_bytes` and all `outside_bytes`, which any process
            holds outside this allocator. Empty on a CPU.
        """
        return {}

    def engine_built(self) -> None:
        """Update overhead and cap after DeepSpeed created its process groups, whose communicators allocate late."""

    def torch_device(self) -> torch.device:
        """Return the device for torch."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def note(self) -> None:
        """Sample memory for `peaks`. The parent's memory monitor samples independently."""

    def reset_peaks(self) -> None:
        """Reset all recorded peaks."""
        raise NotImplementedError

    def peaks(self) -> dict[str, Any]:
        """Return peak bytes since `reset_peaks` by name, and `retries`: how often the allocator freed its cache."""
        raise NotImplementedError

    def lift_cap(self) -> None:
        """Give a rank after an OOM enough memory to report it."""


class CudaDevice(Device):
    """A GPU. Cap and peak cover the allocator's reserved bytes and the overhead.

    torch knows the reserved bytes exactly, and records their peak itself. The overhead is CUDA's context, NCCL's buffers
    and the kernels' code.

    Args:
        pid: of this process for NVML, which knows no PID namespace of a trial.
    """

    backend = "nccl"

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        """Take the GPU of the rank and record its UUID and its free memory.

        Raises:
            RuntimeError: CUDA was initialized before the fork, or the rank has no GPU.
        """
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError("autotune: CUDA was woken before the fork")
        torch.set_num_threads(threads)
        count = device_count()
        if local_rank >= count:
            raise RuntimeError(f"autotune: there is no GPU for rank {local_rank}: CUDA shows {count}")
        self.index, self._cap = local_rank, cap_bytes
        free = free_by_uuid()
        take(local_rank)
        self.uuid = _nvml_uuid(free)
        self._free_before = free.get(self.uuid)
        self._overhead = OVERHEAD_BYTES
        self._retries = _retries()

    def joined(self) -> dict[str, Any]:
        """Limit the allocator; return the UUID, and bytes of CUDA context and other processes."""
        self._overhead = self._current_overhead()
        free, total = torch.cuda.mem_get_info()
        self._limit_allocator(total)
        outside = total - free - torch.cuda.memory_reserved()
        return {"uuid": self.uuid, "overhead_bytes": self._overhead, "outside_bytes": outside}

    def engine_built(self) -> None:
        """Limit the allocator again, since building the engine may grow the context."""
        self._overhead = max(self._overhead, self._current_overhead())
        self._limit_allocator(torch.cuda.mem_get_info()[1])

    def _limit_allocator(self, total_bytes: int) -> None:
        """Limit the allocator to the cap minus the overhead."""
        if self._cap is not None:
            share = min(1.0, max(1, self._cap - self._overhead) / total_bytes)
            torch.cuda.set_per_process_memory_fraction(share)

    def _current_overhead(self) -> int:
        """Return this process's bytes outside the allocator.

        If NVML does not list the process, return the drop in the device's free memory since before this process
        initialized it, which may include allocations of other processes. Without NVML, return the previous value.
        """
        if (shown := self._shown_overhead()) is not None:
            return shown
        free = free_by_uuid().get(self.uuid)
        if free is None or self._free_before is None:
            return self._overhead
        return max(0, min(self._free_before - free - torch.cuda.memory_reserved(), MOST_OVERHEAD_BYTES))

    def _shown_overhead(self) -> int | None:
        """Return this process's bytes outside the allocator, or None if NVML does not list the process."""
        own = bytes_of(self._pid, self.uuid)
        return max(0, own - torch.cuda.memory_reserved()) if own is not None else None

    def torch_device(self) -> torch.device:
        """Return the rank's CUDA device."""
        return torch.device("cuda", self.index)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        synchronize()

    def reset_peaks(self) -> None:
        """Reset torch's peaks, the counter of allocator retries, and the host's high-water mark.

        The allocator's cache is emptied, because its blocks would count towards the next batch size.
        """
        synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._retries = _retries()
        _reset_high_water()

    def peaks(self) -> dict[str, Any]:
        """Return the peaks since the last reset in bytes, and the number of allocator retries."""
        self._overhead = max(self._overhead, self._shown_overhead() or 0)  # NCCL and CUDA load more at first use
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "overhead_bytes": self._overhead,
            "retries": _retries() - self._retries,
            "host_bytes": _status()["VmHWM"],
            "pinned_bytes": _pinned(),
        }


class CpuDevice(Device):
    """A CPU rank. RLIMIT_DATA caps its private writable memory, and the peak measures the same quantity.

    Allocation works as in the user's own process. The peak therefore includes freed blocks that malloc keeps, as
    training does. A fresh process repeats within 2 %. A batch measured after smaller ones in one engine shows up to 5 %
    more than alone (28M Gemma, bf16; docs/architecture.md).
    """

    backend = "gloo"

    def setup(self, local_rank: int, cap_bytes: int | None, threads: int) -> None:
        """Open the process's memory counter and limit its data segment to the cap in bytes."""
        torch.set_num_threads(threads)
        self._peak = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # kept open: read several times per micro-step
        if cap_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard))

    def torch_device(self) -> torch.device:
        """Return the CPU device."""
        return torch.device("cpu")

    def note(self) -> None:
        """Record the current memory if it is a new peak."""
        pages = int(os.pread(self._statm, 256, 0).split()[5])  # the same field as in `data_bytes`
        self._peak = max(self._peak, pages * _PAGE)

    def reset_peaks(self) -> None:
        """Reset the peak and the host's high-water mark."""
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
        """Raise the limit of the data segment to the hard limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def make_device(name: str, pid: int) -> Device:
    """Return the device of a name: cuda, else cpu. The tuner knows this process by `pid`."""
    return CudaDevice(pid) if name == "cuda" else CpuDevice()


def _nvml_uuid(known: Iterable[str]) -> str:
    """Return NVML's UUID of this process's device, or an empty string if NVML knows none.

    torch omits the prefix `GPU-` or `MIG-`. A process with a MIG slice has no other device, so the slice is returned
    under any name.
    """
    said = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    named = next((uuid for uuid in known if uuid.endswith(said)), "")
    return named or next((gpu.uuid for gpu in visible_gpus() if gpu.is_slice), "")


def used_bytes() -> int:
    """Return the peak device bytes of this process in a training that did not start with `setup`.

    If NVML does not list the process, all used memory outside the allocator counts as its own.
    """
    if not available():
        return data_bytes("self")
    free, total = torch.cuda.mem_get_info()
    own = bytes_of(os.getpid(), _nvml_uuid(free_by_uuid()))
    held = total - free if own is None else own
    return torch.cuda.max_memory_reserved() + max(0, held - torch.cuda.memory_reserved())


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


# -- cuda --------------------------------------------------------------------------------------------------------------
#
# Other calls to torch.cuda in ranks, all of which are in this module. They refer to the device that `take` selects.


def available() -> bool:
    """Return True if torch can use CUDA."""
    return bool(torch.cuda.is_available())


def generator_state() -> bytes | None:
    """Return the state of this rank's CUDA generator; None if CUDA is not initialized, which is not done here."""
    if not in_use():
        return None
    return bytes(torch.cuda.get_rng_state().numpy().tobytes())


def seeding_modules() -> tuple[Any, ...]:
    """Return the modules with functions that seed all devices."""
    return torch, torch.random, torch.cuda


def in_use() -> bool:
    """Return True if this process has initialized CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_count() -> int:
    """Return the number of visible GPUs."""
    return torch.cuda.device_count()


def take(index: int) -> None:
    """Select device `index` and create its context."""
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")


def synchronize() -> None:
    """Wait until the GPU of this process has finished all queued work, if it uses one."""
    if in_use():
        torch.cuda.synchronize()


def _retries() -> int:
    """Return how often the allocator had to free its cache to satisfy a request."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _pinned() -> int | None:
    """Return the peak of pinned host memory, or None if torch does not report it."""
    with suppress(Exception):  # older versions have no such statistics
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    return None


# -- live tensors ------------------------------------------------------------------------------------------------------
#
# Count the bytes of live tensors, real or fake: the requests to an allocator without its overhead.


class LiveTensors(TorchDispatchMode):
    """Count every storage that an operator returns, from allocation to release, while the mode is active.

    Attributes:
        bytes: bytes live now.
        watch: called with the live bytes after every change; None calls nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watch: Callable[[int], None] | None = None
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        # Storages released by a communication thread. Two threads that use `+=` on the count would lose an update.
        self._elsewhere: deque[int] = deque()
        self._thread = threading.get_ident()  # thread of the last operator; with CUDA, autograd has its own threads
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._thread = threading.get_ident()
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that no operator under this mode created. A storage is counted once."""
        if tensor.device.type == "meta":  # DeepSpeed keeps the shapes of its parameters as such tensors
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        self._settle()  # first, because a storage released elsewhere may have had this address
        key = storage._cdata
        size = storage.nbytes()
        known = self._known.get(key)
        if known is not None:
            if size != known[1]:  # resized in place, as ZeRO does with parameters
                self._known[key] = (known[0], size)
                self._change(size - known[1])
            return
        reference = weakref.ref(storage, functools.partial(self._died, key))
        self._known[key] = (reference, size)
        self._change(size)

    def _died(self, key: int, _: object) -> None:
        if threading.get_ident() == self._thread:
            self._release(key)
        else:
            self._elsewhere.append(key)

    def _settle(self) -> None:
        while self._elsewhere:
            self._release(self._elsewhere.popleft())

    def _release(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._change(-known[1])

    def _change(self, size: int) -> None:
        self.bytes += size
        if self.watch is not None and size:
            self.watch(self.bytes)
