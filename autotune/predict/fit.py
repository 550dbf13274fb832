"""A robust fit of a few constants with priors: one observation already helps, a wrong one cannot wreck it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.knobs import Floats

DEGREES = 4.0  # of Student's t: an observation far off counts little


@dataclass(frozen=True)
class Prior:
    """Of one constant: normal around `mean`."""

    mean: float
    sigma: float


@dataclass
class Posterior:
    """Constants after a fit, with what is not known of them."""

    mean: Floats  # (constants,)
    covariance: Floats  # (constants, constants)
    noise: float  # of one observation, in the residual's unit

    def spread(self, jacobian: Floats) -> Floats:
        """(n,) standard deviations that the constants leave to predictions with these derivatives (n, constants)."""
        square = np.einsum("ij,ij->i", jacobian @ self.covariance, jacobian)
        return np.asarray(np.sqrt(np.maximum(square, 0.0)))


_BLOCK = 1024  # points whose arrays stay in a processor's cache
SETTLED = 1e-4  # constants are logarithms or shares: less of a change decides nothing


def jacobian_of(model: Callable[[Floats], Floats], at: Floats) -> Floats:
    """(n, constants) derivatives by central differences; the model is asked once, with (2 constants, constants)."""
    h = 1e-4 * np.maximum(1.0, abs(at))
    up, down = np.split(model(np.vstack([at + np.diag(h), at - np.diag(h)])), 2)
    return np.asarray((up - down).T / (2 * h))


def fit(
    priors: Sequence[Prior] | Posterior,
    residuals: Callable[[Floats], Floats] | None,
    *,
    noise: float,
    noise_weight: float = 4.0,
    rounds: int = 8,
) -> Posterior:
    """Gauss-Newton towards the most probable constants, observations weighted as Student's t has it.

    Args:
        priors: of each constant, or what an earlier fit has left known of them.
        residuals: (..., observations) at constants (..., constants); a censored one is zero where it agrees.
        noise: standard deviation of one residual as expected before anything is seen.
        noise_weight: how many observations that expectation is worth.
    """
    if isinstance(priors, Posterior):
        mean, precision = priors.mean, np.linalg.inv(priors.covariance)
    else:
        mean, precision = np.array([prior.mean for prior in priors]), _precision(priors)
    prior_mean = mean.copy()
    if residuals is None:
        return Posterior(mean, np.linalg.inv(precision), noise)
    scale = noise
    hessian = precision
    for _ in range(rounds):
        r = residuals(mean)
        jacobian = jacobian_of(residuals, mean)
        typical = float(np.sum(np.minimum(r**2, (6 * noise) ** 2)))
        scale = np.sqrt((noise_weight * noise**2 + typical) / (noise_weight + len(r)))
        weight = (DEGREES + 1) / (DEGREES + (r / scale) ** 2) / scale**2
        hessian = precision + jacobian.T @ (weight[:, None] * jacobian)
        gradient = jacobian.T @ (weight * r) + precision @ (mean - prior_mean)
        step = np.linalg.solve(hessian, gradient)
        mean = mean - np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < SETTLED:
            break
    r = residuals(mean)
    # what the fit could not explain widens every interval, outliers included
    wide = np.sqrt((noise_weight * noise**2 + float(np.sum(r**2))) / (noise_weight + len(r)))
    return Posterior(mean, np.linalg.inv(hessian), float(max(wide, 0.5 * noise)))


@dataclass
class Neighbours:
    """What the fit leaves unexplained, shared among similar points: kriging of its residuals.

    A point close to measured ones takes over their residual and is as certain as they are; one far from all keeps the
    fit's value and its noise.
    """

    at: Floats  # (seen, features)
    weights: Floats  # (seen,)
    inverse: Floats  # (seen, seen)
    amplitude: float

    @classmethod
    def of(cls, at: Floats, residuals: Floats, amplitude: float, repeat: float) -> Neighbours:
        """`amplitude` of what is unexplained, `repeat` of the same point measured twice; both standard deviations."""
        kernel = amplitude**2 * _closeness(at, at) + np.diag(np.full(len(at), repeat**2))
        inverse: Floats = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
        return cls(at, inverse @ residuals, inverse, amplitude)

    def shift(self, points: Floats) -> tuple[Floats, Floats]:
        """(residual expected, its standard deviation) at every point (n, features)."""
        shift, spread = np.empty(len(points)), np.empty(len(points))
        for block in range(0, len(points), _BLOCK):
            rows = slice(block, block + _BLOCK)
            near = _closeness(points[rows], self.at)
            near *= self.amplitude**2
            shift[rows] = near @ self.weights
            spread[rows] = self.amplitude**2 - np.einsum("ij,ij->i", near @ self.inverse, near)
        return shift, np.sqrt(np.maximum(spread, 0.0))


@dataclass(frozen=True)
class Evidence:
    """What observations have told of constants, beside any priors: small enough for a file."""

    mean: list[float]  # (constants,) after the fit
    information: list[
        list[float]
    ]  # (rows, constants); their squares are what observations added to the priors' precision

    @classmethod
    def of(cls, priors: Sequence[Prior], posterior: Posterior) -> Evidence:
        values, vectors = np.linalg.eigh(np.linalg.inv(posterior.covariance) - _precision(priors))
        told = values > _NOTHING * values.max()
        return cls(_short(posterior.mean), _short((vectors[:, told] * np.sqrt(values[told])).T))

    def posterior(self, priors: Sequence[Prior], noise: float) -> Posterior:
        """What is known with it.

        Raises:
            ValueError: it is of other constants than the priors.
        """
        mean, rows = np.array(self.mean), np.array(self.information).reshape(-1, len(priors))
        if len(mean) != len(priors):
            raise ValueError(f"evidence of {len(mean)} constants, not of {len(priors)}")
        return Posterior(mean, np.linalg.inv(_precision(priors) + rows.T @ rows), noise)


_NOTHING = 1e-6  # of the largest: smaller ones are rounding


def _precision(priors: Sequence[Prior]) -> Floats:
    return np.diag([1 / prior.sigma**2 for prior in priors])


def _short(numbers: Floats) -> list[Any]:
    """With five digits."""
    text = np.array([f"{one:.5g}" for one in numbers.ravel()], dtype=float)
    return list(text.reshape(numbers.shape).tolist())


def _closeness(a: Floats, b: Floats) -> Floats:
    """(len(a), len(b)): 1 for equal points, falling with the square of their distance."""
    square = a @ b.T
    square -= 0.5 * (a**2).sum(1)[:, None]
    square -= 0.5 * (b**2).sum(1)[None, :]
    np.minimum(square, 0.0, out=square)
    return np.asarray(np.exp(square, out=square))
