"""What a search proposes, and with what it may begin: a candidate that was good elsewhere, believed or not, never trusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.predict.knobs import Floats
from autotune.problem.candidate import Candidate
from autotune.search.beliefs import Forecast

SURE = 0.5  # probability of fitting; that it fitted elsewhere speaks for it, too
# Of its own prediction, below the candidate that is worth the most. With 1.0 a right start finds a good config in 1.2 trials
# instead of 2.8 (3.7 without any), and a wrong one costs up to 0.8 trials (benchmarks/gallery_starts.py).
WITHIN_SIGMAS = 0.1


@dataclass(frozen=True)
class Proposal:
    """A candidate to measure, and why."""

    candidate: Candidate
    note: str


class Start:
    """One that waits for its turn: the first trial, or the second where the first has changed what is believed."""

    def __init__(self, candidate: Candidate, note: str) -> None:
        self.candidate, self.note = candidate, note
        self.tried = False

    def believed(self, at: int, forecast: Forecast, worth: Floats) -> bool:
        """Whether measuring it teaches no less than measuring what is worth the most: it is predicted to fit, and to be as
        fast within the prediction's doubt.

        Args:
            at: its place among the candidates.
            worth: of each candidate, minus infinity where it is ruled out.
        """
        reach = forecast.logs[at] + WITHIN_SIGMAS * forecast.sigma[at]
        return bool(np.isfinite(worth[at]) and forecast.fits[at] >= SURE and reach >= forecast.logs[worth.argmax()])
