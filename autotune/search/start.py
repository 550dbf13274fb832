"""Proposals, and an optional start candidate that was good in another study. The model decides whether it is tried."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.predict.knobs import Floats
from autotune.problem.candidate import Candidate
from autotune.search.beliefs import Forecast

SURE = 0.5  # probability of fitting; lower than usual, because the candidate fitted in another study
# Sigmas of its own prediction by which a start may be below the most valuable candidate. With 1.0 a right start finds a
# good config in 1.2 trials instead of 2.8 (3.7 without a start), and a wrong one costs up to 0.8 trials
# (benchmarks/gallery_starts.py).
WITHIN_SIGMAS = 0.1


@dataclass(frozen=True)
class Proposal:
    """Candidate to measure, and the reason."""

    candidate: Candidate
    note: str


class Start:
    """Start candidate for the first trial, or for the second if the first changes the predictions."""

    def __init__(self, candidate: Candidate, note: str) -> None:
        self.candidate, self.note = candidate, note
        self.tried = False

    def believed(self, at: int, forecast: Forecast, worth: Floats) -> bool:
        """Return True if the candidate is predicted to fit and to be about as fast as the most valuable candidate.

        Args:
            at: place of the candidate.
            forecast: predictions for all candidates.
            worth: (n,) value of each candidate, -inf for excluded ones.
        """
        reach = forecast.logs[at] + WITHIN_SIGMAS * forecast.sigma[at]
        return bool(np.isfinite(worth[at]) and forecast.fits[at] >= SURE and reach >= forecast.logs[worth.argmax()])
