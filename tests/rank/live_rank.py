"""A rank that counts the bytes of live tensors, which slows every operator. Predictions of memory are compared with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.rank.devices import LiveTensors
from autotune.rank.measure import MeasureRequest, StepParts, measure_as
from autotune.rank.model_rank import ModelRank


class PeakTensors(LiveTensors):
    """Live tensors with the most bytes since `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.watch = 0, self._raise

    def _raise(self, now: int) -> None:
        self.peak = max(self.peak, now)

    def reset_peak(self) -> None:
        self._settle()
        self.peak = self.bytes


class LiveRank(ModelRank):
    """Write `live_bytes` of each measurement next to the rank's log."""

    def _build(self) -> None:
        self.live = PeakTensors()
        self.live.__enter__()
        self.live_bytes: dict[str, int] = {}  # peak per phase of the current step, and the lowest value between phases
        self.live_steps: list[dict[str, int]] = []  # the same values of earlier steps
        super()._build()

    def _timed_steps(self, batches: Iterator[Any], request: MeasureRequest, pace: float) -> list[StepParts]:
        self.live_steps = []
        return super()._timed_steps(batches, request, pace)

    def _whole_step(self, batches: Iterator[Any], request: MeasureRequest) -> StepParts:
        before = len(self.live_steps)
        parts = super()._whole_step(batches, request)
        del self.live_steps[before:-1]  # steps that DeepSpeed skipped
        # Steps differ only in buffers that a communication thread releases late: on a busy machine, gloo's keeps a bucket
        # into the next phase.
        lowest = {phase: min(step[phase] for step in self.live_steps) for phase in self.live_steps[0]}
        Path(self.spec["log"]).with_name(f"live{self.number}.json").write_text(json.dumps(lowest))
        return parts

    def _step(self, batches: Iterator[Any], request: MeasureRequest) -> StepParts:
        parts = super()._step(batches, request)
        self.live_steps.append(self.live_bytes)
        self.live_bytes = {}
        return parts

    def _note_memory(self) -> None:
        super()._note_memory()
        phase = str(self.phase)
        self.live_bytes[phase] = max(self.live_bytes.get(phase, 0), self.live.peak)
        self.live.reset_peak()
        self.live_bytes["rest"] = min(self.live_bytes.get("rest", self.live.bytes), self.live.bytes)


@contextmanager
def live_ranks() -> Iterator[None]:
    """Have executors start such ranks during the block."""
    from autotune.executors import local

    with mock.patch.object(local, "MODEL_RANK", LiveRank.__module__):
        yield


def live_bytes(folder: str | Path | None) -> dict[str, int]:
    """The bytes by phase of the rank with the most, in the last measurement of a trial whose logs are in the folder."""
    each = [json.loads(path.read_text()) for path in Path(folder or "").glob("live*.json")]
    return max(each, key=lambda by_phase: max(by_phase.values()), default={})


become = partial(measure_as, LiveRank)
