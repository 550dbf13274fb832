"""What the gauge costs a step, what two optimizers take at their peak, and offload by CPU threads.

The gauge at its own rate and at 100 Hz with processes listed every time, in turn in one engine (finding 23); torch's AdamW
by `foreach` and DeepSpeed's FusedAdam at stage 0 against their predictions (18, 16: 24 bytes a parameter); an offloaded
step with 1 and 8 CPU threads (9).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.workers.memory_monitor import MemoryPeaks, Meter
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import DEADLINE_SECONDS, as_row, beside, candidate, measure_spec, trial
from benchmarks.trials.ranks import opened

MODEL, SEQ_LEN = "smollm2-360m", 1024
FUSED_BYTES = 24  # a parameter, of FP16_Optimizer's step: docs/predictor.md
OWN_OPTIMIZERS: dict[str, tuple[dict[str, Any], float | None]] = {
    "AdamW, foreach (18)": ({"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}, None),
    "AdamW, fused": ({"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}}, None),
    "FusedAdam (16)": ({"type": "AdamW", "params": {"lr": 1e-5}}, FUSED_BYTES),
}


class Switched(Meter):
    """A meter that can be had at 100 Hz and with everything that it can list."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self.hasty = meter, False
        for name in (
            "external_usage_warnings",
            "begin",
            "register_device",
            "busy",
            "sample_faster",
            "unreleased_memory_warnings",
        ):
            setattr(self, name, getattr(meter, name))

    @property
    def interval_seconds(self) -> float:  # type: ignore[override]
        return 0.01 if self.hasty else self._meter.interval_seconds

    def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
        if self.hasty:
            self._meter.sample_faster()
        self._meter.sample(pids, peaks)


def run(ground: Ground) -> Iterator[Row]:
    yield from of_gauge(ground)
    yield from of_optimizers(ground)
    yield from of_threads(ground)


def of_gauge(ground: Ground) -> Iterator[Row]:
    one = candidate(ground, 2, 4)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with opened(ground.job(MODEL, SEQ_LEN), ground.hardware(), ground.folder / "gauge", [one]) as executor:
        executor.meter = meter = Switched(executor.meter)
        with closing(executor.session(one, "gauge")) as session:
            for number in range(ground.choose(8, 2)):
                meter.hasty = number % 2 == 1
                outcome = session.measure(one, measure_spec(ground), DEADLINE_SECONDS)
                yield {"what": "gauge (23)", "how": f"every {meter.interval_seconds} s", **as_row(outcome)}
                if outcome.measurement is None:
                    return
                seconds[meter.hasty].append(outcome.measurement.step_seconds)
    ratio = statistics.median(hasty / calm for calm, hasty in zip(seconds[False], seconds[True], strict=True))
    yield {"what": "gauge (23)", "how": "step at 100 Hz / at its own rate", "ratio": ratio}


def of_optimizers(ground: Ground) -> Iterator[Row]:
    """In forked ranks: building FusedAdam must not wake CUDA in the fork server (finding 8)."""
    rehearsed = list(OWN_OPTIMIZERS.items())[:1]  # the others build an op, for minutes on CPUs
    for name, (section, bytes_each) in ground.choose(list(OWN_OPTIMIZERS.items()), rehearsed):
        job = ground.job(MODEL, SEQ_LEN, base_config={"optimizer": section})
        one = candidate(ground, 0, 1)  # the step's peak is the highest
        predictor = traced_predictor(job, ground.hardware())
        parameters = sum(predictor.trace.parameters)
        with opened(job, ground.hardware(), ground.folder / section["type"], [one]) as executor:
            outcome = trial(executor, one, measure_spec(ground))
            row = {
                "what": name,
                "how": executor.isolation,
                **as_row(outcome),
                **beside(predictor.predict(one), outcome),
            }
        row["parameters"] = parameters
        if outcome.measurement and outcome.measurement.torch_allocated_bytes:
            row["allocated bytes a parameter"] = outcome.measurement.torch_allocated_bytes / parameters
            row["by the formula"] = bytes_each
        yield {**row, EXPECTED: outcome.ok and row["how"] == "fork"}


def of_threads(ground: Ground) -> Iterator[Row]:
    one: Candidate = candidate(ground, 2, 4, offload_optimizer="cpu")
    own = os.environ.get("OMP_NUM_THREADS")
    try:
        for threads in ground.choose((1, 8), (1,)):
            os.environ["OMP_NUM_THREADS"] = str(threads)
            folder = ground.folder / f"threads-{threads}"
            with opened(ground.job(MODEL, SEQ_LEN), ground.hardware(), folder, [one]) as executor:
                outcome = trial(executor, one, measure_spec(ground))
            yield {"what": "offload (9)", "how": f"CPU threads: {threads}", **as_row(outcome), EXPECTED: outcome.ok}
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if own is not None:
            os.environ["OMP_NUM_THREADS"] = own
