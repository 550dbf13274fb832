"""What trials take: as it is expected when one is chosen, and at the most before it is ended."""

from __future__ import annotations

import numpy as np

from autotune.predict.knobs import Floats
from autotune.predict.startup import size_seconds
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Outcome, Phase, Source

STARTUP_SECONDS = 15.0  # an engine's start, until one was measured
RECENT = 8  # starts
# Of a step, before any trial says that steps take longer: no estimate, however wrong, gives a trial that hangs the whole budget.
MOST_STEP_SECONDS = 600.0


class Costs:
    """Seconds of a study's trials."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._starts: list[float] = []
        self._most_step = MOST_STEP_SECONDS
        self._slow_start = 0.0  # that an engine had been starting when a limit of ours ended it

    def observe(self, outcome: Outcome) -> None:
        """Takes in a trial that says something of its candidate."""
        if outcome.measurement is not None:
            self._most_step = max(self._most_step, 4 * outcome.measurement.step_seconds)
        if outcome.kind is Kind.TIMEOUT:
            self.note_slow_start(outcome)
        # a study of an earlier version does not say which trials started an engine
        started = outcome.started or outcome.outside_seconds > 1.0
        if started and outcome.kind in (Kind.OK, Kind.OOM_DEVICE):
            self._starts.append(outcome.outside_seconds)

    def note_slow_start(self, outcome: Outcome) -> None:
        """A limit of ours has ended the trial: what still was starting raises what all others have to start."""
        if outcome.phase in (Phase.START, Phase.INIT) and outcome.source is Source.LIMIT:
            self._slow_start = max(self._slow_start, outcome.seconds)

    @property
    def startup_seconds(self) -> float:
        """Of another engine, its warm-up included."""
        return float(np.median(self._starts[-RECENT:])) if self._starts else STARTUP_SECONDS

    def measuring_seconds(self, step_seconds: Floats, accumulation: Floats) -> Floats:
        """Of candidates once their engine runs."""
        if self._job.script is not None:  # whole steps, two to warm up and at least three; of short ones a dozen
            return 2 * step_seconds + np.maximum(np.maximum(3 * step_seconds, 1.0), np.minimum(12 * step_seconds, 5.0))
        return step_seconds * np.minimum(4.0, 6.0 / accumulation) + 1.0

    def limit_seconds(self, candidate: Candidate, step_seconds: float, patience: float) -> float:
        """What a trial of the candidate may take at the most, by its size and by what others took.

        Args:
            step_seconds: what its step should not exceed; more than MOST_STEP_SECONDS, or four times what one took,
                is not waited for.
            patience: a factor on what is usual.
        """
        measuring = 12 * min(step_seconds, self._most_step) + 30.0
        starting = 4 * max(self._starts, default=STARTUP_SECONDS) + size_seconds(self._job, candidate)
        usual = patience * (starting + measuring)
        # what was ended while it started shows only that starting takes longer than that
        return max(usual, 3 * self._slow_start + measuring if self._slow_start else 0.0)
