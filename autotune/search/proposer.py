"""Next candidate and end of a search: the most expected gain per second among the candidates that may fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from autotune.predict.features import Flags, Floats
from autotune.predict.predictor import Predictor
from autotune.predict.step_time import size_seconds
from autotune.problem.candidate import Candidate, samples
from autotune.problem.job import Job
from autotune.problem.knobs import FIRST_ORDER
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.space import SearchSpace
from autotune.search.belief import REPEAT_PEAK, REPEAT_SPEED, Belief, Forecast, Point
from autotune.search.pruning import CandidatePool, numbered
from autotune.search.stopping import LEAST_MEASURED, Confidence, Stop, StopReason, speed_left
from autotune.util.units import format_bytes, format_percent

# -- proposer ----------------------------------------------------------------------------------------------------------
#
# The value of a measurement is the expected gain over the best speed, times the probability of fitting, divided by its
# seconds. Rungs of the running engine cost no start. The gain is a mean of what the belief expects and of what measurements
# alone do, so no agreement with the predictor hides all others. A search ends when no gain is worthwhile and a bound of the
# speed that is left is low.

WORTHWHILE = 0.01  # logarithm of speed; a smaller expected gain is ignored
ALONE_SHARE = 0.4  # share of a trial's value by measurements alone; wrong predictors of `search.py` need it
MOST_LEFT = 0.05  # share of speed by which untried candidates may be faster at the end (`Proposer.confidence`)
FIRST_TRIAL_SECONDS = 5.0  # a shorter budget, or share of it, holds no trial of most models
ENOUGH = 8  # failed trials after which only the least memory of each stage is tried
TRIAL_SHARE = 0.25  # share of the budget, at most, that one trial takes, and that one of the first is predicted to take


@dataclass(frozen=True)
class Proposal:
    """Candidate to measure, and the reason."""

    candidate: Candidate
    note: str


class Proposer:
    """Ranks the open candidates and proposes the next one to measure."""

    def __init__(
        self, candidates: list[Candidate], space: SearchSpace, predictor: Predictor, *, exhaustive: bool = False
    ) -> None:
        self.space, self.predictor, self.candidates = space, predictor, candidates
        self.job, self.hardware = job, hardware = predictor.job, predictor.hardware
        self.exhaustive = exhaustive
        self._belief = Belief(predictor, candidates)
        self._pool = CandidatePool(candidates, self._belief.host_bytes)
        self._index, self._family = self._pool.index, self._pool.family
        self._group = numbered(first_order_key(candidate) for candidate in candidates)
        self._micro_batch = np.array([c.micro_batch for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        self._stage = np.array([c.stage for c in candidates])
        self._limit_bytes = np.full(len(candidates), float(hardware.ceiling_bytes))
        self._offloads = np.array([len(candidate.offloaded) for candidate in candidates])
        kept = np.array([not candidate.checkpointing for candidate in candidates])
        if hardware.device == "cuda":  # on CPU ranks offloading saves no memory
            kept = kept - self._offloads
        # order of memory by settings, because predictions may be why nothing has fitted
        self._demand = kept * (1.0 + self._micro_batch.max(initial=0)) + self._micro_batch
        self._least_failed = np.full(4, math.inf)  # least demand that failed, by stage, if offloading was not the cause
        self._failed: Counter[OutcomeKind] = Counter()  # trials since the last that fitted
        self._costs = Costs(job)
        self._overran: Counter[Candidate] = Counter()  # number of trials that a tuner's time limit ended
        self._speeds: dict[tuple[int, int], Point] = {}  # by call and place
        self._peaks: dict[int, Point] = {}  # by place
        self._too_slow: dict[int, float] = {}  # log of the most samples per second, by place
        self._ooms: dict[int, float] = {}  # log of the least bytes needed, by place
        self._host_ran_out = False
        self._cannot_win: set[int] = set()  # measured candidates
        self._call = 0
        self._tried: set[int] = set()
        self.trial_share_seconds = math.inf  # that one trial may take in this call
        self._left_seconds = math.inf  # of the budget, for the search
        self.stopped: Stop | None = None  # reason for the latest None of `next`

    @property
    def open_candidates(self) -> list[Candidate]:
        """Candidates that may still be tried."""
        return [self.candidates[i] for i in np.flatnonzero(self._pool.open_mask)]

    @property
    def _available(self) -> Flags:
        return self._pool.available_mask

    @property
    def _best(self) -> float | None:
        """Log of the best speed that may win; None if nothing has fitted.

        Speeds of earlier calls count as the belief has them for this call's machine.
        """
        able = [point for point in self._speeds.values() if point.place not in self._cannot_win]
        now = [point.value for point in able if point.call == self._call]
        if now or not able:
            return max(now, default=None)
        expected = self._forecast.speed.mean
        return max(float(expected[point.place]) for point in able)

    @property
    def _measured(self) -> set[int]:
        """Places of the measured candidates."""
        return {place for _, place in self._speeds}

    def reserve(self, running: Iterable[Candidate]) -> None:
        """Reserve candidates that run elsewhere. Similar ones are proposed only if nothing else is worth a trial."""
        self._pool.reserve(running, self._group)

    # -- learning ----------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Start a call. All speeds so far are those of earlier calls, on a machine that may have been slower."""
        self._call += 1
        self._forget()

    def observe(
        self, candidate: Candidate, outcome: Outcome, *, outdated: bool = False, verified: bool = False
    ) -> None:
        """Learn from an outcome, and exclude the candidates that it speaks against.

        Args:
            outdated: the outcome excludes nothing, because its cause may be fixed or the exhausted memory has grown.
            verified: the outcome is that of a verification. It replaces the search's measurement, and excludes nothing.
        """
        if not outcome.kind.is_attributable_to_candidate:
            return
        at, measured = self._index.get(candidate), outcome.measurement
        self._forget()
        if at is not None and measured is not None:
            self._note_speed(at, measured)
        if verified:
            return
        if at is not None and measured is not None:
            self._peaks[at] = Point(at, math.log(measured.peak_bytes), REPEAT_PEAK)
        self.predictor.observe(candidate, outcome)
        self._costs.observe(outcome, candidate.stage)
        if at is not None and outcome.kind is OutcomeKind.OOM_DEVICE:
            capacity = float(outcome.capacity_bytes or self.hardware.capacity_bytes)
            self._ooms[at] = math.log(capacity + 0.5 * (outcome.missing_bytes or 0))
        if at is not None and outcome.least_step_seconds is not None:
            self._too_slow[at] = math.log(samples(self.job, candidate) / outcome.least_step_seconds)
        self._host_ran_out |= outcome.kind is OutcomeKind.OOM_HOST
        if outdated:
            return self._pool.note_fixable(candidate, outcome)
        self._pool.observe(candidate, outcome)
        self._failed[outcome.kind] += 1
        if measured is not None and measured.peak_bytes <= self.hardware.ceiling_bytes:
            self._failed.clear()
            self._least_failed[:] = math.inf
        elif at is not None and (outcome.kind is OutcomeKind.OOM_DEVICE or not self._offloads[at]):
            stage = self._stage[at]
            self._least_failed[stage] = min(self._least_failed[stage], self._demand[at])
        if at is not None:
            self._tried.add(at)

    def _note_speed(self, at: int, measured: Measurement) -> None:
        self._speeds[self._call, at] = Point(at, math.log(measured.samples_per_second), REPEAT_SPEED, self._call)
        if measured.peak_bytes > self.hardware.ceiling_bytes:
            self._cannot_win.add(at)

    def drop_from_best(self, candidate: Candidate) -> None:
        """Remove a measured candidate from the best ones if it cannot win, or is unlikely to.

        Gains are then computed against the best of the rest. The candidate stays open if it was (`close_candidate`).
        """
        at = self._index.get(candidate)
        if at in self._measured:
            self._cannot_win.add(at)

    def apply_verification_failure(
        self, candidate: Candidate, outcome: Outcome, searched: Measurement | None, share: float
    ) -> None:
        """Apply a verification that needed more memory than available.

        The memory limit of the stage is lowered. An OOM also excludes candidates.

        Args:
            outcome: outcome of the verification.
            searched: the candidate's measurement in the search; None if there is none.
            share: share of that measurement's memory that would fit.
        """
        if outcome.kind.is_oom:
            self._pool.observe(candidate, outcome)
        at = self._index.get(candidate)
        if at is None or searched is None or outcome.kind is OutcomeKind.OOM_HOST:
            return
        alike = self._stage == self._stage[at]
        self._limit_bytes[alike] = np.minimum(self._limit_bytes[alike], share * searched.peak_bytes)
        self._forget()

    def allow_longer(self, candidate: Candidate, outcome: Outcome) -> None:
        """Double the candidate's time limit after a tuner's limit ended its trial. Slow starts raise all limits."""
        self._overran[candidate] += 1
        self._costs.note_slow_start(outcome)

    def patience(self, candidate: Candidate) -> float:
        """Return the factor on a candidate's time limits: 2 after one of them ended its trial."""
        return 2.0 if self._overran[candidate] else 1.0

    def exclude_sharing_cause(
        self, candidate: Candidate, shares_cause: Callable[[Candidate], bool], reason: str
    ) -> None:
        """Exclude the candidates that train something else for the same reason as this one."""
        self._pool.exclude_sharing_cause(candidate, shares_cause, reason[:160])

    def close_candidate(self, candidate: Candidate) -> None:
        """Propose this candidate no more in this call. No other candidate is excluded."""
        self._pool.close(candidate)

    # -- belief ------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.__dict__.pop("_forecast", None)

    @functools.cached_property
    def _forecast(self) -> Forecast:
        speeds = [
            Point(point.place, point.value, point.sigma, self._call - point.call) for point in self._speeds.values()
        ]
        bounds = [Point(at, most, REPEAT_SPEED) for at, most in self._too_slow.items() if at not in self._measured]
        return self._belief.forecast(
            [*bounds, *speeds],
            [*self._peaks.values()],
            {at: least for at, least in self._ooms.items() if at not in self._peaks},
            self._limit_bytes,
            host_ran_out=self._host_ran_out,
        )

    def skips(self) -> dict[str, int]:
        """Return counts of untried candidates by reason, both measured and predicted."""
        counts, forecast = dict(self._pool.skipped), self._forecast
        if (beyond := forecast.hopeless & self._available).any():
            capacity = format_bytes(self.hardware.capacity_bytes)
            least = format_bytes(int(np.exp(forecast.peak.mean[beyond].min())))
            counts[f"believed to need more than the {capacity} of a device (at least {least})"] = int(beyond.sum())
        if count := int((forecast.host_hopeless & ~forecast.hopeless & self._available).sum()):
            counts["predicted to need more than the host's memory"] = count
        return counts

    def confidence(self) -> Confidence | None:
        """Return a bound of the speed that untried candidates hold over the best; None if nothing has fitted.

        The bound is infinite as long as fewer than LEAST_MEASURED candidates are measured.
        """
        best = self._best
        if best is None:
            return None
        left = math.inf
        if len(self._measured) >= LEAST_MEASURED:
            forecast = self._forecast
            places = np.flatnonzero(self._available & ~forecast.host_hopeless)
            speed = forecast.speed
            sigmas = np.hypot(speed.sigmas[:, places], REPEAT_SPEED)  # the best was measured once
            ahead = dataclasses.replace(speed, means=speed.means[:, places] - best, sigmas=sigmas)
            left = speed_left(ahead, forecast.fits[places], self._group[places])
        ruled_out = self.stopped is not None and self.stopped.reason is StopReason.ALL_TRIED
        untried = bool(self._pool.open_mask.any()) and not ruled_out
        return Confidence(left, len(self._tried), len(self._measured), untried)

    # -- proposing ---------------------------------------------------------------------------------------------------

    def next(self, left_seconds: float = math.inf) -> Proposal | None:
        """Return a candidate for a new engine; None if none is left or worth its time (see `stopped`).

        Args:
            left_seconds: budget that the search may still use.
        """
        self._left_seconds = left_seconds
        if math.isinf(self.trial_share_seconds):
            self.trial_share_seconds = max(TRIAL_SHARE * left_seconds, min(FIRST_TRIAL_SECONDS, left_seconds))
        if np.count_nonzero(self._available) == 1:  # no other trial needs the time
            self.trial_share_seconds = left_seconds
        decision = self._decide()
        if isinstance(decision, Stop) and self._pool.release_similar():
            decision = self._decide()
        self.stopped = decision if isinstance(decision, Stop) else None
        return None if isinstance(decision, Stop) else decision

    def _decide(self) -> Proposal | Stop:
        if not self._available.any():
            return StopReason.ALL_TRIED.stop()
        value, gain = self._values(self._forecast)
        best = int(value.argmax())
        any_allowed = bool(np.isfinite(value[best]))
        if self._best is None:
            gives_up = self._failed.total() >= ENOUGH and not self.exhaustive
            if gives_up or not any_allowed:
                return self._last_resort()
            return Proposal(self.candidates[best], "best predicted")
        if not any_allowed:
            reachable = self._available & ~self._forecast.host_hopeless
            return (StopReason.BUDGET_USED if reachable.any() else StopReason.ALL_TRIED).stop()
        if gain[best] >= WORTHWHILE:
            return Proposal(self.candidates[best], f"expected gain {format_percent(math.expm1(gain[best]))}")
        confidence = self.confidence()
        if confidence is not None and confidence.left_share > MOST_LEFT:
            return Proposal(self.candidates[best], f"{confidence.sentence}: not sure enough to end")
        if self.exhaustive:
            return Proposal(self.candidates[best], "--exhaustive goes on")
        return StopReason.SMALL_GAIN.stop(percent=100 * WORTHWHILE)

    def next_rung(self, current: Candidate) -> Proposal | None:
        """Return the next candidate for the engine that measured `current`; None if another engine is worth more.

        Micro-batches ascend, because memory that the allocator keeps from a larger one would count for a smaller one.
        """
        at = self._index.get(current)
        if at is None:
            return None
        larger = self._micro_batch > current.micro_batch
        longer = (self._micro_batch == current.micro_batch) & (self._accumulation > current.accumulation)
        rungs = (self._family == self._family[at]) & (larger | longer) & self._available
        if not rungs.any() or self._best is None:
            return None
        value, gain = self._values(self._forecast, alive=rungs)
        best = int(value.argmax())
        if not rungs[best] or not np.isfinite(value[best]) or (gain[best] < WORTHWHILE and not self.exhaustive):
            return None
        return Proposal(self.candidates[best], f"same engine, expected gain {format_percent(math.expm1(gain[best]))}")

    def _last_resort(self) -> Proposal | Stop:
        """Return the candidate with the lowest memory of a stage, unless one of no more has failed; else the end.

        The fallback applies after many failures, or if no candidate has fitted or is likely to fit.
        """
        left = self._available & (self._demand < self._least_failed[self._stage])
        if not left.any():
            return nothing_works(self._failed)
        at = np.lexsort([self._forecast.peak.mean, self._demand, ~left])[0]
        why = "has fitted" if self._failed.total() >= ENOUGH else "is likely to fit"
        return Proposal(self.candidates[at], f"least memory of its stage: nothing {why}")

    def trial_seconds(self, candidate: Candidate) -> float:
        """Return the candidate's time limit in seconds, from its size and earlier trials."""
        at = self._index.get(candidate)
        step_seconds = 10.0
        if at is not None:
            step_seconds = float(self._forecast.step_seconds[at] * np.exp(2 * self._forecast.speed.sigma[at]))
        return self._costs.limit_seconds(candidate, step_seconds, self.patience(candidate))

    def _values(self, forecast: Forecast, alive: Flags | None = None) -> tuple[Floats, Floats]:
        """Return (gain per second, gain) of measuring each candidate, both (n,).

        The gain is the expected improvement of log samples per second over the best, times the probability of fitting.
        The first array is -inf for excluded candidates.

        Args:
            alive: candidates that the running engine can measure without a new start.
        """
        best = self._best
        excluded = ~self._available | forecast.host_hopeless
        if best is None:
            excluded |= forecast.hopeless
        excluded |= self._too_long(forecast, ~excluded)
        if best is None:
            # a logarithm of the expected speed, because a candidate that does not fit has none
            gain = forecast.speed.mean + np.log(np.maximum(forecast.fits, 1e-9))
            return np.where(excluded, -np.inf, gain), gain
        startup = self._costs.startup_seconds[self._stage]
        if alive is not None:
            startup[alive] = 0.0
        measuring = self._costs.measuring_seconds(forecast.step_seconds, self._accumulation)
        excluded |= startup + measuring / 2 > self._left_seconds  # half of the steps are the least that says something
        # Trials are where the predictor sends them, so agreement there cannot raise its probability elsewhere. If it misleads
        # about speeds, so it may about peaks.
        alone = forecast.speed.of_measurements.expected_gain(best) * forecast.fits_by_measurements
        gain = (1 - ALONE_SHARE) * forecast.speed.expected_gain(best) * forecast.fits + ALONE_SHARE * alone
        return np.where(excluded, -np.inf, gain / (startup + measuring)), gain

    def _too_long(self, forecast: Forecast, allowed: Flags) -> Flags:
        """Return which candidates take too long for one of the first trials, (n,); never all of the allowed ones.

        The upper end of each prediction counts, because few trials have calibrated it yet.
        """
        if len(self._measured) >= LEAST_MEASURED or not allowed.any():
            return np.zeros_like(allowed)
        slow_step = forecast.step_seconds * np.exp(forecast.speed.sigma)
        longest = self._costs.measuring_seconds(slow_step, self._accumulation)
        most = self.trial_share_seconds
        if self._costs.started:
            most -= self._costs.startup_seconds[self._stage]
        return np.asarray(longest > np.maximum(most, longest[allowed].min()))


