"""A model of the CUDA caching allocator: what it reserves for a sequence of allocations, without a device.

Rules and constants as in c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13): sizes round to 512 bytes; up to 1 MiB
they come from segments of 2 MiB; below 10 MiB from segments of 20 MiB; larger ones get a segment of their own, rounded
to 2 MiB. The smallest free block that is large enough is taken and split; free neighbours in a segment are merged.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from autotune.util.units import MIB

ROUND = 512
SMALL = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_BELOW = 10 * MIB
LARGE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB


@dataclass(eq=False)
class _Block:
    size: int
    segment: int
    start: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


class CachingAllocator:
    """Counts `allocated` and `reserved` bytes, and the peak of each."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.allocated_peak = self.reserved_peak = 0
        self._large_segment: list[bool] = []
        self._used: dict[int, _Block] = {}
        # free blocks of the small and of the large pool, by (size, segment, start)
        self._free: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
        self._by_key: dict[tuple[int, int, int], _Block] = {}

    def allocate(self, name: int, size: int) -> None:
        """Takes a block of `size` bytes for a name that has none."""
        size = max(ROUND, -(-size // ROUND) * ROUND)
        large = size > SMALL
        block = self._take(size, large) or self._grow(size, large)
        rest = block.size - size
        if rest >= (SMALL + 1 if large else ROUND):
            other = _Block(rest, block.segment, block.start + size, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._put(other, large)
        block.free = False
        self._used[name] = block
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)

    def release(self, name: int) -> None:
        """Gives the name's block back to its segment."""
        block = self._used.pop(name)
        large = self._large_segment[block.segment]
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other, large)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._put(block, large)

    # -- segments ----------------------------------------------------------------------------------------------------

    def _grow(self, size: int, large: bool) -> _Block:
        if not large:
            segment = SMALL_SEGMENT
        elif size < LARGE_BELOW:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self._large_segment.append(large)
        return _Block(segment, len(self._large_segment) - 1, 0)

    def _take(self, size: int, large: bool) -> _Block | None:
        pool = self._free[large]
        at = bisect.bisect_left(pool, (size, -1, -1))
        return self._by_key.pop(pool.pop(at)) if at < len(pool) else None

    def _put(self, block: _Block, large: bool) -> None:
        key = (block.size, block.segment, block.start)
        self._by_key[key] = block
        bisect.insort(self._free[large], key)

    def _remove(self, block: _Block, large: bool) -> None:
        key = (block.size, block.segment, block.start)
        del self._by_key[key]
        self._free[large].remove(key)
