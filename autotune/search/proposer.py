"""What to try next: a short list of experts who take turns.

The model (the predictor, or measurements alone where these refute it) says what a measurement is worth; the screen sees to it
that every level of what matters most is seen before anything else is turned; Optuna's sampler searches as if it were alone.
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

RISK_STEP = 0.25  # by which every out-of-memory raises the least probability of fitting
MOST_CAUTIOUS = 0.8  # up to this
LEAST_EVIDENCE = 8  # candidates measured before a search may end by itself
MEMORY_END_AFTER = 4  # candidates measured before an exhaustive search looks for where memory ends
HEAD = 6  # trials before the sampler has its share
CATCH_UP = 2  # trials of its in a row while it has had fewer
AUDITS = 2  # second opinions that have found nothing better, before a search may end by itself
MOST_BOLD = 2  # trials of what is predicted not to fit, before it may
IMPLAUSIBLE = 2.0  # such a share of the device no predictor is wrong by
DOUBTLESS_SIGMAS = 3.0  # so far below the best a level is not worth seeing
STALE = 120  # trials in vain, half of them drawn: 60 miss the best twentieth once in twenty times (Bergstra and Bengio 2012)
WORTHWHILE = 0.25  # of the tolerance: a predicted gain below it is none


class Proposer:
    """Knows which candidates are still worth trying, and why the others are not."""

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
        self._overran: Counter[Candidate] = Counter()  # how often a limit of ours has ended it
        self._ran_out = 0
        self._proposed = 0  # candidates in this call
        self._sampled = 0  # of these, the sampler's
        self._in_a_row = 0  # the latest of these
        self._improved_at = 0  # how many were proposed when the best was last beaten
        self._audited = 0  # second opinions since then
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
        """What is measured elsewhere just now is not proposed, and what is like it only where nothing else is worth a trial."""
        self._openings.keep_back(running, self._kinds.of)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome, *, outdated: bool = False) -> None:
        """Learns from an Outcome, and rules out the candidates that it speaks against: none, where it may end otherwise now
        (`outdated`)."""
        if not outcome.kind.says_something_of_the_candidate:
            return
        at = self._index.get(candidate)
        self._beliefs.observe(candidate, at, outcome)
        self._costs.observe(outcome)
        if outdated:
            return self._openings.forgive(candidate, outcome)
        self._openings.observe(candidate, outcome)
        foreign = self._start is not None and candidate == self._start.candidate  # no prediction of ours
        self._ran_out += outcome.kind.is_oom and not foreign
        measured, over = outcome.measurement, float(max(FAILED * GIB, outcome.missing_bytes or 0))
        speed = measured.samples_per_second if measured else 0.0
        if measured:
            over = measured.peak_bytes - self.hardware.ceiling_bytes
        fits = measured is not None and over <= 0
        if fits and at is not None:  # what another space had is not to be beaten
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
        """Verification's measurement of a candidate counts in place of the search's."""
        self.speed[candidate] = samples_per_second

    def drop(self, candidate: Candidate) -> None:
        """The candidate cannot win, or hardly: gains are expected against the best of the others from now on."""
        if self.speed.pop(candidate, None) is not None:
            self._improved_at, self._audited = self._proposed, 0

    def tighten(self, candidate: Candidate, outcome: Outcome, searched: Measurement | None, share: float) -> None:
        """Learns that verifying the candidate takes more memory than there is; `share` of what the search measured would do."""
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
        """The candidates that need no less than this one of the memory that ran out, itself among them."""
        return {self.candidates[i] for i in np.flatnonzero(self._openings.needing_no_less(candidate, kind))}

    def expect(self, left: int) -> None:
        """Has the predictor say what it expects of the next of `left` Outcomes that are recalled, to be charged for it."""
        if left <= RECALLED:
            self._beliefs.table()

    def allow_longer(self, candidate: Candidate, outcome: Outcome) -> None:
        """A limit of ours has ended the candidate's trial: it has twice as long from now on, and all others may have, too."""
        self._overran[candidate] += 1
        self._costs.note_slow_start(outcome)

    def patience(self, candidate: Candidate) -> float:
        """The factor on limits of a candidate: 2 once one of them has ended it."""
        return 2.0 if self._overran[candidate] else 1.0

    def give_up(self, candidate: Candidate) -> None:
        """The candidate is not tried again in this call, whatever it would have shown."""
        self._openings.close(candidate)

    def skips(self) -> dict[str, int]:
        """How many candidates were not tried, by reason: what followed from measurements, and what the predictor says."""
        predicted = predicted_skips(self._open, self._beliefs.forecast(), self._beliefs.table(), self.hardware)
        return {**self._openings.skipped, **predicted}

    # -- proposing ---------------------------------------------------------------------------------------------------

    def begin_with(self, start: Start) -> bool:
        """Tries it first, where it is believed: whether it is now."""
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
        """A candidate for a new engine, or None where none is left or worth its time now (`stopped_early`)."""
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
        """Whether so many trials were in vain that no more are made where no prediction can say what is left to gain."""
        return bool(self.speed) and self._proposed - self._improved_at >= max(STALE, 2 * self._improved_at)

    @property
    def _sampler_is_due(self) -> bool:
        """Half of all trials are the sampler's where measurements speak against the predictor; until they are, two of three."""
        if not self._beliefs.refuted or self._proposed <= HEAD:
            return False
        return 2 * self._sampled < self._proposed and self._in_a_row < CATCH_UP

    def _unseen(self, among: Flags | None = None) -> Proposal | None:
        """The most promising candidate with a level of a first-order knob that the study has not seen; None where every
        level was seen, or is believed not to fit or to be far slower than the best."""
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
        """What measurements alone, without the predictor, hold for the most worth a trial; None where that is nothing."""
        worth, gain = self._worth(self._beliefs.forecast(rival=True))
        best = int(worth.argmax())
        if not gain[best] >= WORTHWHILE * self.tolerance or not np.isfinite(worth[best]):
            return None
        self._audited += 1
        return Proposal(self.candidates[best], "most promising by measurements alone, whatever is predicted")

    def _bold(self) -> Proposal | None:
        """The candidate nearest to fitting among those that would be faster and that only a predicted lack of memory holds
        back, with a level that the study has not seen: what a predictor that is wrong of memory would hide."""
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
        """Where nothing has fitted and nothing is predicted to, or much has failed: what needs the least, in case that fits."""
        forecast = self._beliefs.forecast()
        need = np.maximum(forecast.share, forecast.held)
        at = self._resorts.next(self._open, need, believed=not self._beliefs.memory.refuted)
        if at is None:
            self.stopped_early = self._resorts.why
            return None
        why = "has fitted" if self._resorts.due else "is predicted to fit"
        return Proposal(self.candidates[at], f"least memory of its stage: nothing {why}")

    def next_rung(self, current: Candidate) -> Proposal | None:
        """The next candidate for the engine that just measured `current`, or None where another engine is worth more.

        Micro-batches ascend, because memory that an allocator keeps from a larger one would be charged to a smaller one.
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
            if higher.any():  # one out-of-memory calibrates every prediction of peaks
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
        """What a trial of the candidate may take at most, by its size and by what others took."""
        at = self._index.get(candidate)
        forecast = self._beliefs.forecast()
        step = float(forecast.step[at] * np.exp(2 * forecast.sigma[at])) if at is not None else 10.0
        return self._costs.limit_seconds(candidate, step, self.patience(candidate))

    def _worth(self, forecast: Forecast | None = None, alive: Flags | None = None) -> tuple[Floats, Floats]:
        """(gain a second, gain) of measuring each candidate; the first is minus infinity where it is ruled out.

        Gain is the expected improvement of log samples a second over the best so far, times the probability of fitting.
        `alive` marks the candidates that the running engine can measure without a new start.
        """
        forecast = forecast or self._beliefs.forecast()
        barred = ~self._open | forecast.hopeless | forecast.host
        if not self.speed:
            # first something that surely fits: it calibrates everything else
            gain = forecast.logs + 4 * np.log(np.maximum(forecast.fits, 1e-9))
            return np.where(barred, -np.inf, gain), gain
        best = math.log(max(self.speed.values()))
        # of a kind that was measured only second-order knobs are left to turn
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
        """What Optuna's sampler asks for: of all that is open, or where nothing speaks against the predictor of what it
        believes to fit."""
        allowed = self._open.copy()
        if not self._beliefs.refuted:
            forecast = self._beliefs.forecast()
            fitting = allowed & (forecast.fits > 0.5) & ~forecast.host
            allowed = fitting if fitting.any() else allowed
        self._sampled += 1
        self._in_a_row += 1
        at = self._sampler.next(allowed, self._openings.too_large, self._openings.running)
        candidate = self.candidates[at]
        if self.exhaustive:  # every rung of that engine in one start
            candidate = self._lowest(allowed & (self._family == self._family[at]))
        return Proposal(candidate, "Optuna's sampler")

    def _lowest(self, among: Flags) -> Candidate:
        rungs = [self.candidates[i] for i in np.flatnonzero(among)]
        return min(rungs, key=lambda c: (c.micro_batch, c.accumulation))
