"""The same as `predictions` under a cap: shipped models over stages and offload. Some are meant to run out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.util.units import GIB
from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.predictions import CHECKPOINTED, OFFLOADED, Tried, predicted
from benchmarks.gpu.rows import DEADLINE_SECONDS, measure_spec

CAP_BYTES = 24 * GIB
# the shortest first: little is lost if the time ends
JOBS = (
    Tried(
        "smollm2-360m",
        1024,
        ((0, 4, 1, {}), (1, 4, 1, {}), (2, 4, 1, {}), (3, 4, 1, {}), (2, 4, 1, OFFLOADED), (0, 64, 1, {})),
    ),
    Tried(
        "gemma-2-2b",
        768,
        ((0, 1, 1, {}), (0, 4, 1, CHECKPOINTED), (2, 4, 1, CHECKPOINTED), (3, 2, 1, CHECKPOINTED)),
        16,
    ),
    Tried(
        "gemma-2-2b",
        768,
        ((2, 1, 1, {**CHECKPOINTED, **OFFLOADED}), (3, 1, 1, {**CHECKPOINTED, **OFFLOADED}), (0, 1, 1, CHECKPOINTED)),
    ),
)
REHEARSED = (Tried("tiny-llama", 32, ((2, 1, 1, CHECKPOINTED),), 4),)


def run(ground: Ground) -> Iterator[Row]:
    yield from predicted(ground, ground.choose(JOBS, REHEARSED), CAP_BYTES, measure_spec(ground), DEADLINE_SECONDS)
