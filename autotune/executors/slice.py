"""Node slice: `--nodes N` on one machine, with predictions for the parts that are not measured.

The ranks of a slice have a process group of the full world size that transfers nothing (`rank/base.py`). DeepSpeed
therefore allocates and computes the slice's share of the full job. Communication time is predicted and added. See
docs/nodes.md.
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
    """Adds predicted communication to a slice's measurement.

    Its predictor does not learn, so that all trials are treated alike.

    Args:
        job: the job.
        hardware: all nodes.
    """

    def __init__(self, job: Job, hardware: Hardware) -> None:
        self._predictor = traced_predictor(job, hardware)
        alone, together = overhead_prior(hardware, 1).mean, overhead_prior(hardware, hardware.count).mean
        self._nccl_bytes = int((together - alone) * GIB)

    def complete(self, candidate: Candidate, measured: Measurement) -> Measurement:
        """Return a slice's measurement plus predicted communication seconds and NCCL memory."""
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
        """Complete the measurement of an outcome, if it has one."""
        if outcome.measurement is None:
            return outcome
        measured = self.complete(candidate, outcome.measurement)
        return dataclasses.replace(outcome, measurement=measured, peak_bytes=measured.peak_bytes)
