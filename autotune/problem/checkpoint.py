"""Size of a training's checkpoint, the time to write and read it, and the time to save the weights."""

from __future__ import annotations

# bytes per parameter, at most: two copies of the weight (the module's, and the optimizer's in fp32) and two moments.
_TRAINED_BYTES, _FROZEN_BYTES = 16, 4
BYTES_PER_SECOND = 1e9  # a fair share of a parallel file system; local NVMe disks take 2 to 5 GB/s


def checkpoint_bytes(trained: float, frozen: float) -> float:
    """Return an upper bound of a checkpoint's bytes over all ranks; parameters in elements."""
    return trained * _TRAINED_BYTES + frozen * _FROZEN_BYTES


def checkpoint_seconds(trained: float, frozen: float) -> float:
    """Return the seconds to write a checkpoint and to read it again."""
    return 2 * checkpoint_bytes(trained, frozen) / BYTES_PER_SECOND


def weights_bytes(elements: float, element_bytes: float) -> float:
    """Return the bytes of all weights, frozen ones included, which a save gathers into the first rank's main memory.

    Source: deepspeed 0.19.8, runtime/engine.py, `_zero3_consolidated_16bit_state_dict`; in fp32 it gathers 4 bytes an element.
    """
    return elements * element_bytes


def weights_seconds(elements: float, element_bytes: float) -> float:
    """Return the seconds to gather the weights by module, copy them to main memory, and write them.

    One process does all of this and checksums the bytes, so that discarding the output makes it no faster.
    """
    return weights_bytes(elements, element_bytes) / BYTES_PER_SECOND
