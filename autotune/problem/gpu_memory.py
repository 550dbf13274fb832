"""Memory of a GPU: its own, or main memory if it has none.

Integrated GPUs (DGX Spark's GB10, Jetson) share the machine's memory. For these NVML reports that both versions of the call are
not supported (leptonai/gpud#1170, XuehaiPan/nvitop#208), or a size of 0 (Syllo/nvtop#411).
"""

from __future__ import annotations

from typing import Any

from autotune.problem.host import host_available_bytes, host_total_bytes

Sizes = tuple[int, int, int]  # bytes: total, free, kept by the driver (0 if the driver does not report it)


def memory(lib: Any, handle: Any) -> Sizes:
    """Return a device's memory. For a device without its own, return main memory, of which a process gets its share."""
    return own_memory(lib, handle) or shared_memory()


def shared_memory() -> Sizes:
    """Return main memory as this process can have it, for a device without memory of its own."""
    return host_total_bytes(), host_available_bytes(), 0


def own_memory(lib: Any, handle: Any) -> Sizes | None:
    """Return the device's own memory, or None if it has none."""
    try:
        found = lib.nvmlDeviceGetMemoryInfo(handle, lib.nvmlMemory_v2)
        sizes = int(found.total), int(found.free), int(found.reserved)
    except (lib.NVMLError_FunctionNotFound, lib.NVMLError_NotSupported):  # drivers before R510
        try:
            found = lib.nvmlDeviceGetMemoryInfo(handle)
        except lib.NVMLError_NotSupported:
            return None
        sizes = int(found.total), int(found.free), 0
    return sizes if sizes[0] else None
