"""The loop of a search (propose, measure, record), the verification of its winner, and the budget's clock."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from autotune.errors import UserError
from autotune.executors.base import SEARCH as SEARCH_EFFORT
from autotune.executors.base import VERIFY as VERIFY_EFFORT
from autotune.executors.base import Effort, Executor, Session
from autotune.problem.candidate import MODEL_KNOBS, Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Kind, Measurement, Outcome, Source
from autotune.problem.space import SearchSpace
from autotune.search.proposer import Proposal, Proposer
from autotune.search.study import SEARCH, VERIFY, Record, StudyStore
from autotune.units import format_duration

FIRST_TRIAL_SECONDS = 5.0  # a budget below this cannot hold one trial
RETRY_SHARE = 0.02  # a candidate with allocator retries must be faster by this to win
THRIFT_SHARE = 0.03  # what a winner with a lower peak may be slower by, where intervals overlap
MAX_VERIFIED = 4


class Observer(Protocol):
    """Is told what happens; a NullObserver where nobody looks."""

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None: ...
    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None: ...
    def say(self, text: str) -> None: ...
    def clock(self, used_seconds: float, budget_seconds: float) -> None: ...


class NullObserver:
    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        pass

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def clock(self, used_seconds: float, budget_seconds: float) -> None:
        pass


@dataclass
class SearchSummary:
    """How the search of one call of `run` ended."""

    winner: Record | None
    verified: bool
    ended: str  # why it ended
    interrupted: bool
    used_seconds: float
    measured: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)


class Tuner:
    """One call of `run` on a study."""

    def __init__(
        self,
        store: StudyStore,
        executor: Executor,
        proposer: Proposer,
        space: SearchSpace,
        hardware: Hardware,
        *,
        budget_seconds: float,
        max_trials: int | None = None,
        spent_seconds: float = 0.0,
        observer: Observer | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        search_effort: Effort = SEARCH_EFFORT,
        verify_effort: Effort = VERIFY_EFFORT,
    ) -> None:
        self.store, self.executor, self.proposer, self.space, self.hardware = store, executor, proposer, space, hardware
        self.budget_seconds, self.max_trials, self.cancelled = budget_seconds, max_trials, cancelled
        self._spent_seconds = spent_seconds  # of the budget, before the loop: imports, the fork server
        self.observer: Observer = observer or NullObserver()
        self.search_effort, self.verify_effort = search_effort, verify_effort
        self._ok: dict[Candidate, tuple[int, Measurement]] = {}
        self._verified: dict[Candidate, tuple[int, Measurement]] = {}
        self._failed_verification: set[Candidate] = set()
        self._retried: set[Candidate] = set()
        self._crashes: dict[str, set[Candidate]] = {}
        self._counts: Counter[str] = Counter()
        self._tried = 0
        self._outside: list[float] = []  # seconds outside measured steps of trials that started an engine

    # -- the clock ---------------------------------------------------------------------------------------------------

    @property
    def used_seconds(self) -> float:
        return self.executor.now() - self._began

    @property
    def left_seconds(self) -> float:
        return self.budget_seconds - self.used_seconds

    @property
    def _verification_seconds(self) -> float:
        """Seconds that verifying the best so far should take."""
        best = self._best()
        startup = max(self._outside[-8:], default=FIRST_TRIAL_SECONDS)
        steps = 9 * self._ok[best][1].step_seconds if best else 3.0
        return 1.2 * (startup + max(steps, self.verify_effort.min_seconds)) + 1.0

    @property
    def _reserve_seconds(self) -> float:
        """Seconds that searching leaves for verification.

        Enough for two if they are cheap, since the best may turn out slower than it was measured.
        """
        one = self._verification_seconds
        return min(0.4 * self.budget_seconds, max(one, min(2 * one, 0.2 * self.budget_seconds)))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> SearchSummary:
        """Searches, then verifies.

        Raises:
            UserError: the model or the script fails by itself, whatever the candidate.
        """
        self._began = self.executor.now() - self._spent_seconds
        for record in self.store.records():
            if record.outcome is not None:
                self._learn(record.number, record.candidate, record.outcome, record.role)
        self.store.begin_call(self.budget_seconds)
        try:
            ended = self._search()
            winner, verified = self._verify()
        except UserError:
            self._save_call("stopped: the job fails by itself")
            raise
        if self.cancelled():
            ended = "interrupted"
        if winner is not None:
            self.store.set_winner(winner.number, "verified" if verified else "measured, not verified")
        self.store.note_skips(self.proposer.skips())
        self._save_call(ended)
        return SearchSummary(
            winner, verified, ended, self.cancelled(), self.used_seconds, self._counts[Kind.OK.value], self._counts
        )

    def _save_call(self, ended: str = "") -> None:
        self.store.update_call(self.used_seconds, ended)
        self.observer.clock(self.used_seconds, self.budget_seconds)

    def _search(self) -> str:
        while True:
            if (why := self._why_stop()) is not None:
                return why
            proposal = self.proposer.next()
            if proposal is None:
                return self.proposer.stopped_early or "every candidate is tried or ruled out"
            session = self.executor.session(proposal.candidate, self._session_name())
            try:
                self._climb(session, proposal)
            finally:
                session.close()

    def _climb(self, session: Session, proposal: Proposal | None) -> None:
        """Measures ascending rungs in one engine until one fails or another engine is worth more."""
        while proposal is not None:
            outcome = self._trial(session, proposal)
            if not outcome.ok or not session.alive or self._why_stop() is not None:
                return
            proposal = self.proposer.next_rung(proposal.candidate)

    def _why_stop(self) -> str | None:
        if self.cancelled():
            return "interrupted"
        if self.max_trials is not None and self._tried >= self.max_trials:
            return f"--max-trials {self.max_trials} reached"
        if self.left_seconds <= self._reserve_seconds + self._least_trial_seconds:
            return "budget used"
        return None

    @property
    def _least_trial_seconds(self) -> float:
        return min(self._outside, default=0.0) if self._ok else 0.0

    def _session_name(self) -> str:
        return f"{len(self.store.study.get_trials(deepcopy=False)):04d}"

    def _trial(self, session: Session, proposal: Proposal) -> Outcome:
        candidate = proposal.candidate
        number = self.store.start(candidate, self.space, SEARCH, proposal.note)
        self.observer.trial_started(number, candidate, SEARCH, proposal.note)
        left = max(1.0, self.left_seconds - (self._reserve_seconds if self._ok else 0.0))
        limit = self.proposer.trial_seconds(candidate)
        outcome = session.measure(candidate, self.search_effort, min(left, limit))
        if outcome.kind is Kind.INTERRUPTED and limit < left and not self.cancelled():
            why = f"took over {format_duration(limit)}, far more than what similar trials took"
            outcome = dataclasses.replace(
                outcome, kind=Kind.TIMEOUT, reason=why, evidence="deadline of the trial", source=Source.BUDGET
            )
        self._tried += 1
        self._record(number, candidate, outcome, SEARCH)
        return outcome

    def _record(self, number: int, candidate: Candidate, outcome: Outcome, role: str) -> None:
        self.store.finish(number, outcome)
        self.observer.trial_finished(number, candidate, role, outcome)
        self._save_call()
        self._counts[outcome.kind.value] += 1
        if (outcome.seconds and not outcome.ok) or outcome.outside_seconds > 0:
            self._outside.append(outcome.outside_seconds)
        self._learn(number, candidate, outcome, role)
        self._apply_policy(candidate, outcome)

    def _learn(self, number: int, candidate: Candidate, outcome: Outcome, role: str) -> None:
        if role != VERIFY:
            self.proposer.observe(candidate, outcome)
        if outcome.measurement is None:
            if role == VERIFY and outcome.kind.says_something_of_the_candidate:
                self._failed_verification.add(candidate)
            return
        if role == VERIFY:
            self._verified[candidate] = (number, outcome.measurement)
        if role == VERIFY or candidate not in self._verified:
            self._ok[candidate] = (number, outcome.measurement)

    def _apply_policy(self, candidate: Candidate, outcome: Outcome) -> None:
        if outcome.kind in (Kind.INFRASTRUCTURE, Kind.FOREIGN):
            if candidate in self._retried:
                gave_up = dataclasses.replace(outcome, kind=Kind.CRASH)
                self.proposer.observe(candidate, gave_up)
            self._retried.add(candidate)
        if outcome.kind is Kind.CRASH and outcome.source is Source.EXCEPTION:
            crashed = self._crashes.setdefault(outcome.reason, set())
            crashed.add(candidate)
            if len({one.family for one in crashed}) >= 2 and not self._ok and not self._blames_the_model(crashed):
                where = f"{outcome.log}/rank{outcome.rank or 0}.log"
                raise UserError(
                    f"the job fails by itself, whatever the config: {outcome.reason} (phase {outcome.phase.value}; "
                    f"traceback in {where})"
                )

    def _blames_the_model(self, crashed: set[Candidate]) -> bool:
        """Whether all that crashed build the model in the same way, and the space has other ways."""
        ways = {tuple(one.get(knob) for knob in MODEL_KNOBS) for one in crashed}
        return len(ways) == 1 and any(
            len(self.space.knobs[knob].values) > 1 for knob in MODEL_KNOBS if knob in self.space.knobs
        )

    # -- the winner --------------------------------------------------------------------------------------------------

    def _feasible(self) -> list[Candidate]:
        """Measured candidates under the ceiling, fastest first; allocator retries cost two per cent."""
        good = [
            candidate
            for candidate, (_, measured) in self._ok.items()
            if measured.peak_bytes <= self.hardware.ceiling_bytes and candidate not in self._failed_verification
        ]

        def worth(candidate: Candidate) -> float:
            measured = self._ok[candidate][1]
            return measured.samples_per_second * (1 - RETRY_SHARE if measured.alloc_retries else 1)

        return sorted(good, key=worth, reverse=True)

    def _best(self) -> Candidate | None:
        return next(iter(self._feasible()), None)

    def _verify(self) -> tuple[Record | None, bool]:
        """(the winner, whether it is verified).

        Verifies the best in a fresh process, until no unverified candidate is faster, nor as fast with less memory. What
        verification measures replaces what the search measured: a candidate that turns out slower falls back in the
        order, and the next one is verified.
        """
        for _ in range(MAX_VERIFIED):
            candidate = self._to_verify()
            if candidate is None or self.cancelled() or self.left_seconds < 1.0:
                break
            outcome = self._verification(candidate)
            if outcome.kind in (Kind.INFRASTRUCTURE, Kind.FOREIGN) and self.left_seconds > self._verification_seconds:
                outcome = self._verification(candidate)
            if why := self._why_not(candidate):
                self.observer.say(f"verification of {candidate} failed: {why or outcome.reason}")
                if outcome.kind is not Kind.INTERRUPTED:
                    self._failed_verification.add(candidate)
        passed = [candidate for candidate in self._verified if not self._why_not(candidate)]
        if passed:
            chosen = self._thriftiest(passed)
            return self._as_record(chosen, self._verified[chosen], VERIFY), True
        best = self._best()
        return (self._as_record(best, self._ok[best], SEARCH) if best else None), False

    def _verification(self, candidate: Candidate) -> Outcome:
        number = self.store.start(candidate, self.space, VERIFY, "verification in a fresh process")
        self.observer.trial_started(number, candidate, VERIFY, "verification")
        session = self.executor.session(candidate, f"{number:04d}-verify")
        try:
            outcome = session.measure(candidate, self.verify_effort, max(1.0, self.left_seconds))
        finally:
            session.close()
        self._record(number, candidate, outcome, VERIFY)
        return outcome

    def _to_verify(self) -> Candidate | None:
        """The next candidate to verify, or None where what passed is good enough or no time is left."""
        ranked = self._feasible()
        passed = [candidate for candidate in ranked if candidate in self._verified]
        contenders = [candidate for candidate in ranked if candidate not in self._verified]
        if not passed:
            return next(iter(contenders), None)
        if self.left_seconds < self._verification_seconds:
            return None
        measured = self._verified[passed[0]][1]
        for candidate in contenders:
            other = self._ok[candidate][1]
            if other.samples_per_second > measured.samples_per_second:
                return candidate
            if overlap(other, measured) and as_fast(other, measured) and other.peak_bytes < 0.97 * measured.peak_bytes:
                return candidate
        return None

    def _why_not(self, candidate: Candidate) -> str:
        """What keeps a candidate from being a verified winner; empty where nothing does."""
        if candidate not in self._verified:
            failed = [r.outcome for r in self.store.records() if r.candidate == candidate and r.role == VERIFY]
            last = next((outcome for outcome in reversed(failed) if outcome is not None), None)
            return f"{last.kind.value}: {last.reason}" if last else "not verified"
        measured = self._verified[candidate][1]
        if measured.peak_bytes > self.hardware.ceiling_bytes:
            return "its peak leaves less than the headroom"
        if measured.alloc_retries:
            return f"{measured.alloc_retries} allocator retries"
        return ""

    def _thriftiest(self, passed: list[Candidate]) -> Candidate:
        """Among those whose throughput intervals overlap the fastest's, the one with the lowest peak."""
        fastest = max(passed, key=lambda c: self._verified[c][1].samples_per_second)
        best = self._verified[fastest][1]
        rivals = [c for c in passed if overlap(self._verified[c][1], best) and as_fast(self._verified[c][1], best)]
        return min(rivals, key=lambda c: (self._verified[c][1].peak_bytes, -self._verified[c][1].samples_per_second))

    def _as_record(self, candidate: Candidate, measured: tuple[int, Measurement], role: str) -> Record:
        number, measurement = measured
        found = next((record for record in self.store.records() if record.number == number), None)
        return found or Record(number, candidate, Outcome(Kind.OK, measurement=measurement), role)


def as_fast(one: Measurement, best: Measurement) -> bool:
    """Whether `one` may win by its lower memory: overlapping intervals can be wide, and speed is what is tuned."""
    return one.samples_per_second >= (1 - THRIFT_SHARE) * best.samples_per_second


def overlap(one: Measurement, other: Measurement) -> bool:
    """Whether the 95 % intervals of two throughputs meet."""
    low = [m.samples_per_second / (1 + m.step_seconds_spread / m.step_seconds) for m in (one, other)]
    high = [m.samples_per_second / max(1e-9, 1 - m.step_seconds_spread / m.step_seconds) for m in (one, other)]
    return low[0] <= high[1] and low[1] <= high[0]


def too_short(budget_seconds: float) -> str | None:
    """Why a budget cannot hold a trial, or None."""
    if budget_seconds < FIRST_TRIAL_SECONDS:
        return f"--budget {format_duration(budget_seconds)} is shorter than one trial: give at least 30s, better 10m"
    return None
