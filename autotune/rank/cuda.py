"""Wrapper of all calls to torch.cuda in ranks, so that tests can replace it.

Sizes are in bytes. The functions refer to the current device, which `take` selects.
"""

from __future__ import annotations

from contextlib import suppress

import torch


def available() -> bool:
    return bool(torch.cuda.is_available())


def in_bad_fork() -> bool:
    """Return True if CUDA was initialized before the fork of this process, which cannot use CUDA then."""
    return bool(torch.cuda._is_in_bad_fork())


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def device_count() -> int:
    return torch.cuda.device_count()


def take(index: int) -> None:
    """Select device `index` and create its context."""
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")


def uuid() -> str:
    """Return the device's UUID, without NVML's prefix `GPU-` or `MIG-`."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def free_and_total() -> tuple[int, int]:
    """Return free and total bytes of the whole device for all processes; the driver's share is not in the total."""
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def reserved() -> int:
    """Return the bytes that the allocator reserves now."""
    return int(torch.cuda.memory_reserved())


def most_allocated() -> int:
    return int(torch.cuda.max_memory_allocated())


def most_reserved() -> int:
    """Return the peak reserved bytes since the last `forget_peaks`. The figure is exact."""
    return int(torch.cuda.max_memory_reserved())


def retries() -> int:
    """Return how often the allocator had to free its cache to satisfy a request."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def pinned() -> int | None:
    """Return the peak of pinned host memory, or None if torch does not report it."""
    with suppress(Exception):  # older versions have no such statistics
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    return None


def forget_peaks() -> None:
    """Reset peaks and empty the allocator's cache, whose blocks would count towards the next batch size."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    torch.cuda.synchronize()


def limit(share: float) -> None:
    """Make the allocator fail beyond this share of the device."""
    torch.cuda.set_per_process_memory_fraction(share)
