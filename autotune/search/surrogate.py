"""Speed and memory models: predictor against Gaussian process, and coverage of knob levels."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.features import Flags, Floats, Places
from autotune.predict.predictor import Predictor, Prepared, Table
from autotune.predict.step_time import host_limit_bytes
from autotune.predict.zero_memory import saved_bytes
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate, Value, samples
from autotune.problem.knobs import FIRST_ORDER
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind

# -- speed and memory model --------------------------------------------------------------------------------------------
#
# Predict speed and memory of every candidate, from the predictor or from measurements alone.
#
# Two models predict each measurement before it is made: the predictor, and a surrogate that is fitted to earlier
# measurements only. Each is scored by the log density that it gave to the measured value. The model with the better
# score is used, separately for time and for memory, because a predictor may be right in one and wrong in the other.

HOPELESS_SIGMAS = 2.5  # a candidate whose predicted peak exceeds the capacity by this many sigmas is not tried
CREDIT = 2.0  # log likelihood; the predictor's lead before the first measurement
MOST_CREDIT, MOST_DEBT = 6.0, 3.0  # log likelihood; limits of the lead, so that recent predictions decide
ONE_SURPRISE = 2.0  # log likelihood; largest change by one measurement
# latest outcomes of a resumed study that score both models again; more would exceed MOST_CREDIT and MOST_DEBT
RECALLED = 16
SHORTLIST = 2048  # candidates of a large space that are predicted again after every measurement
ALL_EVERY = 8  # tables
MOST_OF_HOST = 1.1  # share of the free host memory by the memory estimate; candidates above it are not tried
REPEAT_TIME, REPEAT_MEMORY = 0.03, 0.01  # standard deviation of a logarithm between two measurements
MOST_SURPRISE = 5.0  # standard deviations that one wrong prediction counts, at most
PRIOR_PEAKS = 3  # weight of the predictor's own spread of peaks, in measured peaks


@dataclass
class Trust:
    """Lead of the predictor over the surrogate, in log likelihood."""

    credit: float = CREDIT

    def update_log_score(self, predictor: float, surrogate: float) -> None:
        """Add the predictor's gain over the surrogate to the credit, within bounds."""
        gained = max(-ONE_SURPRISE, min(ONE_SURPRISE, predictor - surrogate))
        self.credit = max(-MOST_DEBT, min(MOST_CREDIT, self.credit + gained))

    @property
    def predictor_rejected(self) -> bool:
        """Return True if the predictor is worse than the surrogate."""
        return self.credit < 0


@dataclass(frozen=True)
class Forecast:
    """Predictions for all candidates; every array has shape (n,) in candidate order."""

    logs: Floats  # log of samples per second
    sigma: Floats  # standard deviation of `logs`
    step: Floats  # seconds
    fits: Floats  # probability that the peak stays under the ceiling
    may_fit: Floats  # the same, with no more trust in the spread of predicted peaks than measured peaks justify
    share: Floats  # predicted peak of a rank, as a share of the device's capacity
    host_share: Floats  # predicted host memory of a node's ranks, as a share of their limit
    hopeless: Flags  # the predicted peak exceeds the device's capacity by more than HOPELESS_SIGMAS
    host_hopeless: Flags  # the predicted host memory exceeds its limit by more than MOST_OF_HOST


