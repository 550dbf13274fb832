"""Which knobs matter most by nature, and which of their levels a study has seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.knobs import FIRST_ORDER

SECOND_ORDER_GAIN = 0.1  # logarithm of what second-order knobs gain, until the study has measured it twice
LEAST_REACH = 0.01
SPREAD = 3  # levels of a size: small, middle and large


def is_first_order(name: str) -> bool:
    """Whether the knob decides much of memory or time whatever the others say; buckets, overlap and the like do not."""
    return name in FIRST_ORDER


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """The first-order settings of a candidate."""
    return tuple(candidate.get(name) for name in FIRST_ORDER)


class Kinds:
    """Which kinds were measured, and what turning second-order knobs has gained in them."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        kinds: dict[tuple[object, ...], int] = {}
        # (n,) each candidate's
        self.of = np.array([kinds.setdefault(kind_of(candidate), len(kinds)) for candidate in candidates])
        self._first = np.full(len(kinds), np.nan)  # logarithms of samples a second
        self._best = np.full(len(kinds), -np.inf)
        self._again = np.zeros(len(kinds), dtype=bool)  # measured with other second-order settings, too
        self._tight = np.zeros(len(kinds), dtype=bool)  # one that was measured ran out when it was verified

    def note(self, at: int, speed: float) -> None:
        """The candidate at this place was measured; its speed is the logarithm of samples a second."""
        kind = self.of[at]
        if math.isnan(self._first[kind]):
            self._first[kind] = speed
        else:
            self._again[kind] = True
        self._best[kind] = max(self._best[kind], speed)

    def note_tight(self, at: int) -> None:
        """The candidate at this place fitted in a search, and not in verification."""
        self._tight[self.of[at]] = True

    @property
    def fitted(self) -> Flags:
        """(n,) whether one of each candidate's kind has fitted, and none did so by chance."""
        return np.asarray(self.measured & ~self._tight[self.of])

    @property
    def measured(self) -> Flags:
        """(n,) whether one of each candidate's kind was measured."""
        return np.asarray(np.isfinite(self._first[self.of]))

    @property
    def reach(self) -> float:
        """What second-order knobs may gain, as a logarithm: twice what they did where they were turned, or usually do."""
        gained = float((self._best[self._again] - self._first[self._again]).sum())
        return max(LEAST_REACH, 2 * (2 * SECOND_ORDER_GAIN + gained) / (2 + int(self._again.sum())))

    @property
    def ceiling(self) -> Floats:
        """(n,) the most that each candidate's speed may come to by second-order knobs; of unmeasured kinds minus infinity."""
        return np.asarray(self._best[self.of] + self.reach)


class Screen:
    """The levels of first-order knobs, each of which is to be seen before second-order ones are turned."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        levels: dict[tuple[str, object], int] = {}
        sizes = sorted({candidate.micro_batch for candidate in candidates})
        columns = []
        for name in FIRST_ORDER:
            if name == ACCUMULATION:
                continue  # follows from the micro-batch, or changes little beside it
            values = [candidate.get(name) for candidate in candidates]
            if name == MICRO_BATCH:
                values = [_third(sizes, candidate.micro_batch) for candidate in candidates]
            columns.append([levels.setdefault((name, value), len(levels)) for value in values])
        self._levels = np.array(columns).T  # (n, factors): the level of each
        self._seen = np.zeros(len(levels), dtype=bool)

    def see(self, at: int) -> None:
        """The candidate at this place was tried."""
        self._seen[self._levels[at]] = True

    def unseen(self) -> Flags:
        """(n,) whether each has a level that was not seen."""
        return np.asarray((~self._seen[self._levels]).any(axis=1))


def _third(sizes: list[int], size: int) -> int:
    """Whether a size is among the small, the middle or the large ones, by its logarithm."""
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    return round((SPREAD - 1) * (math.log(size) - low) / (high - low)) if high > low else 0
