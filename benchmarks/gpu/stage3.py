"""Steps of stage 3: micro-batches with parameters kept or fetched, and with and without overlap."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.rows import candidate, measured

MICRO_BATCHES = (1, 2, 4, 8)
FETCHED, KEPT = 0, 10**9  # parameters of fewer elements are kept


def run(ground: Ground) -> Iterator[Row]:
    engines = [
        [
            candidate(ground, 3, size, stage3_param_persistence_threshold=elements, overlap_comm=overlap)
            for size in ground.choose(MICRO_BATCHES, (1, 2))
        ]
        for elements in (FETCHED, KEPT)
        for overlap in (True, False)
    ]
    yield from measured(ground, ground.job("smollm2-360m", 1024), engines)
