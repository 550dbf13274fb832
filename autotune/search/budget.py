"""Budget of one `run` call: seconds used, seconds left, and the reserve for verification of the best candidate."""

from __future__ import annotations

from collections.abc import Callable

from autotune.executors.base import REFERENCE, Executor, MeasureSpec
from autotune.problem.candidate import Candidate
from autotune.problem.job import checkpoint_seconds, weights_seconds
from autotune.search.leaderboard import Leaderboard
from autotune.search.proposer import FIRST_TRIAL_SECONDS, TRIAL_SHARE, Proposer
from autotune.search.trials import SEARCH, VERIFY
from autotune.util.units import format_duration

MOST_RESERVED = 0.4  # share of the budget, at most, that is reserved for verification
SLACK = 1.2  # factor on expected seconds
WARMUP_STEPS = 3  # steps before a measurement
REFERENCE_SHARE = 0.1  # share of the budget, at most, for trials after the search
LEAST_REFERENCE_BUDGET = 60.0  # seconds; a shorter budget holds no such trials


class Budget:
    """Seconds of one call, by the executor's clock.

    Args:
        executor: provides the clock.
        verify_spec: length of a verification.
        spent_seconds: seconds of the budget used before the loop, for imports and the fork server.
        look: returns the leaderboard of the trials so far.
        own: config of a script as it is; None without one.
    """

    def __init__(
        self,
        executor: Executor,
        proposer: Proposer,
        verify_spec: MeasureSpec,
        budget_seconds: float,
        spent_seconds: float,
        look: Callable[[], Leaderboard],
        own: Candidate | None = None,
    ) -> None:
        self.executor, self.proposer, self.verify_spec = executor, proposer, verify_spec
        self.budget_seconds, self._look, self._own = budget_seconds, look, own
        self.following = 0  # trials after the search: those of levers, and those without DeepSpeed
        self._began = executor.now() - spent_seconds

    @property
    def used_seconds(self) -> float:
        """Return the seconds used."""
        return self.executor.now() - self._began

    @property
    def left_seconds(self) -> float:
        """Return the seconds left for search and verification."""
        kept = min(REFERENCE_SHARE * self.budget_seconds, self.following * self.following_seconds)
        return self.budget_seconds - self.used_seconds - kept

    @property
    def following_seconds(self) -> float:
        """Expected seconds of one trial after the search; 0 before anything was measured."""
        if self._best is None:
            return 0.0
        measuring = max((WARMUP_STEPS + REFERENCE.min_steps) * self._step_seconds, REFERENCE.min_seconds)
        return SLACK * (self._startup_seconds + measuring)

    @property
    def _best(self) -> Candidate | None:
        return self._look().best

    @property
    def _due(self) -> int:
        """Verifications that the search leaves time for: of the best, and of an earlier call's winner.

        0 before the first candidate of a script whose own config alone is measured: that candidate is worth more.
        """
        board = self._look()
        if board.measured.keys() == {self._own} and not board.trials_now:
            return 0
        return 2 if board.incumbent is not None else 1

    @property
    def verification_seconds(self) -> float:
        """Expected seconds for verification of the best candidate: a start, whole steps, and a save of the weights."""
        measuring = max(self.verify_spec.min_steps * self._step_seconds, self.verify_spec.min_seconds)
        expected = SLACK * (self._startup_seconds + measuring + self._save_seconds)
        verified = [record.outcome for record in self._look().trials_now if record.role == VERIFY]
        took = [outcome.seconds for outcome in verified if outcome is not None and outcome.ok]
        return min(expected, SLACK * took[-1]) if took else expected

    @property
    def resume_seconds(self) -> float:
        """Expected seconds to write a checkpoint and resume from it: two starts, a write and a read."""
        if not self.tries_resuming or self._best is None:
            return 0.0
        return SLACK * 2 * self._startup_seconds + self.checkpoint_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Return the estimated seconds to write and load a checkpoint."""
        trace = self.proposer.predictor.trace
        return checkpoint_seconds(sum(trace.parameters), trace.frozen)

    @property
    def _save_seconds(self) -> float:
        """Seconds to save the weights, which verification gathers as a training does."""
        if not self.verify_spec.certify:
            return 0.0
        predictor = self.proposer.predictor
        elements = sum(predictor.trace.parameters) + predictor.trace.frozen
        return weights_seconds(elements, predictor.job.element_bytes)

    @property
    def tries_resuming(self) -> bool:
        """Return True if resuming is possible and cheap enough to be tested."""
        return self.executor.resumes and self.checkpoint_seconds <= TRIAL_SHARE * self.budget_seconds

    @property
    def _step_seconds(self) -> float:
        return self._look().measured[self._best][1].step_seconds if self._best is not None else 0.6

    @property
    def _startup_seconds(self) -> float:
        """Seconds until the best candidate is measured, including warm-up.

        If the study has started no engine of its family, the slowest other start is used.
        """
        best = self._best
        starts = []  # (of the best's family, seconds)
        for record in self._look().ended:
            if record.role == SEARCH and record.outcome is not None and record.outcome.ok and record.outcome.started:
                is_own = best is not None and record.candidate.family == best.family
                starts.append((is_own, record.outcome.outside_seconds))
        took = max(starts, default=(False, FIRST_TRIAL_SECONDS))[1]
        # a family that warmed up with a shortened accumulation uses whole steps next time
        shortened = best is not None and self._look().measured[best][1].extrapolated
        return took + WARMUP_STEPS * self._step_seconds * shortened

    @property
    def reserve_seconds(self) -> float:
        """Seconds that the search leaves for verification.

        The reserve includes a resume trial if the sum stays within MOST_RESERVED of the budget. Otherwise it covers
        verification alone, because a partial resume trial proves nothing. Before a script's first candidate, the reserve
        leaves that candidate as much as a verification takes.
        """
        due = self._due
        if not due:
            return max(0.0, min(self.verification_seconds, self.left_seconds - self.verification_seconds))
        most = MOST_RESERVED * self.budget_seconds
        verifying = due * self.verification_seconds
        whole = verifying + self.resume_seconds
        return whole if whole <= most else min(most, verifying)

    @property
    def time_for_another(self) -> bool:
        """True if the time left allows one more verification after a candidate has passed.

        The time for a resume trial is kept free if enough is left for it.
        """
        left, resuming = self.left_seconds, self.resume_seconds
        return left >= self.verification_seconds + (resuming if left >= resuming else 0.0)

    def verification_limit(self, trial_seconds: float, step_seconds: float) -> float:
        """Return the time limit of a verification in seconds.

        The limit covers two starts, whole steps of a long accumulation, and a checkpoint on a slow disk.
        """
        return 2 * trial_seconds + 20 * step_seconds + self.verify_spec.max_seconds + 4 * self.checkpoint_seconds


def too_short(budget_seconds: float) -> str | None:
    """Return why a budget cannot hold a trial, or None."""
    if budget_seconds < FIRST_TRIAL_SECONDS:
        return f"--budget {format_duration(budget_seconds)} is shorter than one trial: give at least 30s, better 10m"
    return None
