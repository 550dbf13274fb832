"""Predict unmeasured candidates from measurements alone, with a Gaussian process that has no knowledge of training.

The search uses this model if measurements refute the predictor. The weight of second-order knobs is fitted with the
other scales, by maximum posterior probability.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Floats, Places
from autotune.problem.candidate import Candidate, Value
from autotune.search.factors import is_first_order

UNKNOWN = 3.0  # prior standard deviation of the mean, large because the mean is unknown
DOUBLING = 0.4  # feature distance between two sizes of a first-order knob that differ by a factor of two
REPEAT = 0.03  # standard deviation of a logarithm between two measurements
LEAST = 0.005  # smallest standard deviation of a prediction
MOST_POINTS = 128  # latest measurements; older ones add little information and much computation
AMPLITUDES = (0.15, 0.4, 1.0)  # standard deviation of the logarithm over first-order knobs, choices of the fit
SECOND_ORDER = (0.1, 0.3, 1.0)  # weight of a second-order knob relative to a first-order one, choices of the fit
LINEAR = 0.7  # share of the amplitude that is additive over knobs
_BLOCK = 1024  # rows; arrays of this length stay in a processor's cache


class Surrogate:
    """Gaussian process for the logarithm of one quantity of the candidates."""

    def __init__(self, first: Floats, second: Floats) -> None:
        """Store the features.

        Args:
            first: (n, features) of first-order knobs, from `features`.
            second: (n, features) of second-order knobs.
        """
        self._first, self._second = first, second
        self._at: list[int] = []
        self._seen: list[float] = []
        self._fitted: tuple[float, float, Floats, Floats, float] | None = None

    def __len__(self) -> int:
        return len(self._at)

    def observe(self, at: int, value: float) -> None:
        """Add the measured logarithm of the candidate at this place."""
        self._at.append(at)
        self._seen.append(value)
        self._fitted = None

    def predict(self, rows: Places | None = None) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of the logarithm for the candidates at these places, or for all."""
        amplitude, share, inverse, weights, mean = self._fitted or self._fit()
        places: Places = np.arange(len(self._first)) if rows is None else rows
        expected, spread = np.empty(len(places)), np.empty(len(places))
        for block in range(0, len(places), _BLOCK):
            some = slice(block, block + _BLOCK)
            near = self._kernel(places[some], np.array(self._at[-MOST_POINTS:]), amplitude, share)
            own = self._own(places[some], amplitude, share)
            expected[some] = mean + near @ weights
            spread[some] = own - np.einsum("ij,ij->i", near @ inverse, near)
        return expected, np.sqrt(np.maximum(spread, LEAST**2))

    def _fit(self) -> tuple[float, float, Floats, Floats, float]:
        """Choose the most probable scales and compute the matrices for predictions."""
        at, seen = np.array(self._at[-MOST_POINTS:]), np.array(self._seen[-MOST_POINTS:])
        mean = float(np.median(seen))
        likeliest, scales = -math.inf, (AMPLITUDES[0], SECOND_ORDER[0])
        for amplitude, share in itertools.product(AMPLITUDES, SECOND_ORDER):
            # A Cholesky factor gives the likelihood in a third of the time of an inverse, which is needed only for the
            # chosen scales.
            factor = np.linalg.cholesky(self._covariance(at, amplitude, share))
            likely = -0.5 * float(np.sum(np.linalg.solve(factor, seen - mean) ** 2)) - float(
                np.log(factor.diagonal()).sum()
            )
            # prior: typical scales of training knobs
            likely -= 0.5 * math.log(amplitude / 0.4) ** 2 + 0.5 * math.log(share / 0.2) ** 2
            if likely > likeliest:
                likeliest, scales = likely, (amplitude, share)
        inverse: Floats = np.asarray(np.linalg.inv(self._covariance(at, *scales)), dtype=np.float64)
        self._fitted = (*scales, inverse, inverse @ (seen - mean), mean)
        return self._fitted

    def _covariance(self, at: Places, amplitude: float, share: float) -> Floats:
        """Return the covariance of measurements at these places, including measurement noise."""
        return self._kernel(at, at, amplitude, share) + REPEAT**2 * np.eye(len(at))

    def _kernel(self, a: Places, b: Places, amplitude: float, share: float) -> Floats:
        """Return covariances, (len(a), len(b)).

        Similar candidates differ little, and each knob has an additive effect.
        """
        products = self._first[a] @ self._first[b].T + share**2 * (self._second[a] @ self._second[b].T)
        squares = [(self._first[x] ** 2).sum(1) + share**2 * (self._second[x] ** 2).sum(1) for x in (a, b)]
        apart = products - 0.5 * squares[0][:, None] - 0.5 * squares[1][None, :]
        return np.asarray(UNKNOWN**2 + amplitude**2 * (np.exp(np.minimum(apart, 0.0)) + LINEAR**2 * products))

    def _own(self, a: Places, amplitude: float, share: float) -> Floats:
        square = (self._first[a] ** 2).sum(1) + share**2 * (self._second[a] ** 2).sum(1)
        return np.asarray(UNKNOWN**2 + amplitude**2 * (1.0 + LINEAR**2 * square))


def features(candidates: Sequence[Candidate]) -> tuple[Floats, Floats]:
    """Return first-order and second-order features, (n, features) each, centred at zero.

    A number becomes its logarithm, a choice one column per value. A missing number becomes the mean.
    """
    first: list[Floats] = []
    second: list[Floats] = []
    for name in sorted({name for candidate in candidates for name in candidate.as_dict}):
        values = [candidate.get(name) for candidate in candidates]
        columns = _sizes(values) if _are_sizes(values) else _choices(values)
        if is_first_order(name):
            first += columns
        else:
            reach = max((float(np.ptp(column)) for column in columns), default=0.0)
            second += [column / max(1.0, reach) for column in columns]
    return _beside(first, len(candidates)), _beside(second, len(candidates))


def _are_sizes(values: Sequence[Value | None]) -> bool:
    there = {value for value in values if value is not None}
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in there) and max(there, default=0) > 3  # type: ignore[type-var, operator]


def _sizes(values: Sequence[Value | None]) -> list[Floats]:
    logs = np.array([math.nan if v is None else DOUBLING * math.log2(max(float(v), 1e-9)) for v in values])
    middle = float(np.nanmean(logs))
    return [np.where(np.isnan(logs), 0.0, logs - middle)]


def _choices(values: Sequence[Value | None]) -> list[Floats]:
    kinds = list(dict.fromkeys(values))
    ones = [np.array([value == kind for value in values], dtype=np.float64) for kind in kinds]
    return [one - one.mean() for one in ones] if len(kinds) > 1 else []


def _beside(columns: list[Floats], rows: int) -> Floats:
    return np.array(columns, dtype=np.float64).T if columns else np.zeros((rows, 0))
