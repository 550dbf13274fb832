"""`--nodes N` on one machine: what is not measured of a trial whose ranks are a slice of N machines' (see docs/nodes.md).

Ranks of a slice have a process group that says it is the whole one and carries nothing (`rank/base.py`). So DeepSpeed
allocates, and computes, what it would as a part of all ranks; what ranks would wait for each other is predicted, and added.
"""

from __future__ import annotations

import dataclasses

from autotune.predict.constants import overhead_prior
from autotune.predict.traced import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome
from autotune.units import GIB


class Rest:
    """What all nodes together would add. Its predictor learns nothing of trials, so that all of them get the same.

    Args:
        hardware: of all nodes.
    """

    def __init__(self, job: Job, hardware: Hardware) -> None:
        self._predictor = traced_predictor(job, hardware)
        alone, together = overhead_prior(hardware, 1).mean, overhead_prior(hardware, hardware.count).mean
        self._nccl_bytes = int((together - alone) * GIB)

    def complete(self, candidate: Candidate, measured: Measurement) -> Measurement:
        """A Measurement of a slice as one of the whole job: with the seconds that communication adds, and NCCL's memory."""
        seconds = float(self._predictor.predict_many([candidate])[0].time["communication"])
        step_seconds = measured.step_seconds + seconds
        pace = measured.step_seconds / step_seconds
        rates = {
            name: value * pace
            for name in ("samples_per_second", "tokens_per_second", "model_tflops_per_gpu", "mfu")
            if (value := getattr(measured, name)) is not None
        }
        peak_bytes = measured.peak_bytes + self._nccl_bytes
        return dataclasses.replace(
            measured, step_seconds=step_seconds, peak_bytes=peak_bytes, predicted_seconds=seconds, **rates
        )

    def completed(self, candidate: Candidate, outcome: Outcome) -> Outcome:
        """The same of an Outcome, where there is a Measurement in it."""
        if outcome.measurement is None:
            return outcome
        measured = self.complete(candidate, outcome.measurement)
        return dataclasses.replace(outcome, measurement=measured, peak_bytes=measured.peak_bytes)
