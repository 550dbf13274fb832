from hypothesis import given
from hypothesis import strategies as st

from autotune.util.units import MIB
from benchmarks.predict.caching_allocator import LARGE_SEGMENT, SMALL_SEGMENT, CachingAllocator


def test_small_and_large_come_from_segments_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 100)
    assert (allocator.allocated, allocator.reserved) == (512, SMALL_SEGMENT)
    allocator.allocate(2, 3 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.allocate(3, 11 * MIB)  # what is left of the 20 MiB holds it
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.allocate(4, 33 * MIB + 1)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT + 34 * MIB


def test_freed_neighbours_join_and_are_used_again() -> None:
    allocator = CachingAllocator()
    for name in range(4):
        allocator.allocate(name, 5 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    for name in (1, 0, 2):
        allocator.release(name)
    allocator.allocate(9, 15 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    assert allocator.allocated == LARGE_SEGMENT


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40 * MIB)), max_size=120))
def test_whatever_the_order_nothing_is_lost(steps: list[tuple[int, int]]) -> None:
    allocator, used = CachingAllocator(), set()
    for name, size in steps:
        if name in used:
            allocator.release(name)
            used.remove(name)
        else:
            allocator.allocate(name, size)
            used.add(name)
        assert allocator.allocated <= allocator.reserved
    for name in used:
        allocator.release(name)
    assert allocator.allocated == 0
    free = sum(size for pool in allocator._free for size, _, _ in pool)
    assert free == allocator.reserved
