"""Belief about untried candidates: speed and peak memory, from the predictor and a study's measurements.

Two explanations compete for each quantity, as a logarithm: the calibrated predictor with an error that similar candidates
share, and the measurements alone. Either is a Gaussian process over the knobs (`KnobKernel`) with an unknown amplitude. The
forecast averages all of them by their posterior probability (Hoeting et al., "Bayesian model averaging: a tutorial",
Statistical Science 1999), so a predictor that measurements contradict loses its weight without a rule that rejects it.

`benchmarks/search/search.py` shows the effect of each constant, on recorded tables and with predictors that are wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from autotune.predict.features import Flags, Floats
from autotune.predict.predictor import Predictor, Table
from autotune.predict.step_time import host_limit_bytes
from autotune.predict.zero_memory import saved_bytes
from autotune.problem.candidate import Candidate, Value
from autotune.problem.knobs import FIRST_ORDER

# -- knobs -------------------------------------------------------------------------------------------------------------

KNOB_SIGMA = 0.1  # standard deviation of measured minus predicted effects of turning one knob, as logarithms of speed
SECOND_ORDER = 0.2  # factor on the standard deviations of second-order knobs
ALIKE = 0.35  # correlation of effects that depend on other knobs, between two values of one knob
_MISSING = -50.0  # stands for the logarithm of a size that a candidate lacks; far from all others


class KnobKernel:
    """Covariances between candidates of an error in the logarithm of a speed, at amplitude 1.

    Each knob has an additive effect. Further effects depend on several knobs, and together vary as much as all single ones.
    Those of first-order knobs do not depend on others. Sizes of one knob are alike if their ratio is small, and their effects
    also have a trend per doubling. Values of a choice are not alike.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        names = sorted({name for candidate in candidates for name, _ in candidate.knobs})
        columns = {name: [candidate.get(name) for candidate in candidates] for name in names}
        varying = {name: _Knob.of(name, values) for name, values in columns.items() if len(set(values)) > 1}
        first = [knob for name, knob in varying.items() if name in FIRST_ORDER]
        second = [knob for name, knob in varying.items() if name not in FIRST_ORDER]
        self._orders = [(KNOB_SIGMA**2, first), ((SECOND_ORDER * KNOB_SIGMA) ** 2, second)]
        self._count = len(candidates)
        self._columns: dict[int, Floats] = {}

    @functools.cached_property
    def variances(self) -> Floats:
        """Return the variance of each candidate's error, (n,)."""
        found = np.zeros(self._count)
        for variance, knobs in self._orders:
            found += sum((variance * (2 + knob.trend**2) for knob in knobs), np.zeros(self._count))
        return found

    def covariances(self, places: Sequence[int]) -> Floats:
        """Return the covariances of all candidates with those at these places, (n, places)."""
        if not places:
            return np.zeros((self._count, 0))
        return np.stack([self._column(place) for place in places], axis=-1)

    def _column(self, place: int) -> Floats:
        if place not in self._columns:
            found, joint = np.zeros(self._count), np.ones(self._count)
            for variance, knobs in self._orders:
                for knob in knobs:
                    alike = knob.likeness(place)
                    found += variance * (alike + knob.trend * knob.trend[place])
                    joint *= ALIKE + (1 - ALIKE) * alike
                found += variance * len(knobs) * joint
            self._columns[place] = found
        return self._columns[place]


@dataclass(frozen=True)
class _Knob:
    is_size: bool
    codes: Floats  # (n,) log2 of a size, or the number of a choice
    trend: Floats  # (n,) doublings above the mean size; 0 for a choice, and without a size

    @classmethod
    def of(cls, name: str, values: Sequence[Value | None]) -> _Knob:
        given = [value for value in values if value is not None]
        if name != "zero_stage" and all(_is_number(value) for value in given):
            logs = np.array([math.nan if value is None else math.log2(max(float(value), 1e-9)) for value in values])
            return cls(True, np.nan_to_num(logs, nan=_MISSING), np.nan_to_num(logs - np.nanmean(logs)))
        _, codes = np.unique([str(value) for value in values], return_inverse=True)
        return cls(False, codes.astype(np.float64), np.zeros(len(values)))

    def likeness(self, place: int) -> Floats:
        """Return the correlation of each candidate's effect of the knob with that at a place, (n,)."""
        apart = np.abs(self.codes - self.codes[place])
        if self.is_size:
            return np.asarray(np.exp(-apart / 2))
        return np.asarray(apart == 0, dtype=np.float64)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- one quantity ------------------------------------------------------------------------------------------------------

