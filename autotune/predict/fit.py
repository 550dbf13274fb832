"""A robust fit of a few constants with priors. One observation already helps, and a wrong one cannot dominate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.knobs import Floats

DEGREES = 4.0  # degrees of freedom of Student's t: a far outlier counts little


@dataclass(frozen=True)
class Prior:
    """Normal prior of one constant."""

    mean: float
    sigma: float


@dataclass
class Posterior:
    """Constants after a fit, with their uncertainty."""

    mean: Floats  # (constants,)
    covariance: Floats  # (constants, constants)
    noise: float  # standard deviation of one observation, in the residual's unit

    def spread(self, jacobian: Floats) -> Floats:
        """Return (n,) standard deviations that the constants leave to predictions with the derivatives `jacobian` (n,
        constants)."""
        square = np.einsum("ij,ij->i", jacobian @ self.covariance, jacobian)
        return np.asarray(np.sqrt(np.maximum(square, 0.0)))


_BLOCK = 1024  # points per block, so that its arrays stay in a processor's cache
SETTLED = 1e-4  # largest step at convergence; constants are logarithms or shares, so smaller changes decide nothing


def jacobian_of(model: Callable[[Floats], Floats], at: Floats) -> Floats:
    """Return (n, constants) derivatives by central differences. The model is called once, with (2 constants, constants)."""
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
    """Find the most probable constants by Gauss-Newton, with Student's t weights for the observations.

    Args:
        priors: prior of each constant, or the posterior of an earlier fit.
        residuals: (..., observations) at constants (..., constants); a censored residual is zero if it agrees.
        noise: expected standard deviation of one residual before any observation.
        noise_weight: number of observations that this expectation counts for.
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
    # Residuals that the fit could not explain widen every interval, outliers included.
    wide = np.sqrt((noise_weight * noise**2 + float(np.sum(r**2))) / (noise_weight + len(r)))
    return Posterior(mean, np.linalg.inv(hessian), float(max(wide, 0.5 * noise)))


@dataclass
class Neighbours:
    """Kriging of the fit's residuals: similar points share what the fit leaves unexplained.

    A point close to measured ones takes over their residual and their certainty. A point far from all keeps the fit's value
    and its noise.
    """

    at: Floats  # (seen, features)
    weights: Floats  # (seen,)
    inverse: Floats  # (seen, seen)
    amplitude: float

    @classmethod
    def of(cls, at: Floats, residuals: Floats, amplitude: float, repeat: float) -> Neighbours:
        """Build from residuals.

        Args:
            at: (seen, features) points that were measured.
            residuals: (seen,).
            amplitude: standard deviation of the unexplained part.
            repeat: standard deviation of the same point measured twice.
        """
        kernel = amplitude**2 * _closeness(at, at) + np.diag(np.full(len(at), repeat**2))
        inverse: Floats = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
        return cls(at, inverse @ residuals, inverse, amplitude)

    def shift(self, points: Floats) -> tuple[Floats, Floats]:
        """Return (expected residual, its standard deviation) at every point (n, features)."""
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
    """Information that observations gave about constants, without any priors. Small enough for a file."""

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
        """Return the posterior of these priors with this evidence.

        Raises:
            ValueError: the number of constants differs.
        """
        mean, rows = np.array(self.mean), np.array(self.information).reshape(-1, len(priors))
        if len(mean) != len(priors):
            raise ValueError(f"evidence of {len(mean)} constants, not of {len(priors)}")
        return Posterior(mean, np.linalg.inv(_precision(priors) + rows.T @ rows), noise)


_NOTHING = 1e-6  # share of the largest eigenvalue; smaller ones are rounding


def _precision(priors: Sequence[Prior]) -> Floats:
    return np.diag([1 / prior.sigma**2 for prior in priors])


def _short(numbers: Floats) -> list[Any]:
    """Round to five digits."""
    text = np.array([f"{one:.5g}" for one in numbers.ravel()], dtype=float)
    return list(text.reshape(numbers.shape).tolist())


def _closeness(a: Floats, b: Floats) -> Floats:
    """Return (len(a), len(b)) similarities: 1 for equal points, falling with the square of their distance."""
    square = a @ b.T
    square -= 0.5 * (a**2).sum(1)[:, None]
    square -= 0.5 * (b**2).sum(1)[None, :]
    np.minimum(square, 0.0, out=square)
    return np.asarray(np.exp(square, out=square))
