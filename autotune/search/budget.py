"""Budget of one `run` call: seconds used, seconds left, and the reserve for verification of the best candidate."""

from __future__ import annotations

from collections.abc import Callable

from autotune.executors.base import REFERENCE, Executor, MeasureSpec
from autotune.problem.candidate import Candidate, Value
from autotune.problem.job import checkpoint_seconds, weights_seconds
from autotune.problem.outcome import Measurement, Outcome
from autotune.search.proposer import Proposer
from autotune.search.trials import RESUME, SEARCH, VERIFY
from autotune.util.units import format_duration

FIRST_TRIAL_SECONDS = 5.0  # a shorter budget cannot hold one trial
MOST_RESERVED = 0.4  # share of the budget, at most, that is reserved for verification
SLACK = 1.2  # factor on expected seconds
WARMUP_STEPS = 3  # steps before a measurement
LEAST_SAVE_SECONDS = 0.5  # evaluation and save in a verification, in addition to start and steps
REFERENCE_SHARE = 0.1  # share of the budget, at most, for trials without DeepSpeed
LEAST_REFERENCE_BUDGET = 60.0  # seconds; a shorter budget holds no such trials
CHECKPOINT_SHARE = 0.2  # share of the budget, at most, for writing and reading a checkpoint


class Budget:
    """Seconds of one call, by the executor's clock.

    Args:
        executor: provides the clock.
        verify_spec: length of a verification.
        spent_seconds: seconds of the budget used before the loop, for imports and the fork server.
        best: returns the best candidate so far and its measurement; None if nothing was measured.
        due: returns how many verifications the search leaves time for: of the best, and of an earlier call's winner;
            0 before the first candidate of a script whose own config alone is measured.
    """

    def __init__(
        self,
        executor: Executor,
        proposer: Proposer,
        verify_spec: MeasureSpec,
        budget_seconds: float,
        spent_seconds: float,
        best: Callable[[], tuple[Candidate, Measurement] | None],
        due: Callable[[], int] = lambda: 1,
    ) -> None:
        self.executor, self.proposer, self.verify_spec = executor, proposer, verify_spec
        self.budget_seconds, self._best, self._due = budget_seconds, best, due
        self._spent_seconds = spent_seconds
        self.references = 0  # trials without DeepSpeed that follow the search
        # seconds outside measured steps, by family (`Candidate.family`) of an engine that the study has started
        self._starts: dict[tuple[tuple[str, Value], ...], float] = {}
        self._shortened: set[tuple[tuple[str, Value], ...]] = set()  # families that warmed up with fewer micro-batches
        self._share: dict[str, float] = {}  # by role: share of the expected seconds that the last trial used
        self.begin()

    def begin(self) -> None:
        """Start the clock of the loop."""
        self._began = self.executor.now() - self._spent_seconds

    @property
    def used_seconds(self) -> float:
        """Return the seconds used."""
        return self.executor.now() - self._began

    @property
    def left_seconds(self) -> float:
        """Return the seconds left for search and verification."""
        kept = min(REFERENCE_SHARE * self.budget_seconds, self.references * self.reference_seconds)
        return self.budget_seconds - self.used_seconds - kept

    @property
    def reference_seconds(self) -> float:
        """Expected seconds of one trial without DeepSpeed; 0 before anything was measured."""
        measuring = max((WARMUP_STEPS + REFERENCE.min_steps) * self._step_seconds, REFERENCE.min_seconds)
        return SLACK * (self._startup_seconds + measuring) if self._best() else 0.0

    def note(self, candidate: Candidate, outcome: Outcome, role: str) -> None:
        """Record a trial's time.

        The ratio of used to expected seconds scales the next expectation for that role.
        """
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
        """Expected seconds for verification of the best candidate."""
        return self._share.get(VERIFY, 1.0) * self._expected_seconds(VERIFY)

    @property
    def resume_seconds(self) -> float:
        """Expected seconds to write a checkpoint and resume from it."""
        return self._share.get(RESUME, 1.0) * self._expected_seconds(RESUME)

    def _expected_seconds(self, role: str) -> float:
        """Return the expected seconds of a role before scaling.

        A verification runs whole steps and saves the weights. A resume trial starts twice, and writes and reads a
        checkpoint.
        """
        if role == VERIFY:
            measuring = max(5 * self._step_seconds, self.verify_spec.min_seconds)
            return SLACK * (self._startup_seconds + measuring) + max(LEAST_SAVE_SECONDS, SLACK * self._save_seconds)
        if not self.tries_resuming or self._best() is None:
            return 0.0
        return SLACK * 2 * self._startup_seconds + 0.5 + self.checkpoint_seconds

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
        return self.executor.resumes and self.checkpoint_seconds <= CHECKPOINT_SHARE * self.budget_seconds

    @property
    def _step_seconds(self) -> float:
        best = self._best()
        return best[1].step_seconds if best else 0.6

    @property
    def _startup_seconds(self) -> float:
        """Seconds until the best candidate is measured, including warm-up.

        If the study has started no engine of its family, the slowest other start is used.
        """
        best = self._best()
        own = self._starts.get(best[0].family) if best else None
        took = max(self._starts.values(), default=FIRST_TRIAL_SECONDS) if own is None else own
        # a family that warmed up with a shortened accumulation uses whole steps next time
        shortened = best is not None and (best[1].extrapolated or best[0].family in self._shortened)
        return took + (WARMUP_STEPS * best[1].step_seconds if best and shortened else 0.0)

    @property
    def reserve_seconds(self) -> float:
        """Seconds that the search leaves for verification.

        The reserve includes a resume trial if the sum stays within MOST_RESERVED of the budget. Otherwise it covers
        verification alone, because a partial resume trial proves nothing. Before a script's first candidate, the reserve
        leaves that candidate as much as a verification takes.
        """
        if not (due := self._due()):
            return max(0.0, min(self.verification_seconds, self.left_seconds - self.verification_seconds))
        most = MOST_RESERVED * self.budget_seconds
        verifying = due * self.verification_seconds
        whole = verifying + self.resume_seconds
        return whole if whole <= most else min(most, verifying)

    @property
    def least_trial_seconds(self) -> float:
        """Seconds of the shortest trial that starts an engine; 0 before the first start."""
        return min(self._starts.values()) + 1.0 if self._starts else 0.0

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