AMPLITUDES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # factors on the standard deviations of effects
PREDICTOR_AMPLITUDE, ALONE_AMPLITUDE = 0.5, 4.0  # medians of the amplitude's log-normal prior, with a sigma of 1
OFFSET_SIGMA, UNKNOWN_SIGMA = 0.1, 3.0  # of an error that all candidates share, with and without the predictor
CALL_SIGMA = 0.3  # of the change of a machine's speed between two calls, as a logarithm
# latest measurements; older ones add little information and much time (`benchmarks/search/proposer.py`)
MOST_POINTS = 64


@dataclass(frozen=True)
class Mixture:
    """Weighted normal distributions of the logarithm of one quantity, for n candidates."""

    log_weights: Floats  # (explanations,), up to a constant
    means: Floats  # (explanations, n)
    sigmas: Floats  # (explanations, n)
    predicts: Flags  # (explanations,) those of the predictor; the others are those of the measurements alone

    @property
    def weights(self) -> Floats:
        """Return the probability of each explanation, (explanations,)."""
        shares = np.exp(self.log_weights - self.log_weights.max())
        return np.asarray(shares / shares.sum())

    @property
    def trust(self) -> float:
        """Return the probability of the predictor's explanations."""
        return float(self.weights[self.predicts].sum())

    @property
    def of_measurements(self) -> Mixture:
        """Return the belief by measurements alone, whatever is predicted; the whole belief if it has no such explanation."""
        if self.predicts.all():
            return self
        alone = ~self.predicts
        return Mixture(self.log_weights[alone], self.means[alone], self.sigmas[alone], self.predicts[alone])

    @property
    def mean(self) -> Floats:
        """Return the mean, (n,)."""
        return np.asarray(self.weights @ self.means)

    @property
    def sigma(self) -> Floats:
        """Return the standard deviation, (n,)."""
        second = self.weights @ (self.sigmas**2 + self.means**2)
        return np.asarray(np.sqrt(np.maximum(second - self.mean**2, 1e-12)))

    def probability_below(self, limit: Floats | float) -> Floats:
        """Return the probability of a value below `limit`, a logarithm, (n,)."""
        return np.asarray(self.weights @ normal_cdf((limit - self.means) / self.sigmas))

    def expected_gain(self, best: float) -> Floats:
        """Return the expected improvement E[max(0, value - best)], (n,)."""
        return np.asarray(self.weights @ expected_gain(self.means - best, self.sigmas))


@dataclass(frozen=True)
class Point:
    """A known value of one quantity."""

    place: int  # of the candidate
    value: float  # logarithm
    sigma: float  # standard deviation of `value`
    call: int = 0  # number of the call that measured it; 0 for the current one


def explain(
    kernel: KnobKernel,
    predicted: Floats,
    points: Sequence[Point],
    *,
    least: Mapping[int, float] = MappingProxyType({}),
    scale: float = 1.0,
    alone: bool = True,
) -> Mixture:
    """Return the belief about a quantity.

    Args:
        predicted: (n,) logarithms by the calibrated predictor.
        points: known values.
        least: lower bounds of unknown values, by place.
        scale: standard deviations of effects on this quantity, relative to those on speed.
        alone: the measurements alone are as probable an explanation, a priori, as the predictor.
    """
    points = points[-MOST_POINTS:]
    found = [_regressed(kernel, predicted, PREDICTOR_AMPLITUDE, OFFSET_SIGMA * scale, scale, points, least)]
    if alone:
        average = np.full_like(predicted, predicted.mean())
        found.append(_regressed(kernel, average, ALONE_AMPLITUDE, UNKNOWN_SIGMA, scale, points, least))
    return Mixture(
        np.concatenate([one.log_weights for one in found]),
        np.vstack([one.means for one in found]),
        np.vstack([one.sigmas for one in found]),
        np.repeat([True, False][: len(found)], len(AMPLITUDES)),
    )