class SpeedMemoryModel:
    """The predictor and the surrogate, and the choice between them."""

    def __init__(self, predictor: Predictor, candidates: Sequence[Candidate]) -> None:
        self.predictor, self.job, self.hardware = predictor, predictor.job, predictor.hardware
        self._prepared = predictor.prepare(candidates)
        self._saved_bytes = saved_bytes(self.job, predictor.trace, self._prepared.columns)
        self._count = len(candidates)
        first, second = features(candidates)
        self._speeds, self._peaks = Surrogate(first, second), Surrogate(first, second)
        self.speed, self.memory = Trust(), Trust()
        self._stage = np.array([candidate.stage for candidate in candidates])
        # bytes that a candidate may use so that its verification fits, for predicted and for measured peaks:
        # verification uses more memory than a search trial
        self._predicted_limit = np.full(self._count, float(self.hardware.ceiling_bytes))
        self._measured_limit = self._predicted_limit.copy()
        self._host_ran_out = False
        self._surprises: list[float] = []  # errors of predicted speeds, in standard deviations
        self._peak_surprises: list[float] = []  # the same of predicted peaks
        self._table: Table | None = None
        self._forecasts: dict[bool, Forecast] = {}
        self._before: Table | None = None  # the latest table; rows of a large space may be older
        self._short: tuple[Places, Prepared] | None = None
        self._fresh = 0  # tables since all candidates were predicted

    @property
    def predictor_rejected(self) -> bool:
        """Return True if measurements contradict the predictor in time or in memory."""
        return self.speed.predictor_rejected or self.memory.predictor_rejected

    def table(self) -> Table:
        """Return the predictor's table, corrected by all observations."""
        if self._table is None:
            table = self._refreshed()
            # an inaccurate predictor may correct a peak to less than zero
            self._table = dataclasses.replace(table, peak=np.maximum(table.peak, 1.0))
        return self._table

    @property
    def predicted_logs(self) -> Floats | None:
        """Logs of samples per second by the predictor before the next outcome, (n,); None without a recent table."""
        return None if self._table is None else np.log(self._table.samples)

    def _refreshed(self) -> Table:
        """Predict again after a measurement.

        In a large space only a shortlist is predicted after every measurement, and all candidates after every ALL_EVERY
        tables.
        """
        due = self._fresh % ALL_EVERY == 0 or len(self._peaks) < ALL_EVERY
        if self._before is None or due or self._count < 2 * SHORTLIST:
            self._fresh = 1
            self._before = self.predictor.prepared_table(self._prepared)
            self._short = None
            return self._before
        self._fresh += 1
        if self._short is None:
            some = self._promising(self._before)
            self._short = some, self._prepared.rows(some)
        some, prepared = self._short
        part, table = self.predictor.prepared_table(prepared), self._before
        for name, column in vars(part).items():
            getattr(table, name)[some] = column
        return table

    def _promising(self, table: Table) -> Places:
        """Return the places of the SHORTLIST candidates with the highest optimistic speed."""
        capacity = float(self.hardware.capacity_bytes)
        promise = np.log(table.samples) + 2 * table.step_sigma
        promise += np.log(np.maximum(normal_cdf((capacity - table.needed) / table.peak_sigma), 1e-9))
        return np.argpartition(promise, -SHORTLIST)[-SHORTLIST:]

    @property
    def host_bytes(self) -> Floats | None:
        """Return the host memory of each candidate by the memory estimate, (n,) bytes; None if host and device are one."""
        return self._prepared.memory.host if self.hardware.device == "cuda" else None

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, at: int | None, outcome: Outcome) -> None:
        """Score both models by an outcome, then update them.

        Args:
            at: place of the candidate; None if this space does not contain it.
        """
        if at is not None and outcome.measurement is not None:
            self._observe(at, outcome.measurement)
        elif at is not None and outcome.kind is OutcomeKind.OOM_DEVICE:
            self._observe_oom(at, outcome)
        elif at is not None and outcome.least_step_seconds is not None:
            self._observe_too_slow(at, samples(self.job, candidate) / outcome.least_step_seconds)
        self._host_ran_out |= outcome.kind is OutcomeKind.OOM_HOST
        self.predictor.observe(candidate, outcome)
        self._table = None
        self._forecasts.clear()

    def begin_call(self) -> None:
        """Start a call. All measurements so far are those of earlier calls."""
        self._speeds.begin_call()
        self.predictor.begin_call()

    def set_pace(self, pace: float) -> None:
        """Scale the speeds of earlier calls by this factor."""
        self._speeds.shift_earlier(math.log(pace))
        self.predictor.set_pace(pace)
        self._table = None
        self._forecasts.clear()

    def lower_memory_limit(self, at: int, searched: Measurement, share: float) -> None:
        """Lower a stage's memory limit after one of its candidates failed only in verification.

        Args:
            at: place of the candidate.
            searched: its measurement in the search.
            share: candidates of its stage must need less than this share of its memory.
        """
        alike = self._stage == self._stage[at]
        limits = (self._predicted_limit, self.table().needed[at]), (self._measured_limit, searched.peak_bytes)
        for limit, most in limits:
            limit[alike] = np.minimum(limit[alike], share * float(most))
        self._forecasts.clear()

    def _observe(self, at: int, measured: Measurement) -> None:
        speed, peak = math.log(measured.samples_per_second), math.log(measured.peak_bytes)
        if (table := self._table) is not None:
            expected, sigma = math.log(table.samples[at]), float(table.step_sigma[at])
            self._surprises.append(min(MOST_SURPRISE, abs(speed - expected) / sigma))
            missed = abs(measured.peak_bytes - table.peak[at]) / table.peak_sigma[at]
            self._peak_surprises.append(min(MOST_SURPRISE, float(missed)))
            if len(self._speeds):
                densities = (_density(speed, *one, REPEAT_TIME) for one in ((expected, sigma), _one(self._speeds, at)))
                self.speed.update_log_score(*densities)
            if len(self._peaks):
                predicted = math.log(table.peak[at]), float(table.peak_sigma[at] / table.peak[at])
                densities = (_density(peak, *one, REPEAT_MEMORY) for one in (predicted, _one(self._peaks, at)))
                self.memory.update_log_score(*densities)
        self._speeds.observe(at, speed)
        self._peaks.observe(at, peak)

    def _observe_oom(self, at: int, outcome: Outcome) -> None:
        capacity = float(outcome.capacity_bytes or self.hardware.capacity_bytes)
        least = math.log(capacity + 0.5 * (outcome.missing_bytes or 0))
        if self._table is not None and len(self._peaks):
            expected, sigma = _one(self._peaks, at)
            z = float((self._table.needed[at] - capacity) / self._table.peak_sigma[at])
            self.memory.update_log_score(_log_share(z), _log_share((expected - math.log(capacity)) / sigma))
            least = max(least, expected)  # an OOM gives a lower bound of the need
        self._peaks.observe(at, least)

    def _observe_too_slow(self, at: int, most_samples_per_second: float) -> None:
        """Score both models by an upper bound of a speed, and have the surrogate expect no more."""
        most = math.log(most_samples_per_second)
        if len(self._speeds):
            expected, sigma = _one(self._speeds, at)
            if self._table is not None:
                z = (most - math.log(self._table.samples[at])) / float(self._table.step_sigma[at])
                self.speed.update_log_score(_log_share(z), _log_share((most - expected) / sigma))
            most = min(most, expected)
        self._speeds.observe(at, most)

    # -- believing ---------------------------------------------------------------------------------------------------

    @property
    def _interval_inflation(self) -> float:
        """Factor that widens the intervals after recent predictions missed by more than their intervals."""
        recent = self._surprises[-8:]
        return max(1.0, math.sqrt(sum(z * z for z in recent) / len(recent))) if len(recent) > 1 else 1.0

    def known_chance(self, at: int | None) -> float | None:
        """Return the probability of fitting by the latest forecast; None without one since the last outcome."""
        forecast = self._forecasts.get(False)
        return None if forecast is None or at is None else float(forecast.fits[at])

    def forecast(self, rival: bool = False) -> Forecast:
        """Return predictions for every candidate by the model with the better score.

        Args:
            rival: take speed from the surrogate even if the predictor is ahead.
        """
        if rival not in self._forecasts:
            self._forecasts[rival] = self._forecast(rival)
        return self._forecasts[rival]

    def _forecast(self, rival: bool) -> Forecast:
        table = self.table()
        logs, sigma, step = np.log(table.samples), self._interval_inflation * table.step_sigma, table.step
        if (rival or self.speed.predictor_rejected) and len(self._speeds):
            logs, sigma = self._speeds.predict()
            step = table.samples * table.step / np.exp(logs)
        capacity = float(self.hardware.capacity_bytes)
        host_share = self._host_share(table.host_bytes * self.job.ranks / self.hardware.nodes)
        host_hopeless, in_host = host_share > MOST_OF_HOST, np.ones(self._count)
        if self._host_ran_out:  # before the first host OOM the memory estimate is used without an interval
            in_host = normal_cdf(-np.log(np.maximum(host_share, 1e-9)) / self.predictor.host_sigma)
        if self.memory.predictor_rejected and len(self._peaks):
            peak, spread = self._peaks.predict()
            fits = in_host * normal_cdf((np.log(self._measured_limit) - peak) / spread)
            hopeless = np.zeros(len(peak), dtype=bool)
            return Forecast(logs, sigma, step, fits, fits, np.exp(peak) / capacity, host_share, hopeless, host_hopeless)
        sigmas = (self._predicted_limit - table.needed) / table.peak_sigma
        fits = in_host * normal_cdf(sigmas)
        may_fit = np.maximum(fits, in_host * self._tail_of_peaks(sigmas))
        hopeless = table.needed - HOPELESS_SIGMAS * table.peak_sigma > capacity
        return Forecast(logs, sigma, step, fits, may_fit, table.needed / capacity, host_share, hopeless, host_hopeless)

    def _tail_of_peaks(self, sigmas: Floats) -> Floats:
        """Return the probability of an error below so many predicted standard deviations of a peak, (n,).

        The true spread is known only from the errors of measured peaks, which gives Student's t. After few measurements,
        or large errors, a candidate that is predicted not to fit keeps a chance.
        """
        measured = len(self._peak_surprises)
        degrees = PRIOR_PEAKS + measured
        spread = math.sqrt((PRIOR_PEAKS + sum(z * z for z in self._peak_surprises)) / degrees)
        return student_cdf(sigmas / max(1.0, spread), degrees)

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
            return np.zeros(self._count)
        saving = (kept + self._saved_bytes) / max(1, self.hardware.host_memory_bytes)
        return np.asarray(np.maximum(kept / max(1.0, host_limit_bytes(self.hardware)), saving))


