"""What memory looked like when a rank failed: what an allocator's text says of it, and what the rank has counted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autotune.units import GIB, KIB, MIB, format_bytes

_FULL = 0.02  # of a device free: handles and communicators of libraries (tens to hundreds of MiB) may not fit any more
_ROOMY = 0.10  # of a device free: no handle fails for want of it
_MUCH_PINNED_BYTES = GIB  # an offloaded optimizer pins tens of GiB, a loader's batches some MiB

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = r"(?<![\d.])([\d.]{1,24})\s*(bytes|[KMGT]iB|[KMG]B)"

# torch prints one text for CUDA, HIP, XPU and, in its older form, NPU ("c10/cuda/CUDACachingAllocator.cpp", malloc):
#   since 2.1  "Tried to allocate A. GPU 0 has a total capacity of B of which C is free. Process 7 has D memory in use.
#              Including non-PyTorch memory, this process has E memory in use. F allowed; Of the allocated memory G is
#              allocated by PyTorch, with H allocated in private pools, and I is reserved by PyTorch but unallocated."
#              (2.1 writes "capacty"; F only under a cap; G has H in it; what it reserves in all is G + I)
#   until 2.0  "Tried to allocate A (GPU 0; B total capacity; G already allocated; C free; F allowed; R reserved in total"
# The cudaMallocAsync backend ("CUDAMallocAsyncAllocator.cpp") and MPS have forms of their own.
_ASKED = (
    re.compile(r"(?:[Tt]ried|[Tt]rying) to allocate ([\d.]+)\s*(bytes|[KMGT]iB|[KMG]B)?"),
    re.compile(r"Unable to allocate " + _SIZE),  # numpy
    re.compile(r"Requested\s*: " + _SIZE),  # cudaMallocAsync
    re.compile(r"memory allocation of (\d+) (bytes) failed"),  # Rust: tokenizers, safetensors
)
_TOTAL = re.compile(rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity|Device limit\s*: {_SIZE}")
_FREE = re.compile(rf"{_SIZE} is free|{_SIZE} free;|Free \(according to CUDA\)\s*: {_SIZE}")
_ALLOWED = re.compile(rf"{_SIZE} allowed;|max allowed: {_SIZE}|user-supplied memory fraction\)\s*: {_SIZE}")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOCATED = re.compile(
    rf"Of the allocated memory {_SIZE} is allocated|{_SIZE} already allocated|Currently allocated\s*: {_SIZE}"
    rf"|MPS allocated: {_SIZE}"
)
_UNALLOCATED = re.compile(
    rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached|other allocations: {_SIZE}"  # until 1.3; MPS
)
_RESERVED = re.compile(rf"{_SIZE} reserved in total")


@dataclass(frozen=True)
class Account:
    """Bytes at the failure; None where nothing is known of them."""

    asked: int | None = None  # what the allocation that failed was to have
    free: int | None = None  # of the device, for every process on it
    total: int | None = None  # of the device
    reserved: int | None = None  # by this process's allocator, with cached blocks; of a CPU rank what its cap counts
    reserved_peak: int | None = None
    own: int | None = None  # of this process, with what is outside the allocator
    allowed: int | None = None  # the allocator's limit under a cap
    pinned: int | None = None  # main memory that this process has page-locked through torch
    host_available: int | None = None

    @classmethod
    def of(cls, text: str, numbers: dict[str, Any] | None = None) -> Account:
        """From an error's text and from what the rank has counted (`rank.numbers`); the text is nearer to the failure."""
        counted = {key: value for key, value in (numbers or {}).items() if isinstance(value, int) and value >= 0}
        allocated, unallocated = _find(_ALLOCATED, text), _find(_UNALLOCATED, text)
        reserved = _find(_RESERVED, text)
        if reserved is None and allocated is not None:
            reserved = allocated + (unallocated or 0)
        said = {
            "asked": next((size for pattern in _ASKED if (size := _find(pattern, text)) is not None), None),
            "free": _find(_FREE, text),
            "total": _find(_TOTAL, text),
            "reserved": reserved,
            "own": _find(_OWN, text),
            "allowed": _find(_ALLOWED, text),
        }
        fields = {key: value for key in cls.__dataclass_fields__ if (value := counted.get(f"{key}_bytes")) is not None}
        return cls(**{**fields, **{key: value for key, value in said.items() if value is not None}})

    @property
    def under_cap(self) -> int | None:
        """What the cap still allowed."""
        if self.allowed is None or self.reserved is None:
            return None
        return max(0, self.allowed - self.reserved)

    @property
    def missing(self) -> int | None:
        """By how much the allocation failed; 1 where there was room in pieces too small. None: it names no size."""
        if self.asked is None:
            return None
        room = [size for size in (self.free, self.under_cap) if size is not None]
        return max(1, self.asked - min(room, default=0))

    @property
    def is_full(self) -> bool:
        """Whether the device has as good as nothing left."""
        return self.free is not None and bool(self.total) and self.free < _FULL * (self.total or 0)

    @property
    def is_roomy(self) -> bool:
        """Whether the device has so much left that nothing small can have failed for want of it."""
        return self.free is not None and bool(self.total) and self.free > _ROOMY * (self.total or 0)

    @property
    def pins_much(self) -> bool:
        return (self.pinned or 0) >= _MUCH_PINNED_BYTES

    @property
    def held_by_others(self) -> int | None:
        """Bytes of the device that other processes hold, where that is more than half of it and no cap of ours was in the
        way. None otherwise: a desktop or a neighbour's small share is the machine's usual state.

        Whose a listed process is cannot be told: in a container this process is listed under a number that it does not
        know. So it is what is used, less what is ours. Where torch cannot read its own it prints 0 bytes (vLLM's workers)
        or 2^64 (WSL); the allocator's total is then the better figure.
        """
        if not self.total or self.free is None or self.reserved is None:
            return None
        if self.under_cap is not None and self.under_cap < self.free:
            return None
        own = self.own if self.own is not None and self.own <= self.total else 0
        others = self.total - self.free - max(own, self.reserved)
        return others if others > self.total / 2 else None

    def __str__(self) -> str:
        """`0.2 of 23.7 GiB of the device free, ...`; empty where nothing was counted."""
        parts = []
        if self.free is not None and self.total is not None:
            parts.append(f"{format_bytes(self.free)} of the device's {format_bytes(self.total)} free")
        if self.reserved is not None:
            peak = f", {format_bytes(self.reserved_peak)} at most" if self.reserved_peak is not None else ""
            parts.append(f"{format_bytes(self.reserved)} reserved{peak}")
        for size, what in ((self.allowed, "allowed"), (self.pinned, "pinned")):
            if size is not None:
                parts.append(f"{format_bytes(size)} {what}")
        if self.host_available is not None:
            parts.append(f"{format_bytes(self.host_available)} of main memory available")
        return ", ".join(parts)


def _find(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [*(group for group in match.groups() if group), "bytes"][:2]
    try:
        return int(float(number.rstrip(".")) * _UNITS[unit])  # a sentence may end at the number
    except (ValueError, OverflowError):  # "1.2.3"
        return None
