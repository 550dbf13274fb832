"""A GPU's memory: its own, or main memory where it has none.

Integrated GPUs (DGX Spark's GB10, Jetson) share the machine's memory. NVML says of their own that it is not supported, in both
versions of the call (leptonai/gpud#1170, XuehaiPan/nvitop#208), or that there is none (Syllo/nvtop#411).
"""

from __future__ import annotations

from typing import Any

from autotune.problem.host import host_available_bytes, host_total_bytes

Sizes = tuple[int, int, int]  # bytes: total, free, kept by the driver; the last is 0 where the driver does not say


def memory(lib: Any, handle: Any) -> Sizes:
    """What a process can have of a device is part of the main memory that is left, where the device has none of its own."""
    return own_memory(lib, handle) or shared_memory()


def shared_memory() -> Sizes:
    """Of a device that has none of its own: main memory as this process can have it."""
    return host_total_bytes(), host_available_bytes(), 0


def own_memory(lib: Any, handle: Any) -> Sizes | None:
    """None where the device has none."""
    try:
        found = lib.nvmlDeviceGetMemoryInfo(handle, lib.nvmlMemory_v2)
        sizes = int(found.total), int(found.free), int(found.reserved)
    except (lib.NVMLError_FunctionNotFound, lib.NVMLError_NotSupported):  # before R510
        try:
            found = lib.nvmlDeviceGetMemoryInfo(handle)
        except lib.NVMLError_NotSupported:
            return None
        sizes = int(found.total), int(found.free), 0
    return sizes if sizes[0] else None
