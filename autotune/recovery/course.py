"""Memory and steps over an attempt's time, in a bounded number of points however long it trains."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_POINTS = 240
FIRST_SECONDS = 1.0  # between points; doubled whenever there are too many

Point = tuple[float, int, int]  # seconds since the attempt began, steps so far, bytes of the worst rank


class Course:
    """The points of one attempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._between, self._next = FIRST_SECONDS, 0.0
        self.points: list[Point] = []

    def note(self, steps: int, worst_bytes: Callable[[], int]) -> None:
        """Add a point if the last one is old enough. `worst_bytes` is only called then."""
        now = self._clock() - self._began
        if now < self._next:
            return
        self.points.append((round(now, 1), steps, worst_bytes()))
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self._between *= 2
        self._next = now + self._between
