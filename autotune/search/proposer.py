"""Next candidate, stopping rules, and the fallback schedule when nothing fits."""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.features import Flags, Floats
from autotune.predict.predictor import Predictor
from autotune.predict.step_time import size_seconds
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.problem.knobs import OFFLOADING
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.space import SearchSpace
from autotune.rank.step_statistics import MAX_TIMED_MICRO_BATCHES
from autotune.search.knob_record import EFFECT_SIGMA, KnobRecord, KnobTurn
from autotune.search.pruning import CandidatePool, DominanceRules
from autotune.search.stopping import LEAST_MEASURED, Confidence, Stop, StopReason, probability_above, speed_left
from autotune.search.surrogate import (
    RECALLED,
    FirstOrderGroups,
    Forecast,
    LevelCoverage,
    SpeedMemoryModel,
    expected_gain,
)
from autotune.search.tpe import FAILED, Answer, Sampler
from autotune.util.units import GIB, format_bytes, format_percent

# -- proposer ----------------------------------------------------------------------------------------------------------
#
# Choose the next candidate by an ordered list of rules. The first rule that applies decides.
#
# - The model (the predictor, or the surrogate if measurements refute the predictor) estimates the value of each
#   measurement.
# - The screen makes sure that every level of the first-order knobs is tried before other knobs are varied.
# - Optuna's sampler searches independently of the model.

RISK_STEP = 0.25  # increase of the required probability of fitting per OOM
MOST_CAUTIOUS = 0.8  # upper limit of the required probability
LEAST_EVIDENCE = 8  # measured candidates before a search may stop early
MEMORY_END_AFTER = 4  # measured candidates before an exhaustive search looks for the memory limit
HEAD = 6  # trials before the sampler gets its share
CATCH_UP = 2  # consecutive sampler trials while it is below its share
AUDITS = 2  # surrogate proposals without improvement before a search may stop early
MOST_BOLD = 2  # trials of candidates that are predicted not to fit, while the predictor is not rejected
BEST_SIGMA = 0.02  # standard deviation of the best measured speed as a logarithm, which a second measurement shows
IMPLAUSIBLE = 2.0  # share of the device's capacity; no predictor of a large model is wrong by more
# Bytes above the capacity. Buffers of the runtime do not depend on the model, so a prediction may be wrong by all of
# them: 2 GiB on the CPU ranks of two recorded tables, where the fastest candidates were predicted not to fit.
IMPLAUSIBLE_BYTES = 4 * GIB
DOUBTLESS_SIGMAS = 3.0  # a level this many sigmas below the best is not tried
# trials without improvement, half of them random: 60 miss the best 5 % once in 20 (Bergstra and Bengio 2012)
STALE = 120
WORTHWHILE = 0.25  # share of the tolerance; a smaller predicted gain is ignored
LOOSE_BOUND = 0.05  # speed that may be left; above it, the candidates that make the bound so high are measured
# Share of the log speed that a larger micro-batch gains if all the time is spent once per micro-batch.
OVERHEAD_SIGMA = 0.5
ALIKE_SECONDS = 1.25  # ratio of predicted seconds of two trials up to which neither is the shorter one
CHECK_SHARE = 0.2  # share of the remaining budget, at most, for each kind of check before an early end
FIRST_TRIALS = 4  # measured candidates that a short budget must hold
LEAST_SHARE_SECONDS = 5.0  # a share below holds no trial of most models
TRIAL_SHARE = 0.25  # share of the budget, at most, that one trial takes, and that one of the first is predicted to take


@dataclass(frozen=True)
class Rule:
    """A named reason to propose a candidate or to stop."""

    name: str
    decide: Callable[[Decision], Proposal | Stop | None]  # None leaves the decision to the next rule


