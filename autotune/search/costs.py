"""Estimate trial durations: the expected time for the choice of a candidate, and the time limit."""

from __future__ import annotations

import numpy as np

from autotune.predict.knobs import Floats
from autotune.predict.startup import size_seconds
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Outcome, Phase, Source

STARTUP_SECONDS = 15.0  # engine start before the first measured one
RECENT = 8  # starts that the median covers
# Limit for one step until a trial measures longer steps, so that a wrong estimate cannot give the whole budget to a
# hanging trial.
MOST_STEP_SECONDS = 600.0


class Costs:
    """Durations of a study's trials, in seconds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._starts: list[float] = []
        self._most_step = MOST_STEP_SECONDS
        self._slow_start = 0.0  # seconds; longest start that a tuner's time limit ended

    def observe(self, outcome: Outcome) -> None:
        """Record the duration of an attributable trial."""
        if outcome.measurement is not None:
            self._most_step = max(self._most_step, 4 * outcome.measurement.step_seconds)
        if outcome.kind is Kind.TIMEOUT:
            self.note_slow_start(outcome)
        # studies of earlier versions do not record which trials started an engine
        started = outcome.started or outcome.outside_seconds > 1.0
        if started and outcome.kind in (Kind.OK, Kind.OOM_DEVICE):
            self._starts.append(outcome.outside_seconds)

    def note_slow_start(self, outcome: Outcome) -> None:
        """Raise the start limit of all candidates after a tuner's time limit ended a start."""
        if outcome.phase in (Phase.START, Phase.INIT) and outcome.source is Source.LIMIT:
            self._slow_start = max(self._slow_start, outcome.seconds)

    @property
    def startup_seconds(self) -> float:
        """Expected seconds of an engine start, including warm-up."""
        return float(np.median(self._starts[-RECENT:])) if self._starts else STARTUP_SECONDS

    def measuring_seconds(self, step_seconds: Floats, accumulation: Floats) -> Floats:
        """Return the expected seconds to measure each candidate in a running engine, (n,)."""
        # two warm-up steps, then at least three whole steps, or up to twelve short ones
        if self._job.script is not None:
            return 2 * step_seconds + np.maximum(np.maximum(3 * step_seconds, 1.0), np.minimum(12 * step_seconds, 5.0))
        return step_seconds * np.minimum(4.0, 6.0 / accumulation) + 1.0

    def limit_seconds(self, candidate: Candidate, step_seconds: float, patience: float) -> float:
        """Return the time limit of a trial in seconds, from the candidate's size and earlier trials.

        Args:
            candidate: the candidate.
            step_seconds: predicted upper bound of a step. The limit allows at most MOST_STEP_SECONDS, or four times the
                longest measured step.
            patience: factor on the usual limit.
        """
        measuring = 12 * min(step_seconds, self._most_step) + 30.0
        starting = 4 * max(self._starts, default=STARTUP_SECONDS) + size_seconds(self._job, candidate)
        usual = patience * (starting + measuring)
        # an ended start gives only a lower bound of the start time
        return max(usual, 3 * self._slow_start + measuring if self._slow_start else 0.0)
