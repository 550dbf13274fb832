"""A checkpoint is saved, fresh ranks load it and go on: the peak of that against the peak from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from autotune.executors.base import RESUME
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import as_row, candidate, measure_spec, trial
from benchmarks.trials.ranks import opened


def run(ground: Ground) -> Iterator[Row]:
    job = ground.job("smollm2-360m", 1024)
    stages: tuple[tuple[int, dict[str, Any]], ...]
    stages = ground.choose(((0, {}), (2, {}), (3, {}), (2, {"offload_optimizer": "cpu"})), ((2, {}),))
    tried = [candidate(ground, stage, 4, **knobs) for stage, knobs in stages]
    with opened(job, ground.hardware(), ground.folder, tried) as executor:
        for one in tried:
            scratch = trial(executor, one, dataclasses.replace(measure_spec(ground), full=True))
            resumed = trial(executor, one, RESUME)
            row: Row = {"candidate": str(one), "from scratch": scratch.to_json(), **as_row(resumed)}
            if scratch.measurement and resumed.measurement:
                row["peak, resumed / from scratch"] = resumed.measurement.peak_bytes / scratch.measurement.peak_bytes
            yield {**row, EXPECTED: scratch.ok and resumed.ok}