def _one(surrogate: Surrogate, at: int) -> tuple[float, float]:
    expected, spread = surrogate.predict(np.array([at]))
    return float(expected[0]), float(spread[0])


def _density(value: float, expected: float, sigma: float, repeat: float) -> float:
    """Return the log density of a normal distribution, up to a constant."""
    width = math.hypot(sigma, repeat)
    return -0.5 * ((value - expected) / width) ** 2 - math.log(width)


def _log_share(z: float) -> float:
    """Return the log probability of a value below z, at least log(1e-3) to limit the effect of one surprise."""
    return math.log(max(float(normal_cdf(z)), 1e-3))


def expected_gain(ahead: Floats, sigma: Floats) -> Floats:
    """Return the expected improvement E[max(0, X)] of X ~ N(ahead, sigma)."""
    z = ahead / sigma
    return np.asarray(sigma * (z * normal_cdf(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)))


def normal_cdf(z: Floats | float) -> Floats:
    """Return the standard normal distribution function, interpolated with an error of at most 1e-5."""
    return np.asarray(np.interp(z, _GRID, _CDF))


def student_cdf(t: Floats, degrees: int) -> Floats:
    """Return the distribution function of Student's t by Wallace's approximation (Annals of Mathematical Statistics 1959)."""
    z = (8 * degrees + 1) / (8 * degrees + 3) * np.sqrt(degrees * np.log1p(t * t / degrees))
    return normal_cdf(np.copysign(z, t))


