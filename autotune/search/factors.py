"""Track first-order knobs: which of their levels and combinations a study has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.knobs import FIRST_ORDER

SECOND_ORDER_GAIN = 0.1  # logarithm; prior gain of second-order knobs, until the study has measured it twice
LEAST_REACH = 0.01
SPREAD = 3  # levels of a size: small, middle and large


def is_first_order(name: str) -> bool:
    """Return True if the knob determines much of memory or time at any setting of the others.

    Buckets, overlap and similar knobs do not.
    """
    return name in FIRST_ORDER


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """Return the first-order settings of a candidate."""
    return tuple(candidate.get(name) for name in FIRST_ORDER)


class Kinds:
    """Measured combinations of first-order settings ("kinds"), and the gain from second-order knobs in each."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        kinds: dict[tuple[object, ...], int] = {}
        # (n,) the kind of each candidate
        self.of = np.array([kinds.setdefault(kind_of(candidate), len(kinds)) for candidate in candidates])
        self._first = np.full(len(kinds), np.nan)  # log of samples per second, by kind
        self._best = np.full(len(kinds), -np.inf)
        self._again = np.zeros(len(kinds), dtype=bool)  # measured with several second-order settings
        self._tight = np.zeros(len(kinds), dtype=bool)  # a measured candidate failed in verification

    def note(self, at: int, speed: float) -> None:
        """Record a measurement of the candidate at this place; `speed` is the log of samples per second."""
        kind = self.of[at]
        if math.isnan(self._first[kind]):
            self._first[kind] = speed
        else:
            self._again[kind] = True
        self._best[kind] = max(self._best[kind], speed)

    def note_tight(self, at: int) -> None:
        """Record that the candidate at this place fitted in a search but not in verification."""
        self._tight[self.of[at]] = True

    @property
    def fitted(self) -> Flags:
        """Return whether each candidate's kind has fitted, and none of it failed in verification, (n,)."""
        return np.asarray(self.measured & ~self._tight[self.of])

    @property
    def measured(self) -> Flags:
        """Return whether each candidate's kind was measured, (n,)."""
        return np.asarray(np.isfinite(self._first[self.of]))

    @property
    def reach(self) -> float:
        """Largest expected gain from second-order knobs, as a logarithm.

        The value is twice the mean of the measured gains and the prior gain, which counts twice.
        """
        gained = float((self._best[self._again] - self._first[self._again]).sum())
        return max(LEAST_REACH, 2 * (2 * SECOND_ORDER_GAIN + gained) / (2 + int(self._again.sum())))

    @property
    def ceiling(self) -> Floats:
        """Return the upper bound of each candidate's log speed with other second-order knobs, (n,).

        The bound of an unmeasured kind is -inf.
        """
        return np.asarray(self._best[self.of] + self.reach)


class Screen:
    """Coverage of the levels of first-order knobs, each of which is tried before second-order knobs are varied."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        levels: dict[tuple[str, object], int] = {}
        sizes = sorted({candidate.micro_batch for candidate in candidates})
        columns = []
        for name in FIRST_ORDER:
            if name == ACCUMULATION:
                continue  # follows from the micro-batch, or has a small effect next to it
            values = [candidate.get(name) for candidate in candidates]
            if name == MICRO_BATCH:
                values = [_third(sizes, candidate.micro_batch) for candidate in candidates]
            columns.append([levels.setdefault((name, value), len(levels)) for value in values])
        self._levels = np.array(columns).T  # (n, factors): the level of each
        self._seen = np.zeros(len(levels), dtype=bool)

    def see(self, at: int) -> None:
        """Mark the levels of the candidate at this place as tried."""
        self._seen[self._levels[at]] = True

    def unseen(self) -> Flags:
        """Return whether each candidate has an untried level, (n,)."""
        return np.asarray((~self._seen[self._levels]).any(axis=1))


def _third(sizes: list[int], size: int) -> int:
    """Return 0, 1 or 2 for a small, middle or large size, on a log scale."""
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    return round((SPREAD - 1) * (math.log(size) - low) / (high - low)) if high > low else 0