def _regressed(
    kernel: KnobKernel,
    prior_mean: Floats,
    usual_amplitude: float,
    offset_sigma: float,
    scale: float,
    points: Sequence[Point],
    least: Mapping[int, float],
) -> Mixture:
    """Return one explanation: a Gaussian process of each amplitude, weighted by its likelihood."""
    if least:
        known = _regressed(kernel, prior_mean, usual_amplitude, offset_sigma, scale, points, {})
        mean, sigma = known.mean, known.sigma
        bounds = [above(bound, float(mean[at]), float(sigma[at]), at) for at, bound in least.items()]
        telling = [one for one in bounds if one.sigma < _MOST_SIGMAS * sigma[one.place]]
        points = [*telling, *points][-MOST_POINTS:]
    places = [point.place for point in points]
    covariances = kernel.covariances(places)
    values = np.array([point.value for point in points])
    noise = np.diag([point.sigma**2 for point in points]) + _of_calls(points)
    log_weights, means, sigmas = [], [], []
    for amplitude in AMPLITUDES:
        share = (amplitude * scale) ** 2
        of_points = share * covariances[places] + offset_sigma**2 + noise
        inverse = np.linalg.inv(np.linalg.cholesky(of_points + 1e-9 * np.eye(len(points))))
        residual = inverse @ (values - prior_mean[places])
        likelihood = float(np.log(inverse.diagonal()).sum() - 0.5 * residual @ residual)
        log_weights.append(likelihood - 0.5 * math.log(amplitude / usual_amplitude) ** 2)
        known_by = inverse @ (share * covariances.T + offset_sigma**2)
        means.append(prior_mean + residual @ known_by)
        variances = share * kernel.variances + offset_sigma**2
        sigmas.append(np.sqrt(np.maximum(variances - (known_by**2).sum(0), 1e-6)))
    found = Mixture(np.array(log_weights), np.array(means), np.array(sigmas), np.ones(len(AMPLITUDES), dtype=bool))
    if not least:
        return found
    # what a bound says depends on the explanation, so bounds do not compare explanations
    evidence = np.logaddexp.reduce(known.log_weights) - np.logaddexp.reduce(found.log_weights)
    return dataclasses.replace(found, log_weights=found.log_weights + evidence)


def _of_calls(points: Sequence[Point]) -> Floats:
    """Return covariances of measurements by the speed of the machine in an earlier call, (points, points)."""
    calls = np.array([point.call for point in points])
    same = (calls[:, None] == calls[None, :]) & (calls[:, None] != 0)
    return np.asarray(CALL_SIGMA**2 * same)


def above(lower_bound: float, mean: float, sigma: float, place: int) -> Point:
    """Return the point that stands for a value of which only a lower bound is known, such as the need after an OOM.

    With it, a normal belief gets the mean and the variance of the same belief cut at the bound (expectation propagation). A
    belief that is above the bound already is not changed.
    """
    z = min((lower_bound - mean) / sigma, _MOST_SIGMAS)
    hazard = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / (0.5 * math.erfc(z / math.sqrt(2)))
    removed = max(hazard * (hazard - z), 1e-6)  # share of the variance that the cut removes
    return Point(place, max(mean + sigma / (hazard - z), lower_bound), sigma * math.sqrt(1 / removed - 1))


_MOST_SIGMAS = 6.0  # beyond them a bound above the belief is the value, and one below it says nothing

# -- all quantities ----------------------------------------------------------------------------------------------------

PEAK_SCALE = 0.5  # errors of predicted peaks, relative to those of speeds
REPEAT_SPEED, REPEAT_PEAK = 0.02, 0.01  # standard deviation of a logarithm between two measurements
HOPELESS_SIGMAS = 2.5  # a candidate whose peak is believed to exceed its limit by this many sigmas is not tried
MOST_OF_HOST = 1.1  # share of the free host memory by the memory estimate; candidates above it are not tried


@dataclass(frozen=True)
class Forecast:
    """Belief about all candidates; every array has shape (n,) in candidate order."""

    speed: Mixture  # log of samples per second
    peak: Mixture  # log of a rank's peak in bytes
    step_seconds: Floats
    fits: Floats  # probability that the peak stays under the ceiling, on device and host
    fits_by_measurements: Floats  # the same, whatever is predicted for the device
    hopeless: Flags  # too unlikely to fit on the device
    host_hopeless: Flags  # the predicted host memory exceeds its limit by more than MOST_OF_HOST


