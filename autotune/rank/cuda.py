"""What is asked of torch.cuda, and nothing else: the one place where it is called, so that tests can stand in for it.

Sizes in bytes. The functions speak of the present device, the one that `take` has chosen.
"""

from __future__ import annotations

from contextlib import suppress

import torch


def available() -> bool:
    return bool(torch.cuda.is_available())


def in_bad_fork() -> bool:
    """Whether CUDA was woken in the process that this one was forked from: it cannot be used here."""
    return bool(torch.cuda._is_in_bad_fork())


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def device_count() -> int:
    return torch.cuda.device_count()


def take(index: int) -> None:
    """Takes device `index` and wakes its context."""
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")


def uuid() -> str:
    """The device's UUID, as NVML writes it but for the `GPU-` or `MIG-`."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def free_and_total() -> tuple[int, int]:
    """Of the whole device, whoever holds it; the total is without what the driver keeps."""
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def reserved() -> int:
    """What the allocator holds of the device now."""
    return int(torch.cuda.memory_reserved())


def most_allocated() -> int:
    return int(torch.cuda.max_memory_allocated())


def most_reserved() -> int:
    """Since the last `forget_peaks`; exact."""
    return int(torch.cuda.max_memory_reserved())


def retries() -> int:
    """How often the allocator had to give its cache back to go on."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def pinned() -> int | None:
    """The peak of pinned host memory; None where torch does not know."""
    with suppress(Exception):  # older versions have no such statistics
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    return None


def forget_peaks() -> None:
    """Peaks begin anew, from an allocator without cached blocks: a smaller batch's would count as the next one's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    torch.cuda.synchronize()


def limit(share: float) -> None:
    """The allocator fails an allocation that would bring it over this share of the device."""
    torch.cuda.set_per_process_memory_fraction(share)
