"""How large a training's checkpoint is, and how long it takes to write and to read."""

from __future__ import annotations

# At most, for each parameter: its weight twice (of the module, and fp32 of the optimizer) and two moments.
_TRAINED_BYTES, _FROZEN_BYTES = 16, 4
BYTES_PER_SECOND = 1e9  # a fair share of a parallel file system; local NVMe disks take 2 to 5 GB/s


def checkpoint_bytes(trained: float, frozen: float) -> float:
    """At most, of all ranks together; parameters in elements."""
    return trained * _TRAINED_BYTES + frozen * _FROZEN_BYTES


def checkpoint_seconds(trained: float, frozen: float) -> float:
    """Of writing it and reading it again."""
    return 2 * checkpoint_bytes(trained, frozen) / BYTES_PER_SECOND