class Belief:
    """Forecasts for the candidates of a study.

    Args:
        predictor: calibrated by the study's outcomes (`Predictor.observe`).
    """

    def __init__(self, predictor: Predictor, candidates: Sequence[Candidate]) -> None:
        self.predictor, self.hardware = predictor, predictor.hardware
        self._prepared = predictor.prepare(candidates)
        self._kernel = KnobKernel(candidates)
        self._saved_bytes = saved_bytes(predictor.job, predictor.trace, self._prepared.columns)

    @property
    def host_bytes(self) -> Floats | None:
        """Return the host memory of each candidate by the memory estimate, (n,) bytes; None if host and device are one."""
        return self._prepared.memory.host if self.hardware.device == "cuda" else None

    def table(self) -> Table:
        """Return the predictor's table with its calibrated constants. The belief itself learns what these leave."""
        table = self.predictor.prepared_table(self._prepared)
        # an inaccurate predictor may correct a peak to less than zero
        needed = np.nan_to_num(table.needed, nan=float(self.hardware.ceiling_bytes))
        return dataclasses.replace(table, needed=np.maximum(needed, 1.0))

    def forecast(
        self,
        speeds: Sequence[Point],
        peaks: Sequence[Point],
        ooms: Mapping[int, float],
        limit_bytes: Floats,
        *,
        host_ran_out: bool = False,
    ) -> Forecast:
        """Return the belief after these measurements.

        Args:
            speeds: logarithms of samples per second.
            peaks: logarithms of a rank's peak in bytes.
            ooms: log of the least bytes that were needed, by place of a candidate with a device OOM.
            limit_bytes: (n,) bytes that each candidate may use.
            host_ran_out: the study has had a host OOM, so the memory estimate of the host is doubted.
        """
        table = self.table()
        log_samples = np.log(table.samples)
        speed = explain(self._kernel, log_samples, speeds)
        log_needed = np.log(table.needed)
        # OOMs alone do not say how large anything is
        peak = explain(self._kernel, log_needed, peaks, least=ooms, scale=PEAK_SCALE, alone=bool(peaks))
        log_limit = np.log(limit_bytes)
        fits, by_measurements = peak.probability_below(log_limit), peak.of_measurements.probability_below(log_limit)
        hopeless = fits < normal_cdf(-HOPELESS_SIGMAS)
        host_share = self._host_share(table.host_bytes * self.predictor.job.ranks / self.hardware.nodes)
        if host_ran_out:  # before the first host OOM the memory estimate is used without an interval
            on_host = normal_cdf(-np.log(np.maximum(host_share, 1e-9)) / self.predictor.host_sigma)
            fits, by_measurements = fits * on_host, by_measurements * on_host
        step_seconds = table.step * np.exp(log_samples - speed.mean)
        host_hopeless = host_share > MOST_OF_HOST
        return Forecast(speed, peak, step_seconds, fits, by_measurements, hopeless, host_hopeless)

    def _host_share(self, kept: Floats) -> Floats:
        """Return the predicted host memory of each candidate, as a share of what a node has, (n,).

        Two limits apply, and the larger share counts:

        - The memory that ranks keep is compared with the host's memory minus a reserve for their processes.
        - While the first rank saves the weights in verification, kept and saved bytes are compared with all of the
          host's memory. The reserve is an estimate (2 GiB per rank) and must not exclude a save.

        Args:
            kept: (n,) bytes that a node's ranks keep in host memory.
        """
        if self.hardware.device != "cuda":
            return np.zeros(len(kept))
        saving = (kept + self._saved_bytes) / max(1, self.hardware.host_memory_bytes)
        return np.asarray(np.maximum(kept / max(1.0, host_limit_bytes(self.hardware)), saving))


# -- normal distribution -----------------------------------------------------------------------------------------------


def expected_gain(ahead: Floats, sigma: Floats) -> Floats:
    """Return the expected improvement E[max(0, X)] of X ~ N(ahead, sigma)."""
    z = ahead / sigma
    return np.asarray(sigma * (z * normal_cdf(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)))


def normal_cdf(z: Floats | float) -> Floats:
    """Return the standard normal distribution function, interpolated with an error of at most 1e-5."""
    return np.asarray(np.interp(z, _GRID, _CDF))


_GRID = np.linspace(-8, 8, 2001)
_CDF = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in _GRID])
