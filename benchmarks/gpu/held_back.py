"""Peak and step time of trials that no constant of the predictor was fitted to, against their predictions."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.predictions import CHECKPOINTED, QUICK, QUICK_REHEARSED, Tried, predicted

JOBS = (
    Tried("smollm2-360m", 4096, ((1, 2, 2, {}), (3, 4, 1, CHECKPOINTED))),
    Tried("qwen2.5-1.5b", 1024, ((2, 8, 2, {}), (3, 4, 1, {}), (0, 1, 1, {}))),
)
REHEARSED = (Tried("tiny-llama", 32, ((1, 1, 2, {}),)),)


def run(ground: Ground) -> Iterator[Row]:
    yield from predicted(ground, ground.choose(JOBS, REHEARSED), None, ground.choose(QUICK, QUICK_REHEARSED), 40.0)
