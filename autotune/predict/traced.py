"""Predictor of a job that this process may run: its model is traced in a process of its own if no trace is known."""

from __future__ import annotations

from autotune.predict.passes import Trace
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job


def traced_predictor(job: Job, hardware: Hardware, trace: Trace | None = None) -> Predictor:
    """Return a predictor that traces what it has to.

    Raises:
        UserError: the job names no model that could be built, or is a study's (`problem.recorded`) and was not accepted.
    """
    known = trace if trace is not None else trace_job(job, device=hardware.device)
    return Predictor(job, hardware, known, trace_job)