def nothing_works(failed: Counter[OutcomeKind]) -> Stop:
    """Return the reason for the end of a search in which nothing fits."""
    tried = f"{failed.total()} candidates, the thriftiest of every stage among them"
    if all(kind.is_oom or kind is OutcomeKind.OK for kind in failed):
        return StopReason.NOTHING_FITS.stop(tried=tried)
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in failed.most_common())
    return StopReason.NOTHING_RUNS.stop(tried=tried, kinds=kinds)


def first_order_key(candidate: Candidate) -> tuple[object, ...]:
    """Return the first-order settings of a candidate."""
    return tuple(candidate.get(name) for name in FIRST_ORDER)


# -- trial costs -------------------------------------------------------------------------------------------------------

STARTUP_SECONDS = 15.0  # engine start before the first measured one
# Limit for one step until a trial measures longer steps, so that a wrong estimate cannot give the whole budget to a
# hanging trial.
MOST_STEP_SECONDS = 600.0


class Costs:
    """Durations of a study's trials, in seconds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._starts: list[tuple[int, float]] = []  # (stage, seconds)
        self._longest_start = 0.0  # seconds, also of a start that a tuner's time limit ended
        self._most_step = MOST_STEP_SECONDS

    def observe(self, outcome: Outcome, stage: int) -> None:
        """Record the duration of an attributable trial."""
        if outcome.measurement is not None:
            self._most_step = max(self._most_step, 4 * outcome.measurement.step_seconds)
        if outcome.kind is OutcomeKind.TIMEOUT:
            self.note_slow_start(outcome)
        if outcome.started and outcome.kind in (OutcomeKind.OK, OutcomeKind.OOM_DEVICE):
            self._starts.append((stage, outcome.outside_seconds))
            self._longest_start = max(self._longest_start, outcome.outside_seconds)

    def note_slow_start(self, outcome: Outcome) -> None:
        """Raise the start limit of all candidates after a tuner's time limit ended a start."""
        if outcome.phase in (Phase.START, Phase.INIT) and outcome.source is Source.LIMIT:
            self._longest_start = max(self._longest_start, outcome.seconds)

    @property
    def started(self) -> bool:
        """Return True if an engine start was measured."""
        return bool(self._starts)

    @property
    def startup_seconds(self) -> Floats:
        """Return the expected seconds of an engine start of each stage, including warm-up, (4,)."""
        every = [seconds for _, seconds in self._starts] or [STARTUP_SECONDS]
        of_stages = ([seconds for at, seconds in self._starts if at == stage] for stage in range(4))
        return np.array([np.median(own or every) for own in of_stages])

    def measuring_seconds(self, step_seconds: Floats, accumulation: Floats) -> Floats:
        """Return the expected seconds to measure each candidate in a running engine, (n,)."""
        # two warm-up steps, then at least three whole steps, or up to twelve short ones
        if self._job.script is not None:
            return 2 * step_seconds + np.maximum(np.maximum(3 * step_seconds, 1.0), np.minimum(12 * step_seconds, 5.0))
        return step_seconds * np.minimum(4.0, 6.0 / accumulation) + 1.0

    def limit_seconds(self, candidate: Candidate, step_seconds: float, patience: float) -> float:
        """Return the time limit of a trial in seconds, from the candidate's size and earlier trials.

        Args:
            step_seconds: predicted upper bound of a step. The limit allows at most MOST_STEP_SECONDS, or four times the
                longest measured step.
            patience: factor on the usual limit.
        """
        measuring = 12 * min(step_seconds, self._most_step) + 30.0
        starting = 4 * (self._longest_start or STARTUP_SECONDS) + size_seconds(self._job, candidate)
        return patience * (starting + measuring)
