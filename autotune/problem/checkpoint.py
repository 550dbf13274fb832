"""How large a training's checkpoint is, and how long it takes to write and to read; and how long a save of the weights."""

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


def weights_bytes(elements: float, element_bytes: float) -> float:
    """Of the weights alone, frozen ones included, as a save gathers them into the first rank's main memory (deepspeed 0.19.8,
    runtime/engine.py, `_zero3_consolidated_16bit_state_dict`, which in fp32 gathers 4 bytes an element)."""
    return elements * element_bytes


def weights_seconds(elements: float, element_bytes: float) -> float:
    """Of gathering them module by module, copying each to main memory, and writing all: by one process, which checksums what it
    writes, so that it is no faster where the bytes go nowhere."""
    return weights_bytes(elements, element_bytes) / BYTES_PER_SECOND
