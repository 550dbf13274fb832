"""A candidate of two models without levers and with each, and what the predictor expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.problem.knobs import COMPILED, LIGER, LOSS
from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.rows import candidate, measured

JOBS = (("smollm2-360m", 8), ("gemma-2-2b", 2))  # micro-batches that an H100 holds without levers
TOKENS = 1024
CHUNKED = {LOSS: "chunked"}
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "compile, cold": {COMPILED: True},
    "compile, warm": {COMPILED: True},
    "Liger": {LIGER: True},
    "chunked loss": CHUNKED,
    "chunked loss and compile": {COMPILED: True, **CHUNKED},
}


def run(ground: Ground) -> Iterator[Row]:
    for model, size in ground.choose(JOBS, JOBS[:1]):
        candidates = [[candidate(ground, 2, size, **knobs)] for knobs in LEVERS.values()]
        rows = measured(ground, ground.job(model, TOKENS), candidates)
        for lever, row in zip(LEVERS, rows, strict=True):
            yield {"model": model, "lever": lever, **row}
