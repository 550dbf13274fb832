"""Memory snapshot at a rank's failure, from the allocator's error text and the rank's own figures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autotune.units import GIB, KIB, MIB, format_bytes

_FULL = 0.02  # share of a device free below which handles and communicators (tens to hundreds of MiB) may not fit
_ROOMY = 0.10  # share of a device free above which no handle fails for lack of memory
_MUCH_PINNED_BYTES = GIB  # an offloaded optimizer pins tens of GiB, a loader's batches some MiB

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = r"(?<![\d.])([\d.]{1,24})\s*(bytes|[KMGT]iB|[KMG]B)"

# torch prints one text for CUDA, HIP, XPU and, in its older form, NPU ("c10/cuda/CUDACachingAllocator.cpp", malloc):
#   since 2.1  "Tried to allocate A. GPU 0 has a total capacity of B of which C is free. Process 7 has D memory in use.
#              Including non-PyTorch memory, this process has E memory in use. F allowed; Of the allocated memory G is
#              allocated by PyTorch, with H allocated in private pools, and I is reserved by PyTorch but unallocated."
#              (2.1 writes "capacty"; F appears only under a cap; G includes H; the total reserved is G + I)
#   until 2.0  "Tried to allocate A (GPU 0; B total capacity; G already allocated; C free; F allowed; R reserved in total"
# The cudaMallocAsync backend ("CUDAMallocAsyncAllocator.cpp") and MPS have other forms.
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
    """Memory figures at the failure in bytes; None if unknown."""

    asked: int | None = None  # size of the failed allocation
    free: int | None = None  # free on the device for all processes
    total: int | None = None  # capacity of the device
    reserved: int | None = None  # by this process's allocator, cache included; CPU rank: counted by its cap
    reserved_peak: int | None = None
    own: int | None = None  # held by this process, including memory outside the allocator
    allowed: int | None = None  # the allocator's limit under a cap
    pinned: int | None = None  # main memory that this process has page-locked through torch
    host_available: int | None = None

    @classmethod
    def of(cls, text: str, numbers: dict[str, Any] | None = None) -> Account:
        """Build from an error's text and the rank's figures (`rank.numbers`). The text is closer to the failure and wins."""
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
        """Bytes that the cap still allowed."""
        if self.allowed is None or self.reserved is None:
            return None
        return max(0, self.allowed - self.reserved)

    @property
    def missing(self) -> int | None:
        """Bytes by which the allocation failed.

        The value is 1 if enough memory was free in pieces too small, and None if the text names no size.
        """
        if self.asked is None:
            return None
        room = [size for size in (self.free, self.under_cap) if size is not None]
        return max(1, self.asked - min(room, default=0))

    @property
    def is_full(self) -> bool:
        """True if the device has almost nothing free."""
        return self.free is not None and bool(self.total) and self.free < _FULL * (self.total or 0)

    @property
    def is_roomy(self) -> bool:
        """True if the device has so much free that no small allocation can have failed."""
        return self.free is not None and bool(self.total) and self.free > _ROOMY * (self.total or 0)

    @property
    def pins_much(self) -> bool:
        return (self.pinned or 0) >= _MUCH_PINNED_BYTES

    @property
    def held_by_others(self) -> int | None:
        """Bytes of the device that other processes hold, if more than half of it and no cap was the limit.

        The value is None otherwise, because a desktop or a small process of another user is the usual state of a
        machine. NVML cannot name the owner of a process reliably: in a container this process has another pid. The
        figure is therefore the used memory minus this process's own. If torch cannot read its own memory, it prints 0
        bytes (vLLM's workers) or 2^64 (WSL). In that case the allocator's total is used.
        """
        if not self.total or self.free is None or self.reserved is None:
            return None
        if self.under_cap is not None and self.under_cap < self.free:
            return None
        own = self.own if self.own is not None and self.own <= self.total else 0
        others = self.total - self.free - max(own, self.reserved)
        return others if others > self.total / 2 else None

    def __str__(self) -> str:
        """Return a text like `0.2 of 23.7 GiB of the device free, ...`; empty without figures."""
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
        return int(float(number.rstrip(".")) * _UNITS[unit])  # the number may end a sentence
    except (ValueError, OverflowError):  # text like "1.2.3"
        return None