class Proposer:
    """Ranks the open candidates and proposes the next one to measure."""

    def __init__(
        self,
        candidates: list[Candidate],
        space: SearchSpace,
        seed: int,
        predictor: Predictor,
        *,
        tolerance: float = 0.01,
        exhaustive: bool = False,
        effect_sigmas: Mapping[str, float] = EFFECT_SIGMA,
    ) -> None:
        self.space, self.predictor = space, predictor
        self.job, self.hardware = job, hardware = predictor.job, predictor.hardware
        self.tolerance, self.exhaustive = tolerance, exhaustive
        self.candidates = candidates
        self._model = SpeedMemoryModel(predictor, candidates)
        rules = DominanceRules.for_device(hardware.device, job.ranks, predictor.trace)
        run = MAX_TIMED_MICRO_BATCHES if job.script is None else math.inf
        self._pool = CandidatePool(candidates, rules, self._model.host_bytes, run)
        self._index, self._family = self._pool.index, self._pool.family
        self._fallback = FallbackSchedule(candidates, hardware.device)
        self._coverage = LevelCoverage(candidates)
        self._groups = FirstOrderGroups(candidates)
        self.knobs = KnobRecord(candidates, effect_sigmas)
        self._micro_batch = np.array([c.micro_batch for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        self.speed: dict[Candidate, float] = {}
        self._costs = Costs(job)
        self._overran: Counter[Candidate] = Counter()  # number of trials that a tuner's time limit ended
        # OOMs that a model did not expect, by whether the predictor of memory was rejected
        self._ran_out: Counter[bool] = Counter()
        self._proposed = 0  # candidates proposed in this call
        self._sampled = 0  # sampler proposals among them
        self._in_a_row = 0  # consecutive sampler proposals up to now
        self._improved_at = 0  # value of `_proposed` at the last improvement
        self._audited = 0  # surrogate proposals since then
        self._bold_tries = 0
        self.trial_share_seconds = math.inf  # that one trial may take in this call
        self._sizes: set[int] = set()  # measured micro-batch sizes
        self._earlier: dict[Candidate, float] = {}  # speeds of earlier calls, at their pace
        self._turns, self._doubts = CheckBudget(), CheckBudget()  # for turns of knobs, and for a loose bound
        self._seed, self._answers = seed, dict[int, Answer]()
        self.stopped: Stop | None = None  # reason for the latest None of `next`
        self.decided_by = ""  # name of the rule that decided last
        self.rules = (
            Rule("fallback after failures", self._fallback_after_failures),
            Rule("sampler's share", self._samplers_share),
            Rule("fallback without a fit", self._fallback_without_a_fit),
            Rule("first fit", self._first_fit),
            Rule("untried level", self._untried_level),
            Rule("predicted gain", self._predicted_gain),
            Rule("memory limit", self._memory_limit),
            Rule("second opinion", self._second_opinion),
            Rule("untested knob", self._untested_knob),
            Rule("doubtful knob", self._doubtful_knob),
            Rule("loose bound", self._loose_bound),
            Rule("sampler", self._sampler_goes_on),
            Rule("small gain", self._small_gain),
        )

    @property
    def open_candidates(self) -> list[Candidate]:
        """Candidates that may still be tried."""
        return [self.candidates[i] for i in np.flatnonzero(self._pool.open_mask)]

    @property
    def _available(self) -> Flags:
        return self._pool.available_mask

    def reserve(self, running: Iterable[Candidate]) -> None:
        """Reserve candidates that run elsewhere. Similar ones are proposed only if nothing else is worth a trial."""
        self._pool.reserve(running, self._groups.of)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome, *, outdated: bool = False) -> None:
        """Learn from an outcome, and exclude the candidates that it speaks against.

        Args:
            outdated: the outcome excludes nothing, because its cause may be fixed or the exhausted memory has grown.
        """
        if not outcome.kind.is_attributable_to_candidate:
            return
        at = self._index.get(candidate)
        if at is not None and not outdated:
            self.knobs.observe(at, outcome.measurement, self._model.predicted_logs)
        chance = self._model.known_chance(at)
        surprising = chance is None or chance >= self._least_chance
        rejected = self._model.memory.predictor_rejected
        self._model.observe(candidate, at, outcome)
        self._costs.observe(outcome)
        if outdated:
            return self._pool.note_fixable(candidate, outcome)
        self._pool.observe(candidate, outcome)
        self._ran_out[rejected] += outcome.kind.is_oom and surprising
        measured, over = outcome.measurement, float(max(FAILED * GIB, outcome.missing_bytes or 0))
        speed = measured.samples_per_second if measured else 0.0
        if measured:
            over = measured.peak_bytes - self.hardware.ceiling_bytes
        fits = measured is not None and over <= 0
        if fits and at is not None:  # candidates of another space do not set the best speed
            if speed > max(self.speed.values(), default=0.0) * (1 + self.tolerance):
                self._improved_at, self._audited = self._proposed, 0
            self.speed[candidate] = speed
            self._earlier.pop(candidate, None)
        self._fallback.take(at, outcome.kind, fits)
        if at is not None:
            self._coverage.mark(at)
            self._answers[at] = speed, max(0.0, over / GIB)
            if measured:
                self._sizes.add(candidate.micro_batch)
                self._groups.note(at, math.log(speed))

    def finish_search(self, candidate: Candidate, samples_per_second: float) -> None:
        """Replace the search's measurement of a candidate by that of its verification."""
        self.speed[candidate] = samples_per_second
        self._earlier.pop(candidate, None)

    def begin_call(self) -> None:
        """Start a call. All speeds so far are those of earlier calls."""
        self._earlier = dict(self.speed)
        self._model.begin_call()

    def set_pace(self, pace: float) -> None:
        """Scale the speeds of earlier calls to this call's pace.

        Args:
            pace: this call's speeds divided by those of earlier calls, by what both have verified.
        """
        self.speed |= {one: pace * speed for one, speed in self._earlier.items() if one in self.speed}
        self._model.set_pace(pace)

    def drop_from_best(self, candidate: Candidate) -> None:
        """Remove a measured candidate from the best ones if it cannot win, or is unlikely to.

        Gains are then computed against the best of the rest. The candidate stays open if it was (`close_candidate`).
        """
        if self.speed.pop(candidate, None) is not None:
            self._improved_at, self._audited = self._proposed, 0

    def apply_verification_failure(
        self, candidate: Candidate, outcome: Outcome, searched: Measurement | None, share: float
    ) -> None:
        """Apply a verification that needed more memory than available.

        The memory limit of the stage is lowered, and proposals need a higher probability of fitting. An OOM also excludes
        candidates.

        Args:
            outcome: outcome of the verification.
            searched: the candidate's measurement in the search; None if there is none.
            share: share of that measurement's memory that would fit.
        """
        self._ran_out[self._model.memory.predictor_rejected] += 1
        if outcome.kind.is_oom:
            self._pool.observe(candidate, outcome)
        if (at := self._index.get(candidate)) is None:
            return
        self._groups.note_tight(at)
        self._answers[at] = 0.0, FAILED
        if searched is not None and outcome.kind is not OutcomeKind.OOM_HOST:
            self._model.lower_memory_limit(at, searched, share)

    def also_too_large(self, candidate: Candidate, kind: OutcomeKind) -> set[Candidate]:
        """Return the candidates that need at least as much of the exhausted memory, including this one."""
        return {self.candidates[i] for i in np.flatnonzero(self._pool.also_too_large(candidate, kind))}

    def expect(self, left: int) -> None:
        """Predict before an outcome is replayed, so that the prediction is scored.

        Only the last RECALLED outcomes are scored.

        Args:
            left: number of outcomes that remain to be replayed.
        """
        if left <= RECALLED:
            self._model.table()

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

    def skips(self) -> dict[str, int]:
        """Return counts of untried candidates by reason, both measured and predicted."""
        counts, forecast, table = dict(self._pool.skipped), self._model.forecast(), self._model.table()
        if (beyond := forecast.hopeless & self._available).any():
            capacity, least = format_bytes(self.hardware.capacity_bytes), format_bytes(int(table.peak[beyond].min()))
            more = f"predicted to need more than the {capacity} of a device beyond the interval (the least {least})"
            counts[more] = int(beyond.sum())
        if count := int((forecast.host_hopeless & ~forecast.hopeless & self._available).sum()):
            counts["predicted to need more than the host's memory beyond the interval"] = count
        return counts

    def confidence(self) -> Confidence | None:
        """Return a bound of the speed that untried candidates hold over the best; None if nothing has fitted.

        The bound is infinite as long as fewer than LEAST_MEASURED candidates are measured.
        """
        if not self.speed:
            return None
        measured = sum(speed > 0 for speed, _ in self._answers.values())
        left = math.inf if measured < LEAST_MEASURED else math.expm1(self._bound(claims=True)[0])
        ruled_out = self.stopped is not None and self.stopped.reason is StopReason.ALL_TRIED
        return Confidence(left, len(self._answers), measured, bool(self._pool.open_mask.any()) and not ruled_out)

    def _bound(self, claims: bool = False) -> tuple[float, int | None]:
        """Return the bound of the speed that is left, as a logarithm, and the place of the likeliest candidate above it.

        Args:
            claims: the bound is for the user. Candidates that are predicted not to fit count too, as far as measured peaks
                leave a doubt, and so does the noise of the best speed.
        """
        forecast = self._model.forecast()
        ahead, sigma = self._ahead(forecast)
        sigma = np.hypot(sigma, self.knobs.unmeasured_sigma())
        if (best := self._best_at) is not None:
            for way in self.knobs.turns(best, self._available, forecast.logs):
                ahead[way.at], sigma[way.at] = self.knobs.effect(best, way, forecast.logs)
        fits = forecast.may_fit if claims else np.where(forecast.hopeless, 0.0, forecast.fits)
        places = np.flatnonzero(self._available & (fits > 0) & ~forecast.host_hopeless)
        if not len(places):
            return 0.0, None
        ahead, fits = ahead[places], fits[places]
        sigma = np.hypot(sigma[places], BEST_SIGMA if claims else 0.0)
        left = speed_left(ahead, sigma, fits, self._groups.of[places])
        return left, int(places[probability_above(left, ahead, sigma, fits).argmax()])

    # -- proposing ---------------------------------------------------------------------------------------------------

    def next(self, left_seconds: float = math.inf) -> Proposal | None:
        """Return a candidate for a new engine; None if none is left or worth its time (see `stopped`).

        Args:
            left_seconds: budget that the search may still use.
        """
        if math.isinf(self.trial_share_seconds):
            self.trial_share_seconds = max(TRIAL_SHARE * left_seconds, min(LEAST_SHARE_SECONDS, left_seconds))
        if np.count_nonzero(self._available) == 1:  # no other trial needs the time
            self.trial_share_seconds = left_seconds
        decision = self._decide(left_seconds)
        if isinstance(decision, Stop) and self._pool.release_similar():
            decision = self._decide(left_seconds)
        self.stopped = decision if isinstance(decision, Stop) else None
        return None if isinstance(decision, Stop) else decision

    def _decide(self, left_seconds: float) -> Proposal | Stop:
        """Apply the rules in order, and return the first decision."""
        if not self._available.any():
            return StopReason.ALL_TRIED.stop()
        if self._model.predictor_rejected and self._is_stale and not self.exhaustive:
            return StopReason.NOTHING_BETTER.stop(count=self._proposed - self._improved_at)
        self._proposed += 1
        decision = Decision(self._worth, left_seconds)
        for rule in self.rules:
            if (decided := rule.decide(decision)) is not None:
                self.decided_by = rule.name
                return decided
        return StopReason.ALL_TRIED.stop()

    # -- rules, in their order ---------------------------------------------------------------------------------------

    def _fallback_after_failures(self, decision: Decision) -> Proposal | Stop | None:
        """Propose only fallback candidates after many failures without a fit."""
        due = not self.speed and self._fallback.is_due and not self.exhaustive
        return self._last_resort() if due else None

    def _samplers_share(self, decision: Decision) -> Proposal | None:
        """Give the sampler its share of the trials while the predictor is rejected."""
        if self._sampler_is_due:
            return self._advised()
        self._in_a_row = 0
        return None

    def _fallback_without_a_fit(self, decision: Decision) -> Proposal | Stop | None:
        """Propose fallback candidates if nothing has fitted and nothing is likely to, by predictions and earlier OOMs."""
        return None if self.speed or decision.any_allowed else self._last_resort()

    def _first_fit(self, decision: Decision) -> Proposal | None:
        """Propose the best predicted candidate until one has fitted."""
        return None if self.speed else Proposal(self.candidates[decision.best], "best predicted")

    def _untried_level(self, decision: Decision) -> Proposal | None:
        """Try every level of the first-order knobs before a measured group is refined."""
        if self._is_worthwhile(decision) and not self._groups.measured[decision.best]:
            return None
        return self._unseen() or (self._memory_limit(decision) if self._model.predictor_rejected else None)

    def _predicted_gain(self, decision: Decision) -> Proposal | None:
        """Propose the most valuable candidate if it may gain enough, or if too few are measured to stop."""
        if self._is_worthwhile(decision):
            note = f"predicted gain {format_percent(math.expm1(decision.gain[decision.best]))}"
        elif decision.any_allowed and len(self.speed) < LEAST_EVIDENCE:
            note = f"no gain is predicted; checked, since fewer than {LEAST_EVIDENCE} configs are measured"
        else:
            return None
        return Proposal(self.candidates[decision.best], note)

    def _memory_limit(self, decision: Decision) -> Proposal | None:
        """Test the memory predictor with a candidate that is predicted not to fit.

        The candidate has an untried level, is predicted to be faster, and is the closest to fitting.
        """
        if self._bold_tries >= MOST_BOLD and not self._model.predictor_rejected:
            return None
        forecast = self._model.forecast()
        most = max(IMPLAUSIBLE, 1 + IMPLAUSIBLE_BYTES / self.hardware.capacity_bytes)
        mask = self._available & self._coverage.uncovered() & (forecast.share < most) & ~forecast.host_hopeless
        mask &= self._is_no_slower(forecast)
        if not mask.any():
            return None
        self._bold_tries += 1
        nearest = int(np.where(mask, forecast.share, np.inf).argmin())
        return Proposal(self.candidates[nearest], "predicted not to fit, and of a level not seen before")

    def _second_opinion(self, decision: Decision) -> Proposal | None:
        """Propose the candidate that the surrogate values most, before the predictor ends the search."""
        if self._model.predictor_rejected or self._audited >= AUDITS:
            return None
        worth, gain = self._worth(self._model.forecast(rival=True))
        best = int(worth.argmax())
        if not gain[best] >= WORTHWHILE * self.tolerance or not np.isfinite(worth[best]):
            return None
        self._audited += 1
        return Proposal(self.candidates[best], "most promising by measurements alone, whatever is predicted")

    def _untested_knob(self, decision: Decision) -> Proposal | None:
        """Turn each knob of the best candidate once before the search ends early.

        The cheapest turn comes first, and all together take at most CHECK_SHARE of the remaining budget.
        """
        if self._model.predictor_rejected or self.exhaustive:
            return None
        seconds, ways = self._trial_costs(), self._knob_turns()
        if not ways:
            return None
        way = min(ways, key=lambda one: float(seconds[one.at]))
        if not self._turns.allows(float(seconds[way.at]), decision.left_seconds):
            return None
        return Proposal(self.candidates[way.at], f"{way.knob} was not turned at the best")

    def _doubtful_knob(self, decision: Decision) -> Proposal | None:
        """Turn a knob of the best candidate whose predicted effects were so wrong that a turn may gain the tolerance."""
        if self._model.predictor_rejected or self.exhaustive:
            return None
        gains = {way: self._turn_gain(way) for way in self._knob_turns()}
        way = max(gains, key=gains.__getitem__, default=None)
        if way is None or gains[way] < self.tolerance:
            return None
        missed = 100 * self.knobs.sigma(way.knob)
        return Proposal(self.candidates[way.at], f"predicted effects of {way.knob} are wrong by {missed:.0f} %")

    def _loose_bound(self, decision: Decision) -> Proposal | None:
        """Measure the candidate that makes the bound of the speed left so high.

        Its gain is unlikely, but large. All of them together take at most CHECK_SHARE of the remaining budget.
        """
        if not self.speed or self._model.predictor_rejected or self.exhaustive:
            return None
        left, at = self._bound()
        if at is None or math.expm1(left) <= LOOSE_BOUND:
            return None
        if not self._doubts.allows(float(self._trial_costs()[at]), decision.left_seconds):
            return None
        return Proposal(self.candidates[at], f"up to {100 * math.expm1(left):.0f} % may be left")

    def _sampler_goes_on(self, decision: Decision) -> Proposal | None:
        """Leave the search to the sampler if the predictor is rejected, or if the search is exhaustive."""
        goes_on = self._model.predictor_rejected or (self.exhaustive and decision.any_allowed)
        return self._advised() if goes_on else None

    def _small_gain(self, decision: Decision) -> Stop | None:
        """Stop, because no earlier rule found an allowed candidate with enough predicted gain.

        Without an allowed candidate, `_decide` stops with ALL_TRIED.
        """
        return StopReason.SMALL_GAIN.stop(percent=100 * WORTHWHILE * self.tolerance) if decision.any_allowed else None

    def _is_worthwhile(self, decision: Decision) -> bool:
        return decision.any_allowed and bool(decision.gain[decision.best] >= WORTHWHILE * self.tolerance)

    @property
    def _best_at(self) -> int | None:
        """Place of the fastest candidate; None if nothing was measured."""
        return self._index.get(max(self.speed, key=self.speed.__getitem__)) if self.speed else None

    def _trial_costs(self) -> Floats:
        """Return the seconds of measuring each candidate in a new engine, (n,)."""
        step = self._model.forecast().step
        return self._costs.measuring_seconds(step, self._accumulation) + self._costs.startup_seconds

    def _knob_turns(self) -> list[KnobTurn]:
        """Return the untested turns of single knobs at the best candidate that are believed to fit."""
        if (best := self._best_at) is None:
            return []
        forecast = self._model.forecast()
        believed = self._available & ~forecast.hopeless & ~forecast.host_hopeless & (forecast.fits > SURE)
        return [way for way in self.knobs.turns(best, believed, forecast.logs) if not way.settled]

    def _turn_gain(self, way: KnobTurn) -> float:
        """Return the expected gain of a turn at the best candidate, by the record of predicted effects."""
        best, forecast = self._best_at, self._model.forecast()
        assert best is not None
        mean, sigma = self.knobs.effect(best, way, forecast.logs)
        return float(expected_gain(np.array([mean]), np.array([sigma]))[0] * forecast.fits[way.at])

    # -- what the rules propose --------------------------------------------------------------------------------------

    @property
    def _is_stale(self) -> bool:
        """True after so many trials without improvement that the search stops if the predictor is rejected."""
        return bool(self.speed) and self._proposed - self._improved_at >= max(STALE, 2 * self._improved_at)

    @property
    def _sampler_is_due(self) -> bool:
        """True if the sampler is below its share: half of all trials while the predictor is rejected.

        The sampler catches up with at most CATCH_UP trials in a row.
        """
        if not self._model.predictor_rejected or self._proposed <= HEAD:
            return False
        return 2 * self._sampled < self._proposed and self._in_a_row < CATCH_UP

    def _is_no_slower(self, forecast: Forecast) -> Flags:
        """Return which candidates may be as fast as the best one, within DOUBTLESS_SIGMAS, (n,)."""
        return np.asarray(forecast.logs + DOUBTLESS_SIGMAS * forecast.sigma > math.log(max(self.speed.values())))

    def _unseen(self) -> Proposal | None:
        """Return the most promising candidate with an untried level of a first-order knob.

        Returns:
            None if every level was tried, is predicted not to fit, or is predicted to be far slower than the best.
        """
        forecast = self._model.forecast()
        mask = (
            self._available
            & self._coverage.uncovered()
            & ~forecast.hopeless
            & ~forecast.host_hopeless
            & (forecast.fits > 0.5)
        )
        mask &= self._is_no_slower(forecast)
        if not mask.any():
            return None
        mask &= ~self._too_long(forecast, mask)
        worth, gain = self._worth(forecast)
        promise = worth
        if gain[mask].max() < WORTHWHILE * self.tolerance or not np.isfinite(worth[mask]).any():
            promise = forecast.logs + 4 * np.log(np.maximum(forecast.fits, 1e-9))
        promise = np.where(mask, promise, -np.inf)
        return Proposal(self.candidates[int(promise.argmax())], "a level not seen before")

    def _last_resort(self) -> Proposal | Stop:
        """Return the fallback candidate with the lowest memory.

        The fallback applies after many failures, or if no candidate has fitted or is likely to fit.
        """
        forecast = self._model.forecast()
        need = np.maximum(forecast.share, forecast.host_share)
        at = self._fallback.next(self._available, need, believed=not self._model.memory.predictor_rejected)
        if at is None:
            return self._fallback.stop()
        why = "has fitted" if self._fallback.is_due else "is likely to fit"
        return Proposal(self.candidates[at], f"least memory of its stage: nothing {why}")

    def next_rung(self, current: Candidate) -> Proposal | None:
        """Return the next candidate for the engine that measured `current`; None if another engine is worth more.

        Micro-batches ascend, because memory that the allocator keeps from a larger one would count for a smaller one.
        """
        proposal = self._rung(current)
        self._proposed += proposal is not None
        return proposal

    def _rung(self, current: Candidate) -> Proposal | None:
        at = self._index.get(current)
        if at is None:
            return None
        mine = self._family == self._family[at]
        mine &= (self._micro_batch > current.micro_batch) | (
            (self._micro_batch == current.micro_batch) & (self._accumulation > current.accumulation)
        )
        if not (mine & self._available).any():
            return None
        if self.exhaustive and not self._ran_out.total() and len(self.speed) >= MEMORY_END_AFTER:
            higher = self._available & mine & (self._micro_batch > current.micro_batch)
            if higher.any():  # one OOM calibrates all predicted peaks
                return Proposal(self._lowest(higher), "looks for where memory ends")
        if self._model.predictor_rejected and self._sampler_is_due and not self.exhaustive:
            return None
        worth, gain = self._worth(alive=mine)
        rungs = np.where(mine, worth, -np.inf)
        best = int(rungs.argmax())
        if not np.isfinite(rungs[best]):
            return None
        if self.exhaustive and gain[worth.argmax()] < WORTHWHILE * self.tolerance:
            rung = self._lowest(np.isfinite(rungs))
            return Proposal(rung, "next rung of the ladder")
        if gain[best] < WORTHWHILE * self.tolerance or rungs[best] < worth.max():
            return None
        return Proposal(self.candidates[best], f"same engine, predicted gain {format_percent(math.expm1(gain[best]))}")

    def trial_seconds(self, candidate: Candidate) -> float:
        """Return the candidate's time limit in seconds, from its size and earlier trials."""
        at = self._index.get(candidate)
        forecast = self._model.forecast()
        step = float(forecast.step[at] * np.exp(2 * forecast.sigma[at])) if at is not None else 10.0
        return self._costs.limit_seconds(candidate, step, self.patience(candidate))

    def _worth(self, forecast: Forecast | None = None, alive: Flags | None = None) -> tuple[Floats, Floats]:
        """Return (gain per second, gain) of measuring each candidate, both (n,).

        The gain is the expected improvement of log samples per second over the best, times the probability of fitting.
        The first array is -inf for excluded candidates.

        Args:
            forecast: predictions; None takes the current ones.
            alive: candidates that the running engine can measure without a new start.
        """
        forecast = forecast or self._model.forecast()
        barred = ~self._available | forecast.hopeless | forecast.host_hopeless
        startup = np.where(False if alive is None else alive, 0.0, self._costs.startup_seconds)
        seconds = self._costs.measuring_seconds(forecast.step, self._accumulation) + startup
        barred |= self._too_long(forecast, ~barred)
        if not self.exhaustive:
            barred |= ~self._groups.fitted & (forecast.fits < self._least_chance)
        if not self.speed:
            # the first trial should fit, because it calibrates all predictions
            gain = forecast.logs + 4 * np.log(np.maximum(forecast.fits, 1e-9))
            return np.where(barred, -np.inf, gain), gain
        ahead, sigma = self._ahead(forecast)
        gain = expected_gain(ahead, sigma) * forecast.fits
        return np.where(barred, -np.inf, gain / seconds), gain

    @property
    def _least_chance(self) -> float:
        """Least probability of fitting of a proposal, which grows with the OOMs that the model in use did not expect.

        An OOM that the model expected, such as that of a candidate of the sampler, says nothing against its probabilities.
        """
        return min(MOST_CAUTIOUS, RISK_STEP * self._ran_out[self._model.memory.predictor_rejected])

    def _too_long(self, forecast: Forecast, allowed: Flags) -> Flags:
        """Return which candidates take too long for one of the first trials, (n,); never all of the allowed ones.

        The upper end of each prediction counts, because few trials have calibrated it yet.
        """
        if len(self.speed) >= FIRST_TRIALS or not allowed.any():
            return np.zeros_like(allowed)
        longest = self._costs.measuring_seconds(forecast.step * np.exp(forecast.sigma), self._accumulation)
        most = self.trial_share_seconds - (self._costs.startup_seconds if self._costs.started else 0.0)
        return np.asarray(longest > max(most, ALIKE_SECONDS * float(longest[allowed].min())))

    def _ahead(self, forecast: Forecast) -> tuple[Floats, Floats]:
        """Return the predicted log speed of each candidate over the best one, and its standard deviation, (n,) each."""
        best = math.log(max(self.speed.values()))
        # only second-order knobs are left in a measured group
        seen, reach = self._groups.measured, self._groups.reach
        logs = np.where(seen, np.minimum(forecast.logs, self._groups.ceiling), forecast.logs)
        sigma = np.where(seen, np.minimum(forecast.sigma, reach), forecast.sigma)
        return logs - best, np.hypot(sigma, self._unknown_overhead())

    def _unknown_overhead(self) -> Floats:
        """Return the standard deviation of each log speed by what a script does once per micro-batch, (n,).

        No prediction knows this time before two micro-batch sizes are measured. A larger micro-batch can gain by it.
        """
        if self.job.script is None or len(self._sizes) != 1:
            return np.zeros(len(self.candidates))
        (size,) = self._sizes
        return np.asarray(OVERHEAD_SIGMA * np.log(np.maximum(self._micro_batch / size, 1.0)))

    @functools.cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.candidates, self.space, self._seed, self._answers)

    def _advised(self) -> Proposal:
        """Return the sampler's choice among the open candidates.

        Unless the predictor is rejected, the choice is limited to candidates that are predicted to fit, if there are
        any.
        """
        allowed = self._available.copy()
        if not self._model.predictor_rejected:
            forecast = self._model.forecast()
            fitting = allowed & (forecast.fits > 0.5) & ~forecast.host_hopeless
            allowed = fitting if fitting.any() else allowed
        self._sampled += 1
        self._in_a_row += 1
        at = self._sampler.next(allowed, self._pool.too_large, self._pool.running)
        candidate = self.candidates[at]
        if self.exhaustive:  # one start measures every rung of that engine
            candidate = self._lowest(allowed & (self._family == self._family[at]))
        return Proposal(candidate, "Optuna's sampler")

    def _lowest(self, among: Flags) -> Candidate:
        rungs = [self.candidates[i] for i in np.flatnonzero(among)]
        return min(rungs, key=lambda c: (c.micro_batch, c.accumulation))


