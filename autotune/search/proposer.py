"""Choose the next candidate from several strategies.

- The model (the predictor, or the surrogate if measurements refute the predictor) estimates the value of each
  measurement.
- The screen makes sure that every level of the first-order knobs is tried before other knobs are varied.
- Optuna's sampler searches independently of the model.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Measurement, Outcome
from autotune.problem.space import SearchSpace
from autotune.search.beliefs import RECALLED, Beliefs, Forecast, expected_gain
from autotune.search.costs import Costs
from autotune.search.dominance import Rules
from autotune.search.factors import Kinds, Screen
from autotune.search.openings import Openings
from autotune.search.predicted_skips import predicted_skips
from autotune.search.resorts import Resorts
from autotune.search.sampler import FAILED, Answer, Sampler
from autotune.search.start import Proposal, Start
from autotune.units import GIB

RISK_STEP = 0.25  # increase of the required probability of fitting per OOM
MOST_CAUTIOUS = 0.8  # upper limit of the required probability
LEAST_EVIDENCE = 8  # measured candidates before a search may stop early
MEMORY_END_AFTER = 4  # measured candidates before an exhaustive search looks for the memory limit
HEAD = 6  # trials before the sampler gets its share
CATCH_UP = 2  # consecutive sampler trials while it is below its share
AUDITS = 2  # surrogate proposals without improvement before a search may stop early
MOST_BOLD = 2  # trials of candidates that are predicted not to fit, while the predictor is not refuted
IMPLAUSIBLE = 2.0  # share of the device's capacity; no predictor is wrong by more
DOUBTLESS_SIGMAS = 3.0  # a level this many sigmas below the best is not tried
# trials without improvement, half of them random: 60 miss the best 5 % once in 20 (Bergstra and Bengio 2012)
STALE = 120
WORTHWHILE = 0.25  # share of the tolerance; a smaller predicted gain is ignored


class Proposer:
    """Ranks the open candidates and proposes the next one to measure."""

    def __init__(
        self,
        candidates: list[Candidate],
        space: SearchSpace,
        job: Job,
        hardware: Hardware,
        seed: int,
        predictor: Predictor,
        *,
        tolerance: float = 0.01,
        exhaustive: bool = False,
    ) -> None:
        self.space, self.job, self.hardware, self.predictor = space, job, hardware, predictor
        self.tolerance, self.exhaustive = tolerance, exhaustive
        self.candidates = candidates
        self._beliefs = Beliefs(predictor, job, hardware, candidates)
        rules = Rules.of(hardware.device, job.ranks, predictor.trace)
        self._openings = Openings(candidates, rules, self._beliefs.host_bytes)
        self._index, self._family = self._openings.index, self._openings.family
        self._resorts = Resorts(candidates, hardware.device)
        self._screen = Screen(candidates)
        self._kinds = Kinds(candidates)
        self._micro_batch = np.array([c.micro_batch for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        self.speed: dict[Candidate, float] = {}
        self._costs = Costs(job)
        self._overran: Counter[Candidate] = Counter()  # number of trials that a tuner's time limit ended
        self._ran_out = 0
        self._proposed = 0  # candidates proposed in this call
        self._sampled = 0  # sampler proposals among them
        self._in_a_row = 0  # consecutive sampler proposals up to now
        self._improved_at = 0  # value of `_proposed` at the last improvement
        self._audited = 0  # surrogate proposals since then
        self._bold_tries = 0
        self._seed, self._answers = seed, dict[int, Answer]()
        self._start: Start | None = None
        self.stopped_early = ""

    @property
    def open(self) -> list[Candidate]:
        """Candidates that may still be tried."""
        return [self.candidates[i] for i in np.flatnonzero(self._openings.open)]

    @property
    def _open(self) -> Flags:
        return self._openings.free

    def keep_back(self, running: Iterable[Candidate]) -> None:
        """Reserve candidates that run elsewhere. Similar ones are proposed only if nothing else is worth a trial."""
        self._openings.keep_back(running, self._kinds.of)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome, *, outdated: bool = False) -> None:
        """Learn from an outcome, and exclude the candidates that it speaks against.

        Args:
            candidate: the tried candidate.
            outcome: its outcome.
            outdated: the failure is retryable and excludes nothing.
        """
        if not outcome.kind.says_something_of_the_candidate:
            return
        at = self._index.get(candidate)
        self._beliefs.observe(candidate, at, outcome)
        self._costs.observe(outcome)
        if outdated:
            return self._openings.forgive(candidate, outcome)
        self._openings.observe(candidate, outcome)
        # the start candidate was not chosen by a prediction
        foreign = self._start is not None and candidate == self._start.candidate
        self._ran_out += outcome.kind.is_oom and not foreign
        measured, over = outcome.measurement, float(max(FAILED * GIB, outcome.missing_bytes or 0))
        speed = measured.samples_per_second if measured else 0.0
        if measured:
            over = measured.peak_bytes - self.hardware.ceiling_bytes
        fits = measured is not None and over <= 0
        if fits and at is not None:  # candidates of another space do not set the best speed
            if speed > max(self.speed.values(), default=0.0) * (1 + self.tolerance):
                self._improved_at, self._audited = self._proposed, 0
            self.speed[candidate] = speed
        self._resorts.take(at, outcome.kind, fits)
        if at is not None:
            self._screen.see(at)
            self._answers[at] = speed, max(0.0, over / GIB)
            if measured:
                self._kinds.note(at, math.log(speed))

    def settle(self, candidate: Candidate, samples_per_second: float) -> None:
        """Replace the search's measurement of a candidate by that of its verification."""
        self.speed[candidate] = samples_per_second

    def drop(self, candidate: Candidate) -> None:
        """Remove a candidate that cannot win, or is unlikely to.

        Gains are then computed against the best of the rest.
        """
        if self.speed.pop(candidate, None) is not None:
            self._improved_at, self._audited = self._proposed, 0

    def tighten(self, candidate: Candidate, outcome: Outcome, searched: Measurement | None, share: float) -> None:
        """Lower the memory limits after a verification needed more memory than available.

        Args:
            candidate: the verified candidate.
            outcome: outcome of the verification.
            searched: the candidate's measurement in the search; None if there is none.
            share: share of that measurement's memory that would fit.
        """
        self._ran_out += 1
        if outcome.kind.is_oom:
            self._openings.observe(candidate, outcome)
        if (at := self._index.get(candidate)) is None:
            return
        self._kinds.note_tight(at)
        self._answers[at] = 0.0, FAILED
        if searched is not None and outcome.kind is not Kind.OOM_HOST:
            self._beliefs.tighten(at, searched, share)

    def needing_no_less(self, candidate: Candidate, kind: Kind) -> set[Candidate]:
        """Return the candidates that need at least as much of the exhausted memory, including this one."""
        return {self.candidates[i] for i in np.flatnonzero(self._openings.needing_no_less(candidate, kind))}

    def expect(self, left: int) -> None:
        """Predict before an outcome is replayed, so that the prediction is scored.

        Only the last RECALLED outcomes are scored.

        Args:
            left: number of outcomes that remain to be replayed.
        """
        if left <= RECALLED:
            self._beliefs.table()

    def allow_longer(self, candidate: Candidate, outcome: Outcome) -> None:
        """Double the candidate's time limit after a tuner's limit ended its trial. Slow starts raise all limits."""
        self._overran[candidate] += 1
        self._costs.note_slow_start(outcome)

    def patience(self, candidate: Candidate) -> float:
        """Return the factor on a candidate's time limits: 2 after one of them ended its trial."""
        return 2.0 if self._overran[candidate] else 1.0

    def give_up(self, candidate: Candidate) -> None:
        """Exclude the candidate for this call."""
        self._openings.close(candidate)

    def skips(self) -> dict[str, int]:
        """Return counts of untried candidates by reason, both measured and predicted."""
        predicted = predicted_skips(self._open, self._beliefs.forecast(), self._beliefs.table(), self.hardware)
        return {**self._openings.skipped, **predicted}

    # -- proposing ---------------------------------------------------------------------------------------------------

    def begin_with(self, start: Start) -> bool:
        """Set a start candidate, and return whether its prediction justifies a trial now."""
        self._start = start
        return self._start_is_due

    @property
    def _start_is_due(self) -> bool:
        at = self._index.get(self._start.candidate) if self._start and not self._start.tried else None
        if self._start is None or at is None or not self._open[at] or len(self.speed) > 1:
            return False
        worth, gain = self._worth()
        worthwhile = not self.speed or gain[at] >= WORTHWHILE * self.tolerance
        return bool(worthwhile and self._start.believed(at, self._beliefs.forecast(), worth))

    def next(self) -> Proposal | None:
        """Return a candidate for a new engine; None if none is left or worth its time (see `stopped_early`)."""
        proposal = self._next()
        return self._next() if proposal is None and self._openings.let_alike() else proposal

    def _next(self) -> Proposal | None:
        self.stopped_early = ""
        if not self._open.any():
            return None
        if self._beliefs.refuted and self._is_stale and not self.exhaustive:
            self.stopped_early = (
                f"nothing better in {self._proposed - self._improved_at} trials, of which half were the sampler's "
                "(--exhaustive goes on)"
            )
            return None
        self._proposed += 1
        if self._start is not None and self._start_is_due:
            self._start.tried = True
            return Proposal(self._start.candidate, self._start.note)
        if not self.speed and self._resorts.due and not self.exhaustive:
            return self._last_resort()
        if self._sampler_is_due:
            return self._advised()
        self._in_a_row = 0
        worth, gain = self._worth()
        some = bool(np.isfinite(worth).any())
        if not self.speed and not some:
            return self._last_resort()
        best = int(worth.argmax())
        if not self.speed:
            return Proposal(self.candidates[best], "best predicted")
        worthwhile = some and gain[best] >= WORTHWHILE * self.tolerance
        refines = not worthwhile or self._kinds.measured[best]
        if refines and (unseen := self._unseen() or (self._bold() if self._beliefs.refuted else None)) is not None:
            return unseen
        if worthwhile or (some and len(self.speed) < LEAST_EVIDENCE):
            return Proposal(self.candidates[best], f"predicted gain {100 * math.expm1(gain[best]):.1f} %")
        if (bold := self._bold()) is not None:
            return bold
        if not self._beliefs.refuted and self._audited < AUDITS and (second := self._second_opinion()) is not None:
            return second
        if self._beliefs.refuted or (self.exhaustive and some):
            return self._advised()
        if some:
            least = f"{100 * self.tolerance:g} %"
            self.stopped_early = f"the predicted gain of going on is below {least} (--exhaustive goes on)"
        return None

    @property
    def _is_stale(self) -> bool:
        """True after so many trials without improvement that the search stops if the predictor is refuted."""
        return bool(self.speed) and self._proposed - self._improved_at >= max(STALE, 2 * self._improved_at)

    @property
    def _sampler_is_due(self) -> bool:
        """True if the sampler is below its share: half of all trials while the predictor is refuted.

        The sampler catches up with at most CATCH_UP trials in a row.
        """
        if not self._beliefs.refuted or self._proposed <= HEAD:
            return False
        return 2 * self._sampled < self._proposed and self._in_a_row < CATCH_UP

    def _unseen(self, among: Flags | None = None) -> Proposal | None:
        """Return the most promising candidate with an untried level of a first-order knob.

        Returns:
            None if every level was tried, is predicted not to fit, or is predicted to be far slower than the best.
        """
        forecast = self._beliefs.forecast()
        best = math.log(max(self.speed.values()))
        mask = self._open & self._screen.unseen() & ~forecast.hopeless & ~forecast.host & (forecast.fits > 0.5)
        mask &= forecast.logs + DOUBTLESS_SIGMAS * forecast.sigma > best
        if among is not None:
            mask &= among
        if not mask.any():
            return None
        worth, gain = self._worth(forecast)
        promise = worth
        if gain[mask].max() < WORTHWHILE * self.tolerance:
            promise = forecast.logs + 4 * np.log(np.maximum(forecast.fits, 1e-9))
        promise = np.where(mask, promise, -np.inf)
        return Proposal(self.candidates[int(promise.argmax())], "a level not seen before")

    def _second_opinion(self) -> Proposal | None:
        """Return the candidate that the surrogate values most; None if it predicts no gain."""
        worth, gain = self._worth(self._beliefs.forecast(rival=True))
        best = int(worth.argmax())
        if not gain[best] >= WORTHWHILE * self.tolerance or not np.isfinite(worth[best]):
            return None
        self._audited += 1
        return Proposal(self.candidates[best], "most promising by measurements alone, whatever is predicted")

    def _bold(self) -> Proposal | None:
        """Return a candidate that is predicted not to fit, to test the memory predictor.

        The candidate has an untried level, is predicted to be faster, and is the closest to fitting.
        """
        if self._bold_tries >= MOST_BOLD and not self._beliefs.refuted:
            return None
        forecast = self._beliefs.forecast()
        mask = self._open & self._screen.unseen() & (forecast.share < IMPLAUSIBLE) & ~forecast.host
        mask &= forecast.logs + DOUBTLESS_SIGMAS * forecast.sigma > math.log(max(self.speed.values()))
        if not mask.any():
            return None
        self._bold_tries += 1
        nearest = int(np.where(mask, forecast.share, np.inf).argmin())
        return Proposal(self.candidates[nearest], "predicted not to fit, and of a level not seen before")

    def _last_resort(self) -> Proposal | None:
        """Return the fallback candidate with the lowest memory.

        The fallback applies after many failures, or if no candidate has fitted or is predicted to fit.
        """
        forecast = self._beliefs.forecast()
        need = np.maximum(forecast.share, forecast.held)
        at = self._resorts.next(self._open, need, believed=not self._beliefs.memory.refuted)
        if at is None:
            self.stopped_early = self._resorts.why
            return None
        why = "has fitted" if self._resorts.due else "is predicted to fit"
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
        if not (mine & self._open).any():
            return None
        if self.exhaustive and not self._ran_out and len(self.speed) >= MEMORY_END_AFTER:
            higher = self._open & mine & (self._micro_batch > current.micro_batch)
            if higher.any():  # one OOM calibrates all predicted peaks
                return Proposal(self._lowest(higher), "looks for where memory ends")
        if self._beliefs.refuted and self._sampler_is_due and not self.exhaustive:
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
        return Proposal(self.candidates[best], f"same engine, predicted gain {100 * math.expm1(gain[best]):.1f} %")

    def trial_seconds(self, candidate: Candidate) -> float:
        """Return the candidate's time limit in seconds, from its size and earlier trials."""
        at = self._index.get(candidate)
        forecast = self._beliefs.forecast()
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
        forecast = forecast or self._beliefs.forecast()
        barred = ~self._open | forecast.hopeless | forecast.host
        if not self.speed:
            # the first trial should fit, because it calibrates all predictions
            gain = forecast.logs + 4 * np.log(np.maximum(forecast.fits, 1e-9))
            return np.where(barred, -np.inf, gain), gain
        best = math.log(max(self.speed.values()))
        # only second-order knobs are left in a measured kind
        seen, reach = self._kinds.measured, self._kinds.reach
        logs = np.where(seen, np.minimum(forecast.logs, self._kinds.ceiling), forecast.logs)
        sigma = np.where(seen, np.minimum(forecast.sigma, reach), forecast.sigma)
        gain = expected_gain(logs - best, sigma) * forecast.fits
        if not self.exhaustive:
            barred = barred | ~self._kinds.fitted & (forecast.fits < min(MOST_CAUTIOUS, RISK_STEP * self._ran_out))
        startup = self._costs.startup_seconds
        measuring = self._costs.measuring_seconds(forecast.step, self._accumulation)
        seconds = measuring + np.where(alive, 0.0, startup) if alive is not None else measuring + startup
        return np.where(barred, -np.inf, gain / seconds), gain

    @functools.cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.candidates, self.space, self._seed, self._answers)

    def _advised(self) -> Proposal:
        """Return the sampler's choice among the open candidates.

        Unless the predictor is refuted, the choice is limited to candidates that are predicted to fit, if there are
        any.
        """
        allowed = self._open.copy()
        if not self._beliefs.refuted:
            forecast = self._beliefs.forecast()
            fitting = allowed & (forecast.fits > 0.5) & ~forecast.host
            allowed = fitting if fitting.any() else allowed
        self._sampled += 1
        self._in_a_row += 1
        at = self._sampler.next(allowed, self._openings.too_large, self._openings.running)
        candidate = self.candidates[at]
        if self.exhaustive:  # one start measures every rung of that engine
            candidate = self._lowest(allowed & (self._family == self._family[at]))
        return Proposal(candidate, "Optuna's sampler")

    def _lowest(self, among: Flags) -> Candidate:
        rungs = [self.candidates[i] for i in np.flatnonzero(among)]
        return min(rungs, key=lambda c: (c.micro_batch, c.accumulation))
