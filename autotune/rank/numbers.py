"""Memory snapshot and disk check of a rank after a failure, sent with every error for ambiguous error texts.

torch is only used if it is loaded already, and CUDA is never initialized. No function raises. A driver or disk that
does not answer costs `PATIENCE_SECONDS`. The blocked call stays in a daemon thread, which ends with the process.
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

PATIENCE_SECONDS = 2.0  # for the driver, which answers within a millisecond if it answers at all

FULL_BYTES = 16 * MIB  # bytes left on a full disk; a file that did not fit is mostly written

Numbers = dict[str, int]


def collect(device: str, cap_bytes: int | None = None) -> Numbers:
    """Return the available figures by name, in bytes.

    The host has `host_available_bytes` and `pinned_bytes`. The allocator has `reserved_bytes` and `allocated_bytes` and
    their peaks. The device has `free_bytes` and `total_bytes`, and `allowed_bytes` under a cap.

    Args:
        device: `cuda` or `cpu`.
        cap_bytes: cap of a CPU rank.
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
                index = torch.cuda.current_device()  # device of this thread; a new thread starts with GPU 0
                _within(PATIENCE_SECONDS, lambda: of_cuda(torch, index, numbers))
    return dict(numbers)  # a copy, because the thread may still write


def full_disk(folders: Sequence[str]) -> str:
    """Return the first of these folders whose disk is full, or an empty string.

    A quota that the file system does not report is not detected, and neither is a file system that does not answer.
    """
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
    """Collect torch.cuda's figures of a device in use into `numbers`, each when it arrives.

    The driver is called first, because mem_get_info does not take torch's lock. If the driver hangs, torch's lock may
    be held for ever, and waiting for it would stop every thread.
    """
    with suppress(Exception):  # a context ruined by an error returns that error; torch's own counters still work
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
    """Return the bytes that RLIMIT_DATA counts for this process, and the cap."""
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()
    return {"reserved_bytes": used} | ({"allowed_bytes": cap_bytes} if cap_bytes is not None else {})


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run the work in a thread and wait at most `seconds`."""
    with suppress(Exception):  # no thread can start if memory or process numbers have run out
        thread = threading.Thread(target=work, name="numbers", daemon=True)
        thread.start()
        thread.join(seconds)
