"""Sizes out of texts: the formats of the allocators, from torch 1.3 to today's, and the numbers of a rank beside them."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from autotune.util.units import GIB, KIB, MIB
from autotune.workers.failure_classifier import MemorySnapshot

TODAY = (  # torch 2.1 and later; github.com/meta-pytorch/segment-anything-fast/issues/63
    "CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 3.05 GiB is free. "
    "Process 11488 has 4.28 GiB memory in use. Including non-PyTorch memory, this process has 16.27 GiB memory in use. Of the "
    "allocated memory 14.46 GiB is allocated by PyTorch, and 265.91 MiB is reserved by PyTorch but unallocated."
)
UNTIL_2_0 = (  # github.com/rshaojimmy/MADDoG/issues/11
    "CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity; 8.77 GiB already allocated; 19.75 MiB "
    "free; 13.71 GiB reserved in total by PyTorch)"
)
UNTIL_1_3 = (  # github.com/horovod/horovod/issues/2719
    "CUDA out of memory. Tried to allocate 14.00 MiB (GPU 1; 15.78 GiB total capacity; 2.68 GiB already allocated; 53.75 MiB "
    "free; 77.13 MiB cached; 0 bytes inactive)"
)


def size(gib: float) -> int:
    return int(gib * GIB)


def test_the_allocators_formats() -> None:
    assert MemorySnapshot.of(TODAY) == MemorySnapshot(
        asked=12 * GIB,
        free=size(3.05),
        total=size(23.69),
        own=size(16.27),
        unused=int(265.91 * MIB),
        reserved=size(14.46) + int(265.91 * MIB),
    )
    assert MemorySnapshot.of(TODAY.replace("capacity", "capacty")) == MemorySnapshot.of(TODAY), "as 2.1 writes it"
    assert MemorySnapshot.of(UNTIL_2_0) == MemorySnapshot(
        asked=size(2.87),
        free=int(19.75 * MIB),
        total=size(14.76),
        unused=size(13.71) - size(8.77),
        reserved=size(13.71),
    )
    assert MemorySnapshot.of(UNTIL_1_3) == MemorySnapshot(
        asked=14 * MIB,
        free=int(53.75 * MIB),
        total=size(15.78),
        unused=int(77.13 * MIB),
        reserved=size(2.68) + int(77.13 * MIB),
    )
    mps = "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB, max allowed: 9.07 GiB)."
    assert MemorySnapshot.of(f"{mps} Tried to allocate 256.00 MiB on private pool.") == MemorySnapshot(
        asked=256 * MIB, unused=GIB, reserved=9 * GIB, allowed=size(9.07)
    )
    asynchronous = (  # c10/cuda/CUDAMallocAsyncAllocator.cpp
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 13.96 GiB\n"
        "Requested               : 16.00 MiB\nDevice limit            : 15.73 GiB\n"
        "Free (according to CUDA): 12.19 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB"
    )
    account = MemorySnapshot.of(asynchronous)
    assert (account.asked, account.reserved, account.total) == (16 * MIB, size(13.96), size(15.73))
    assert account.missing == 16 * MIB - int(12.19 * MIB)


CAPPED = (
    "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 3.20 GiB is free. "
    "Including non-PyTorch memory, this process has 75.93 GiB memory in use. 75.23 GiB allowed; Of the allocated memory "
    "74.23 GiB is allocated by PyTorch, and 943.54 MiB is reserved by PyTorch but unallocated."
)


def test_a_caps_shortage_is_of_what_the_cap_allowed() -> None:
    """Finding 22: the device had 3.20 GiB free, so it was "short of 1 byte"."""
    account = MemorySnapshot.of(CAPPED)
    assert account.allowed == size(75.23)
    assert account.under_cap == size(75.23) - size(74.23) - int(943.54 * MIB)
    assert account.missing == 250 * MIB - account.under_cap
    until_2_0 = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity; 3.00 GiB already allocated; "
        "4.50 GiB free; 4.00 GiB allowed; 3.50 GiB reserved in total by PyTorch)"
    )
    assert MemorySnapshot.of(until_2_0).missing == size(1.5)
    assert MemorySnapshot.of(CAPPED.replace("3.20 GiB is free", "1.00 MiB is free")).missing == 249 * MIB, (
        "the less of the two"
    )
    assert MemorySnapshot(asked=GIB, allowed=GIB, reserved=2 * GIB).missing == GIB, "over the cap already"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (TODAY, 12 * GIB - size(3.05)),
        ("Tried to allocate 20.00 MiB", 20 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16777216 bytes. Error code 12", 16777216),
        ("Tried to allocate 3 KiB. 1 KiB is free", 2 * KIB),
        ("trying to allocate 3.", 3),  # bytes, at the end of a sentence
        ("Tried to allocate 2 GB", 2 * 10**9),
        ("Tried to allocate 2.00 MiB. 5.00 MiB is free", 1),  # in pieces too small: something is missing
        ("memory allocation of 4096 bytes failed", 4096),
        (
            "HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2 GiB of which 0 bytes is free.",
            GIB,
        ),
        ("no", None),
        ("1 GiB is free", None),
        ("tried to allocate ...", None),  # the verdict of 0.1.0 raised ValueError
        ("tried to allocate 1.2.3 GiB", None),
        (f"tried to allocate {'1' * 8000} GiB", None),
    ],
)
def test_bytes_missing(text: str, missing: int | None) -> None:
    assert MemorySnapshot.of(text).missing == missing


def test_numbers_fill_what_the_text_leaves_open() -> None:
    numbers = {"free_bytes": 7, "total_bytes": 100, "reserved_bytes": 50, "pinned_bytes": 3, "host_available_bytes": 9}
    assert MemorySnapshot.of("", numbers) == MemorySnapshot(free=7, total=100, reserved=50, pinned=3, host_available=9)
    said = MemorySnapshot.of(TODAY, numbers)
    assert (said.free, said.pinned) == (size(3.05), 3), "the text is nearer to the failure"
    assert MemorySnapshot.of("", {"free_bytes": "1", "total_bytes": -1, "x": 1, "asked": 2}) == MemorySnapshot()
    assert MemorySnapshot.of("", None) == MemorySnapshot()
    assert str(MemorySnapshot()) == ""


def test_how_full_a_device_is() -> None:
    shares = [
        (0.0, True, False),
        (0.019, True, False),
        (0.021, False, False),
        (0.099, False, False),
        (0.11, False, True),
    ]
    for free, full, roomy in shares:
        account = MemorySnapshot(free=int(free * 80 * GIB), total=80 * GIB)
        assert (account.is_full, account.is_roomy) == (full, roomy)
    for unknown in (
        MemorySnapshot(),
        MemorySnapshot(free=0),
        MemorySnapshot(total=GIB),
        MemorySnapshot(free=0, total=0),
    ):
        assert not unknown.is_full
        assert not unknown.is_roomy


def test_what_others_hold() -> None:
    assert MemorySnapshot.of(UNTIL_1_3).elsewhere == size(15.78) - int(53.75 * MIB) - size(2.68) - int(77.13 * MIB)
    neighbours = size(23.69) - size(3.05) - size(16.27)
    assert MemorySnapshot.of(TODAY).elsewhere == neighbours
    unread = size(23.69) - size(3.05) - size(14.46) - int(265.91 * MIB)
    for own in ("17179869183.99 GiB memory", "0 bytes memory"):  # WSL, a container
        assert MemorySnapshot.of(TODAY.replace("16.27 GiB memory", own)).elsewhere == unread
    assert MemorySnapshot(free=MIB, total=80 * GIB, reserved=2 * GIB).elsewhere == 78 * GIB - MIB
    assert not MemorySnapshot(free=30 * GIB, total=80 * GIB, reserved=2 * GIB, allowed=3 * GIB).elsewhere, "our own cap"
    for unknown in (
        MemorySnapshot(),
        MemorySnapshot(free=1, total=80 * GIB),
        MemorySnapshot(total=80 * GIB, reserved=1),
    ):
        assert not unknown.elsewhere


SIZES = st.sampled_from(
    ["1.00 GiB", "0 bytes", "1.2.3 MiB", "... KiB", "9e9 TiB", f"{'9' * 400} GiB", "7", "", "-1 GiB"]
)
