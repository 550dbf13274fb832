"""Memory that the caching allocator keeps if batches differ in length: blocks of batches that were the longest so far.

A batch longer than all before finds no free block of sufficient size. The allocator then takes a new block for each of its
tensors and keeps the old ones, which only shorter batches can fill. The smallest sufficient block is split, and segments
never grow unless they are `expandable_segments` (torch, c10/cuda/CUDACachingAllocator.cpp). After many batches the allocator
holds the tensors of every record: as many times the longest batch as the records' lengths add up to. A replay with the
allocator's rules (`benchmarks/caching_allocator.py`) gives exactly that for tensors of one size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.predict.flops import dense_shape
from autotune.predict.knobs import Columns, Floats
from autotune.problem.job import Job
from autotune.units import MIB

BATCHES = 100  # batches of a training before its memory is read; later records are rare and hardly ever observed
# Blocks of at least this size have a segment of their own; smaller ones share segments that any length can use.
OWN_SEGMENT_BYTES = 10 * MIB
# A layer's blocks have many sizes, and the larger ones of a shorter batch serve as smaller ones of a longer batch.
# Replays of layers alone keep 0.7 to 1.4 times the bytes in use; tensors of one size would keep 2.7.
MIXED = 0.4
# Bytes per token and vocabulary entry during the loss: logits, their shifted copy, both in 32 bits, the softmax.
_LOSS_BYTES = 12.0


def uneven_shares(job: Job, c: Columns, activations: Floats) -> tuple[Floats, Floats]:
    """Return (mean, standard deviation), (n,) each, of the kept blocks of the longest batches, as a share of `activations`
    (bytes of the longest batch, (n,))."""
    if not c.many_lengths.any():
        return np.zeros(len(c)), np.zeros(len(c))
    large = c.many_lengths * _in_large_blocks(job, c, activations)
    mean, deviation = kept_records(job.lengths, c.micro_batch)
    return large * mean, large * deviation


def kept_records(
    lengths: Sequence[tuple[int, int]], micro_batch: Floats, batches: int = BATCHES
) -> tuple[Floats, Floats]:
    """Return (mean, standard deviation), (n,) each, of the summed lengths of the records, in multiples of the longest length.

    A batch is as long as its longest row. A record is a batch longer than all before it; the longest batch of all is not
    counted. A length is a record if the first batch of at least that length has exactly that length, independently of other
    lengths.

    Args:
        lengths: (tokens, count).
    """
    tokens, counts = np.array(sorted(lengths), dtype=np.float64).T
    sizes, place = np.unique(micro_batch, return_inverse=True)
    up_to = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()]) ** sizes[:, None]
    shorter, at_least = up_to[:, :-1], np.maximum(1 - up_to[:, :-1], 1e-12)
    record = np.minimum(1.0, np.diff(up_to, axis=1) / at_least) * (1 - shorter**batches)
    share = tokens / tokens[-1]
    mean, variance = np.maximum(0.0, record @ share - 1), (record * (1 - record)) @ share**2
    return np.asarray(mean[place]), np.asarray(np.sqrt(variance)[place])


def _in_large_blocks(job: Job, c: Columns, activations: Floats) -> Floats:
    """Return (n,) the share of the activations whose record blocks cannot be reused: all of the loss and a part of the
    layers, if they are too large to share a segment."""
    shape = dense_shape(job.model.config)
    if shape is None:
        return np.full(len(c), MIXED)
    _, width, vocabulary = shape
    entries = job.element_bytes * c.micro_batch * job.seq_len
    of_loss = np.minimum(1.0, _LOSS_BYTES * vocabulary * c.micro_batch * job.seq_len / np.maximum(activations, 1.0))
    of_loss = np.where(entries * vocabulary >= OWN_SEGMENT_BYTES, of_loss, 0.0)
    return np.asarray(of_loss + (1 - of_loss) * np.where(entries * width >= OWN_SEGMENT_BYTES, MIXED, 0.0))
