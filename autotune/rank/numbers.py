"""Memory and disks as a rank counts them when something has failed: sent with every error, where texts are in doubt.

Imports torch only where it is loaded already, and never wakes CUDA. Nothing here raises, and a driver or a disk that does not
answer costs `PATIENCE_SECONDS`: its question stays behind in a thread that ends with the process.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.linux import main_memory
from autotune.units import MIB

PATIENCE_SECONDS = 2.0  # for the driver; it answers within a millisecond where it answers at all

FULL_BYTES = 16 * MIB  # left: what could not be written whole is mostly there

Numbers = dict[str, int]


def collect(device: str, cap_bytes: int | None = None) -> Numbers:
    """Bytes by name, those that could be had: `host_available_bytes`, `pinned_bytes`; `reserved_bytes`, `allocated_bytes`
    and their peaks of the allocator, `free_bytes` and `total_bytes` of the device, `allowed_bytes` under a cap.

    Args:
        device: `cuda` or `cpu`, as the rank has it.
        cap_bytes: of a CPU rank.
    """
    numbers: Numbers = {}
    with suppress(Exception):
        numbers["host_available_bytes"] = main_memory().available
    if device == "cpu":
        with suppress(Exception):
            numbers.update(_of_cpu(cap_bytes))
    elif device == "cuda":
        torch: Any = sys.modules.get("torch")
        with suppress(Exception):
            if torch is not None and torch.cuda.is_initialized():
                index = torch.cuda.current_device()  # of this thread; another begins with GPU 0
                _within(PATIENCE_SECONDS, lambda: of_cuda(torch, index, numbers))
    return dict(numbers)  # the thread may still write


def full_disk(folders: Sequence[str]) -> str:
    """The first of these folders in which as good as nothing can be written any more; empty where there is none. A quota that the
    file system does not tell of is not seen, nor is one that does not answer."""
    full: list[str] = []

    def look() -> None:
        for folder in folders:
            with suppress(OSError):
                disk = os.statvfs(folder)
                if disk.f_bavail * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and disk.f_favail == 0):
                    full.append(os.path.abspath(folder))

    _within(PATIENCE_SECONDS, look)
    return full[0] if full else ""


def of_cuda(torch: Any, index: int, numbers: Numbers) -> None:
    """What torch.cuda tells of a device that this process uses, each number as it comes. The driver is asked first: where
    it hangs, torch's lock may be held for ever, and waiting for that one stops every thread (mem_get_info does not)."""
    with suppress(Exception):  # a context that an error has ruined answers with that error; torch's own counts go on
        torch.cuda.set_device(index)
        numbers["free_bytes"], numbers["total_bytes"] = (int(size) for size in torch.cuda.mem_get_info(index))
    with suppress(Exception):
        stats = torch.cuda.memory_stats(index)
        for name in ("allocated", "reserved"):
            numbers[f"{name}_bytes"] = int(stats[f"{name}_bytes.all.current"])
            numbers[f"{name}_peak_bytes"] = int(stats[f"{name}_bytes.all.peak"])
    with suppress(Exception):
        share = float(torch.cuda.get_per_process_memory_fraction(index))
        if share < 1.0 and "total_bytes" in numbers:
            numbers["allowed_bytes"] = int(share * numbers["total_bytes"])
    with suppress(Exception):  # not in every release
        numbers["pinned_bytes"] = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def _of_cpu(cap_bytes: int | None) -> Numbers:
    """What RLIMIT_DATA counts of this process, and the cap."""
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()
    return {"reserved_bytes": used} | ({"allowed_bytes": cap_bytes} if cap_bytes is not None else {})


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Does the work, and waits for it at most so long."""
    with suppress(Exception):  # no thread can be started where memory or numbers of processes have run out
        thread = threading.Thread(target=work, name="numbers", daemon=True)
        thread.start()
        thread.join(seconds)
