"""Cost of the memory monitor for a step: at its own rate and at 100 Hz, in turn in one engine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing

from autotune.workers.memory_monitor import Meter
from autotune.workers.memory_peaks import MemoryPeaks
from benchmarks.gpu.ground import Ground, Row
from benchmarks.gpu.rows import DEADLINE_SECONDS, as_row, candidate, measure_spec
from benchmarks.trials.ranks import opened

MODEL, SEQ_LEN = "smollm2-360m", 1024


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
    one = candidate(ground, 2, 4)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with opened(ground.job(MODEL, SEQ_LEN), ground.hardware(), ground.folder / "gauge", [one]) as executor:
        executor.meter = meter = Switched(executor.meter)
        with closing(executor.session(one, "gauge")) as session:
            for number in range(ground.choose(8, 2)):
                meter.hasty = number % 2 == 1
                outcome = session.measure(one, measure_spec(ground), DEADLINE_SECONDS)
                yield {"what": "gauge", "how": f"every {meter.interval_seconds} s", **as_row(outcome)}
                if outcome.measurement is None:
                    return
                seconds[meter.hasty].append(outcome.measurement.step_seconds)
    ratio = statistics.median(hasty / calm for calm, hasty in zip(seconds[False], seconds[True], strict=True))
    yield {"what": "gauge", "how": "step at 100 Hz / at its own rate", "ratio": ratio}