_GRID = np.linspace(-8, 8, 2001)
_CDF = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in _GRID])


# -- Gaussian process --------------------------------------------------------------------------------------------------
#
# Predict unmeasured candidates from measurements alone, with a Gaussian process that has no knowledge of training.
#
# The search uses this model if measurements refute the predictor. The weight of second-order knobs is fitted with the
# other scales, by maximum posterior probability.

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
        self._earlier: list[float] = []  # the first values of `_seen`, as earlier calls measured them
        self._fitted: tuple[float, float, Floats, Floats, float] | None = None

    def __len__(self) -> int:
        return len(self._at)

    def observe(self, at: int, value: float) -> None:
        """Add the measured logarithm of the candidate at this place."""
        self._at.append(at)
        self._seen.append(value)
        self._fitted = None

    def begin_call(self) -> None:
        """Start a call. All values so far are those of earlier calls."""
        self._earlier = self._seen.copy()

    def shift_earlier(self, shift: float) -> None:
        """Add this to the logarithms that earlier calls measured."""
        self._seen[: len(self._earlier)] = [value + shift for value in self._earlier]
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
        if name in FIRST_ORDER:
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


# -- level coverage ----------------------------------------------------------------------------------------------------

SECOND_ORDER_GAIN = 0.1  # logarithm; prior gain of second-order knobs, until the study has measured it twice
LEAST_REACH = 0.01
SPREAD = 3  # levels of a size: small, middle and large