# -- decisions ---------------------------------------------------------------------------------------------------------

SURE = 0.5  # least probability of fitting of a turn of a knob


@dataclass(frozen=True)
class Proposal:
    """Candidate to measure, and the reason."""

    candidate: Candidate
    note: str


class Decision:
    """One decision of the proposer. Values are computed when a rule first needs them."""

    def __init__(self, worth: Callable[[], tuple[Floats, Floats]], left_seconds: float = math.inf) -> None:
        self._compute, self.left_seconds = worth, left_seconds

    @functools.cached_property
    def _values(self) -> tuple[Floats, Floats]:
        return self._compute()

    @property
    def gain(self) -> Floats:
        """Expected gain of measuring each candidate, as a logarithm, (n,)."""
        return self._values[1]

    @functools.cached_property
    def any_allowed(self) -> bool:
        """True if predictions exclude not all open candidates."""
        return bool(np.isfinite(self._values[0]).any())

    @functools.cached_property
    def best(self) -> int:
        """Place of the candidate with the highest gain per second."""
        return int(self._values[0].argmax())


class CheckBudget:
    """Predicted seconds that one kind of check has used of CHECK_SHARE of the remaining budget."""

    def __init__(self) -> None:
        self._used_seconds = 0.0

    def allows(self, seconds: float, left_seconds: float) -> bool:
        """Return True if another check of so many seconds is within the share, and count it."""
        if self._used_seconds + seconds > CHECK_SHARE * (left_seconds + self._used_seconds):
            return False
        self._used_seconds += seconds
        return True


