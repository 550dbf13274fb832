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
