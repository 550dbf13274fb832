"""The budget of one call of `run`: what is used, what is left, and what verification of the best so far would take of it."""

from __future__ import annotations

from collections.abc import Callable

from autotune.executors.base import Effort, Executor
from autotune.problem.candidate import Candidate, Value
from autotune.problem.checkpoint import checkpoint_seconds, weights_seconds
from autotune.problem.outcome import Measurement, Outcome
from autotune.search.proposer import Proposer
from autotune.search.records import RESUME, SEARCH, VERIFY
from autotune.units import format_duration

FIRST_TRIAL_SECONDS = 5.0  # a budget below this cannot hold one trial
MOST_RESERVED = 0.4  # of the budget, for verification
SLACK = 1.2  # times what is expected is kept
WARMUP_STEPS = 3  # of a trial, before what is measured
LEAST_SAVE_SECONDS = 0.5  # of a verification, beside its start and its steps: an evaluation's forward, a save
CHECKPOINT_SHARE = 0.2  # of the budget, at most, for writing a checkpoint and reading it


class Clock:
    """Seconds of one call, on the executor's clock.

    Args:
        spent_seconds: of the budget, before the loop: imports, the fork server.
        best: the best so far and its measurement; None where there is none.
    """

    def __init__(
        self,
        executor: Executor,
        proposer: Proposer,
        verify_effort: Effort,
        budget_seconds: float,
        spent_seconds: float,
        best: Callable[[], tuple[Candidate, Measurement] | None],
    ) -> None:
        self.executor, self.proposer, self.verify_effort = executor, proposer, verify_effort
        self.budget_seconds, self._best = budget_seconds, best
        self._spent_seconds = spent_seconds
        # seconds outside measured steps, of families (`Candidate.family`) whose engine was started
        self._starts: dict[tuple[tuple[str, Value], ...], float] = {}
        self._shortened: set[tuple[tuple[str, Value], ...]] = (
            set()
        )  # of these, those that warmed up with fewer micro-batches
        self._share: dict[str, float] = {}  # of what was expected of a role, what it took
        self.begin()

    def begin(self) -> None:
        """The loop begins now."""
        self._began = self.executor.now() - self._spent_seconds

    @property
    def used_seconds(self) -> float:
        return self.executor.now() - self._began

    @property
    def left_seconds(self) -> float:
        return self.budget_seconds - self.used_seconds

    def note(self, candidate: Candidate, outcome: Outcome, role: str) -> None:
        """Takes in a trial. How much of what was expected verification really took is expected of the next one."""
        if not outcome.ok:
            return
        if role == SEARCH:
            if outcome.started:
                self._starts[candidate.family] = outcome.outside_seconds
                if outcome.measurement is not None and outcome.measurement.extrapolated:
                    self._shortened.add(candidate.family)
        elif (best := self._best()) and best[0] == candidate and (expected := self._expected_seconds(role)):
            self._share[role] = min(1.0, SLACK * outcome.seconds / expected)

    @property
    def verification_seconds(self) -> float:
        """Seconds that verifying the best so far should take."""
        return self._share.get(VERIFY, 1.0) * self._expected_seconds(VERIFY)

    @property
    def resume_seconds(self) -> float:
        """Seconds that a checkpoint and going on from it should take."""
        return self._share.get(RESUME, 1.0) * self._expected_seconds(RESUME)

    def _expected_seconds(self, role: str) -> float:
        """Of a verification, whole steps and a save of the weights; of going on from a checkpoint two starts, and its bytes
        written and read."""
        if role == VERIFY:
            measuring = max(5 * self._step_seconds, self.verify_effort.min_seconds)
            return SLACK * (self._startup_seconds + measuring) + max(LEAST_SAVE_SECONDS, SLACK * self._save_seconds)
        if not self.tries_resuming or self._best() is None:
            return 0.0
        return SLACK * 2 * self._startup_seconds + 0.5 + self.checkpoint_seconds

    @property
    def checkpoint_seconds(self) -> float:
        trace = self.proposer.predictor.trace
        return checkpoint_seconds(sum(trace.parameters), trace.frozen)

    @property
    def _save_seconds(self) -> float:
        """Of the weights, which verification gathers as a training's save does."""
        if not self.verify_effort.certify:
            return 0.0
        predictor = self.proposer.predictor
        elements = sum(predictor.trace.parameters) + predictor.trace.frozen
        return weights_seconds(elements, predictor.job.element_bytes)

    @property
    def tries_resuming(self) -> bool:
        return self.executor.resumes and self.checkpoint_seconds <= CHECKPOINT_SHARE * self.budget_seconds

    @property
    def _step_seconds(self) -> float:
        best = self._best()
        return best[1].step_seconds if best else 0.6

    @property
    def _startup_seconds(self) -> float:
        """Seconds until the best is measured, its warm-up included; where none of its family was started in this call the most
        of what others took."""
        best = self._best()
        own = self._starts.get(best[0].family) if best else None
        took = max(self._starts.values(), default=FIRST_TRIAL_SECONDS) if own is None else own
        # what warmed up with a shortened accumulation does so with whole steps next time
        shortened = best is not None and (best[1].extrapolated or best[0].family in self._shortened)
        return took + (WARMUP_STEPS * best[1].step_seconds if best and shortened else 0.0)

    @property
    def reserve_seconds(self) -> float:
        """Seconds that searching leaves for verification: with going on from a checkpoint, or where that would take too large a
        share of the budget without, since a part of it is of no use."""
        most = MOST_RESERVED * self.budget_seconds
        whole = self.verification_seconds + self.resume_seconds
        return whole if whole <= most else min(most, self.verification_seconds)

    @property
    def least_trial_seconds(self) -> float:
        """Of one that starts an engine; 0 where none did."""
        return min(self._starts.values()) + 1.0 if self._starts else 0.0

    @property
    def time_for_another(self) -> bool:
        """Whether one more can be verified, where something has passed: what going on from a checkpoint takes is kept, if there
        is enough for it."""
        left, resuming = self.left_seconds, self.resume_seconds
        return left >= self.verification_seconds + (resuming if left >= resuming else 0.0)

    def verification_limit(self, trial_seconds: float, step_seconds: float) -> float:
        """Seconds that a verification may take at the most: a trial's, and whole steps of a long accumulation, two starts, and a
        checkpoint on a slow disk."""
        return 2 * trial_seconds + 20 * step_seconds + self.verify_effort.max_seconds + 4 * self.checkpoint_seconds


def too_short(budget_seconds: float) -> str | None:
    """Why a budget cannot hold a trial, or None."""
    if budget_seconds < FIRST_TRIAL_SECONDS:
        return f"--budget {format_duration(budget_seconds)} is shorter than one trial: give at least 30s, better 10m"
    return None