# -- fallback schedule -------------------------------------------------------------------------------------------------
#
# Fallback schedule if nothing has fitted: try the candidate with the least memory of every stage, then stop.

ENOUGH = 8  # failed trials after which only fallback candidates are tried
_SPARED = 8.0  # doublings of the micro-batch that one memory-saving setting is worth


class FallbackSchedule:
    """Fallback candidates tried so far, and failures since the last fit."""

    def __init__(self, candidates: Sequence[Candidate], device: str) -> None:
        self._stage = np.array([candidate.stage for candidate in candidates])
        self._demand_scores = np.array([memory_demand_score(candidate, device) for candidate in candidates])
        self._offloads = np.array([len(candidate.offloaded) for candidate in candidates])
        self._most_offloads = np.full(4, len(OFFLOADING))  # by stage
        self._tried: set[tuple[int, bool]] = set()  # (stage, ranked by settings)
        self._failed: Counter[OutcomeKind] = Counter()

    def take(self, at: int | None, kind: OutcomeKind, fitted: bool) -> None:
        """Record a trial.

        A stage whose fallback candidate failed for another reason than device memory is tried again with less
        offloading, because the offloading may be the cause.

        Args:
            at: place of the candidate; None if this space does not contain it.
            kind: kind of the outcome.
            fitted: True if the candidate fits.
        """
        if fitted:
            self._failed.clear()
            self._tried.clear()
            return
        self._failed[kind] += 1
        if at is not None and kind is not OutcomeKind.OOM_DEVICE and self._offloads[at]:
            stage = int(self._stage[at])
            if again := {one for one in self._tried if one[0] == stage}:
                self._most_offloads[stage] = min(self._most_offloads[stage], self._offloads[at] - 1)
                self._tried -= again

    @property
    def is_due(self) -> bool:
        """True after so many failures that only fallback candidates are tried."""
        return self._failed.total() >= ENOUGH

    def next(self, free: Flags, need: Floats, believed: bool) -> int | None:
        """Return the place of the next fallback candidate; None if each stage was tried.

        Args:
            free: (n,) candidates that may be tried.
            need: (n,) predicted need, as a share of the available memory.
            believed: rank by `need` only; otherwise also by memory-saving settings.
        """
        free = free & (self._offloads <= self._most_offloads[self._stage])
        for by_settings in (False,) if believed else (False, True):
            demand = np.where(free, self._demand_scores + 1e-3 * np.tanh(need) if by_settings else need, np.inf)
            for at in demand.argsort(kind="stable")[: int(free.sum())]:
                attempt = (int(self._stage[at]), by_settings)
                if attempt not in self._tried:
                    self._tried.add(attempt)
                    return int(at)
        return None

    def stop(self) -> Stop:
        """Return the reason for the end of the search, if no fallback candidate is left."""
        tried = f"{self._failed.total()} candidates, the thriftiest of every stage among them"
        if all(kind.is_oom or kind is OutcomeKind.OK for kind in self._failed):
            return StopReason.NOTHING_FITS.stop(tried=tried)
        kinds = ", ".join(f"{count} {kind.value}" for kind, count in self._failed.most_common())
        return StopReason.NOTHING_RUNS.stop(tried=tried, kinds=kinds)


