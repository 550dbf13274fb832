"""Each trial's end, peak and step time against what was predicted, before anything was measured and after the trials so
far: shipped models under a cap, over stages and offload. Some are meant to run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ranks import opened

from acceptance.ground import EXPECTED, Ground, Row
from acceptance.trials import as_row, beside, candidate, effort, trial
from autotune.predict.traced import traced_predictor
from autotune.problem.job import Lora
from autotune.problem.outcome import Kind
from autotune.units import GIB

CAP_BYTES = 24 * GIB
_CALMED = {"activation_checkpointing": True}
_OUT = {"offload_optimizer": "cpu"}
Knobs = tuple[int, int, dict[str, Any]]  # stage, micro-batch, the rest
# model, tokens, LoRA's rank, what is tried; the shortest first, that little is lost where the time ends
JOBS: tuple[tuple[str, int, int | None, tuple[Knobs, ...]], ...] = (
    ("smollm2-360m", 1024, None, ((0, 4, {}), (1, 4, {}), (2, 4, {}), (3, 4, {}), (2, 4, _OUT), (0, 64, {}))),
    ("gemma-2-2b", 768, 16, ((0, 1, {}), (0, 4, _CALMED), (2, 4, _CALMED), (3, 2, _CALMED))),
    ("gemma-2-2b", 768, None, ((2, 1, {**_CALMED, **_OUT}), (3, 1, {**_CALMED, **_OUT}), (0, 1, _CALMED))),
)
REHEARSED = (("tiny-llama", 32, 4, ((2, 1, _CALMED),)),)


def run(ground: Ground) -> Iterator[Row]:
    for place, (model, seq_len, rank, tried) in enumerate(ground.choose(JOBS, REHEARSED)):
        job = ground.job(model, seq_len, lora=Lora(rank) if rank else None)
        hardware = ground.hardware(CAP_BYTES)
        one_by_one = [candidate(ground, stage, size, **knobs) for stage, size, knobs in tried]
        predictor = traced_predictor(job, hardware)
        first = predictor.predict_many(one_by_one)
        with opened(job, hardware, ground.folder / str(place), one_by_one) as executor:
            for one, prior in zip(one_by_one, first, strict=True):
                calibrated = predictor.predict(one)
                outcome = trial(executor, one, effort(ground))
                predictor.observe(one, outcome)
                lora = f" LoRA r={rank}" if rank else ""
                row = {
                    "job": f"{job.model.name}{lora}",
                    "candidate": str(one),
                    **as_row(outcome),
                    **beside(prior, outcome),
                }
                row["calibrated"] = beside(calibrated, outcome)
                yield {**row, EXPECTED: outcome.kind in (Kind.OK, Kind.OOM_DEVICE)}