def first_order_key(candidate: Candidate) -> tuple[object, ...]:
    """Return the first-order settings of a candidate."""
    return tuple(candidate.get(name) for name in FIRST_ORDER)


class FirstOrderGroups:
    """Measured combinations of first-order settings ("groups"), and the gain from second-order knobs in each."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        groups: dict[tuple[object, ...], int] = {}
        # (n,) the group of each candidate
        self.of = np.array([groups.setdefault(first_order_key(candidate), len(groups)) for candidate in candidates])
        self._first = np.full(len(groups), np.nan)  # log of samples per second, by group
        self._best = np.full(len(groups), -np.inf)
        self._again = np.zeros(len(groups), dtype=bool)  # measured with several second-order settings
        self._tight = np.zeros(len(groups), dtype=bool)  # a measured candidate failed in verification

    def note(self, at: int, speed: float) -> None:
        """Record a measurement of the candidate at this place; `speed` is the log of samples per second."""
        group = self.of[at]
        if math.isnan(self._first[group]):
            self._first[group] = speed
        else:
            self._again[group] = True
        self._best[group] = max(self._best[group], speed)

    def note_tight(self, at: int) -> None:
        """Record that the candidate at this place fitted in a search but not in verification."""
        self._tight[self.of[at]] = True

    @property
    def fitted(self) -> Flags:
        """Return whether each candidate's group has fitted, and none of it failed in verification, (n,)."""
        return np.asarray(self.measured & ~self._tight[self.of])

    @property
    def measured(self) -> Flags:
        """Return whether each candidate's group was measured, (n,)."""
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

        The bound of an unmeasured group is -inf.
        """
        return np.asarray(self._best[self.of] + self.reach)


class LevelCoverage:
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

    def mark(self, at: int) -> None:
        """Mark the levels of the candidate at this place as tried."""
        self._seen[self._levels[at]] = True

    def uncovered(self) -> Flags:
        """Return whether each candidate has an untried level, (n,)."""
        return np.asarray((~self._seen[self._levels]).any(axis=1))


def _third(sizes: list[int], size: int) -> int:
    """Return 0, 1 or 2 for a small, middle or large size, on a log scale."""
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    return round((SPREAD - 1) * (math.log(size) - low) / (high - low)) if high > low else 0