def memory_demand_score(candidate: Candidate, device: str) -> float:
    """Return a memory demand score from settings alone. On CPU ranks offloading saves no memory."""
    spends = (not candidate.checkpointing) + (len(OFFLOADING) - len(candidate.offloaded) if device == "cuda" else 0)
    return math.log2(candidate.micro_batch) + _SPARED * spends


# -- trial costs -------------------------------------------------------------------------------------------------------

STARTUP_SECONDS = 15.0  # engine start before the first measured one
RECENT = 8  # starts that the median covers
# Limit for one step until a trial measures longer steps, so that a wrong estimate cannot give the whole budget to a
# hanging trial.
MOST_STEP_SECONDS = 600.0


class Costs:
    """Durations of a study's trials, in seconds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._starts: deque[float] = deque(maxlen=RECENT)
        self._longest_start = 0.0
        self._most_step = MOST_STEP_SECONDS
        self._slow_start = 0.0  # seconds; longest start that a tuner's time limit ended

    def observe(self, outcome: Outcome) -> None:
        """Record the duration of an attributable trial."""
        if outcome.measurement is not None:
            self._most_step = max(self._most_step, 4 * outcome.measurement.step_seconds)
        if outcome.kind is OutcomeKind.TIMEOUT:
            self.note_slow_start(outcome)
        # studies of earlier versions do not record which trials started an engine
        started = outcome.started or outcome.outside_seconds > 1.0
        if started and outcome.kind in (OutcomeKind.OK, OutcomeKind.OOM_DEVICE):
            self._starts.append(outcome.outside_seconds)
            self._longest_start = max(self._longest_start, outcome.outside_seconds)

    def note_slow_start(self, outcome: Outcome) -> None:
        """Raise the start limit of all candidates after a tuner's time limit ended a start."""
        if outcome.phase in (Phase.START, Phase.INIT) and outcome.source is Source.LIMIT:
            self._slow_start = max(self._slow_start, outcome.seconds)

    @property
    def started(self) -> bool:
        """Return True if an engine start was measured."""
        return bool(self._starts)

    @property
    def startup_seconds(self) -> float:
        """Expected seconds of an engine start, including warm-up."""
        return float(np.median(self._starts)) if self._starts else STARTUP_SECONDS

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
        longest = self._longest_start if self._starts else STARTUP_SECONDS
        starting = 4 * longest + size_seconds(self._job, candidate)
        usual = patience * (starting + measuring)
        # an ended start gives only a lower bound of the start time
        return max(usual, 3 * self._slow_start + measuring if self._slow_start else 0.0)
