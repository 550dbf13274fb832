"""The budget of one call of `run`: what is used, what is left, and what verification of the best so far would take of it."""

from __future__ import annotations

from collections.abc import Callable

from autotune.executors.base import Effort, Executor
from autotune.problem.checkpoint import checkpoint_seconds
from autotune.problem.outcome import Kind, Measurement, Outcome
from autotune.search.proposer import Proposer
from autotune.units import format_duration

FIRST_TRIAL_SECONDS = 5.0  # a budget below this cannot hold one trial
CHECKPOINT_SHARE = 0.2  # of the budget, at most, for writing a checkpoint and reading it


class Clock:
    """Seconds of one call, on the executor's clock.

    Args:
        spent_seconds: of the budget, before the loop: imports, the fork server.
        best: the measurement of the best so far; None where there is none.
    """

    def __init__(
        self,
        executor: Executor,
        proposer: Proposer,
        verify_effort: Effort,
        budget_seconds: float,
        spent_seconds: float,
        best: Callable[[], Measurement | None],
    ) -> None:
        self.executor, self.proposer, self.verify_effort = executor, proposer, verify_effort
        self.budget_seconds, self._best = budget_seconds, best
        self._spent_seconds = spent_seconds
        self._outside: list[float] = []  # seconds outside measured steps of trials that started an engine
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

    def note(self, outcome: Outcome) -> None:
        """Takes in a trial of the search."""
        if outcome.kind in (Kind.OK, Kind.OOM_DEVICE) and outcome.outside_seconds > 0:
            self._outside.append(outcome.outside_seconds)

    @property
    def verification_seconds(self) -> float:
        """Seconds that verifying the best so far should take."""
        best = self._best()
        steps = 9 * best.step_seconds if best else 3.0
        return 1.2 * (self._startup_seconds + max(steps, self.verify_effort.min_seconds)) + 1.0

    @property
    def resume_seconds(self) -> float:
        """Seconds that a checkpoint and going on from it should take: two starts, each with two steps to warm up and one, and
        its bytes written and read."""
        best = self._best()
        if not self.tries_resuming or best is None:
            return 0.0
        starts = 1.2 * 2 * (self._startup_seconds + 3 * best.step_seconds) + 1.0
        return starts + self.checkpoint_seconds

    @property
    def checkpoint_seconds(self) -> float:
        trace = self.proposer.predictor.trace
        return checkpoint_seconds(sum(trace.parameters), trace.frozen)

    @property
    def tries_resuming(self) -> bool:
        return self.executor.resumes and self.checkpoint_seconds <= CHECKPOINT_SHARE * self.budget_seconds

    @property
    def _startup_seconds(self) -> float:
        return max(self._outside[-8:], default=FIRST_TRIAL_SECONDS)

    @property
    def reserve_seconds(self) -> float:
        """Seconds that searching leaves for verification.

        Enough for two if they are cheap, since the best may turn out slower than it was measured.
        """
        one = self.verification_seconds
        verifying = max(one, min(2 * one, 0.2 * self.budget_seconds))
        return min(0.4 * self.budget_seconds, verifying + self.resume_seconds)

    @property
    def least_trial_seconds(self) -> float:
        """Of those that started an engine."""
        return min(self._outside, default=0.0)


def too_short(budget_seconds: float) -> str | None:
    """Why a budget cannot hold a trial, or None."""
    if budget_seconds < FIRST_TRIAL_SECONDS:
        return f"--budget {format_duration(budget_seconds)} is shorter than one trial: give at least 30s, better 10m"
    return None
