"""Search loop, verification, and retry and failure-attribution policy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotune.errors import MachineError, Stopped, Unusable, UserError, one_line
from autotune.executors.base import REFERENCE as REFERENCE_SPEC
from autotune.executors.base import RESUME as RESUME_SPEC
from autotune.executors.base import SEARCH as SEARCH_SPEC
from autotune.executors.base import VERIFY as VERIFY_SPEC
from autotune.executors.base import Executor, MeasureSpec, Session
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    COMPILED,
    EXPANDABLE,
    MICRO_BATCH,
    MODEL_KNOBS,
    Candidate,
    Value,
    describe,
    samples,
)
from autotune.problem.knobs import lossy_of
from autotune.problem.outcome import Outcome, OutcomeKind, Source
from autotune.rank.ds_config import why_no_reference
from autotune.search.budget import LEAST_REFERENCE_BUDGET, REFERENCE_SHARE, Budget
from autotune.search.certificate import Certifier
from autotune.search.concurrency import SearchWorkers
from autotune.search.leaderboard import NOT_VERIFIED, Leaderboard, reference_name, share_that_fits
from autotune.search.proposer import TRIAL_SHARE, Proposal, Proposer
from autotune.search.stopping import Stop, StopReason
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH, VERIFY, Record
from autotune.util.streams import LOG
from autotune.util.units import counted, format_bytes, format_duration

# -- tuner -------------------------------------------------------------------------------------------------------------

MAX_VERIFIED = 4
MACHINE_FAILURES = 3  # consecutive failures of any candidates that are attributed to the machine
VERIFYING_SHARE = 0.8  # share of the time left in which a verification starts and measures; the rest is for the save


@dataclass
class SearchSummary:
    """Result of the search in one `run` call."""

    winner: Record | None
    verified: bool
    stop_sentence: str  # of the Stop
    interrupted: bool
    used_seconds: float
    by_kind: Counter[str] = field(default_factory=Counter)
    confidence: str = ""  # sentence of `Confidence`; empty without a measurement


class Tuner:
    """One `run` call on a study."""

    def __init__(
        self,
        store: StudyStore,
        executor: Executor,
        proposer: Proposer,
        *,
        budget_seconds: float,
        max_trials: int | None = None,
        spent_seconds: float = 0.0,
        observer: Observer | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        search_spec: MeasureSpec = SEARCH_SPEC,
        verify_spec: MeasureSpec = VERIFY_SPEC,
        beside: Sequence[Executor] = (),
        workers: SearchWorkers | None = None,
        references: bool = False,
    ) -> None:
        self.store, self.proposer, self.cancelled = store, proposer, cancelled
        self.observer: Observer = observer or NullObserver()
        own = Certifier(proposer.job).own
        workers = workers or SearchWorkers()
        self.budget = Budget(
            executor, proposer, verify_spec, budget_seconds, spent_seconds, lambda: self.leaderboard, own
        )
        self.trials = TrialRecorder(store, proposer, self.budget, workers, self.observer, cancelled)
        self.loop = SearchLoop(self.trials, [executor, *beside], search_spec, max_trials)
        self.verifier = Verifier(self.trials, executor, verify_spec)
        self.references = References(self.trials, executor) if references else None

    @property
    def leaderboard(self) -> Leaderboard:
        """Leaderboard of the trials so far."""
        return self.trials.leaderboard

    def run(self) -> SearchSummary:
        """Search, then verify.

        Raises:
            UserError: the model or the script fails with any candidate.
            MachineError: the machine failed repeatedly before the first measurement.
        """
        self.trials.replay_study()
        if line := mark_out_of_space(self.store, self.trials.is_inside):
            self.observer.print_line(line)
        self.store.begin_call(self.budget.budget_seconds)
        try:
            stop, winner, verified = self._search_and_verify()
        except (UserError, MachineError) as error:
            failing = StopReason.JOB_FAILS if isinstance(error, UserError) else StopReason.MACHINE_ERROR
            self.trials.save_call(failing.stop().sentence)
            raise
        if winner is not None:
            self.store.set_winner(winner.number, "verified" if verified else "measured, not verified")
            winner = self.store.winner or winner
            if self.references is not None and verified:
                self.references.run(winner.candidate)
        if self.cancelled():
            stop = StopReason.INTERRUPTED.stop()
        self.store.note_skips(self.proposer.skips())
        left = self.proposer.confidence()
        confidence = left.sentence if left is not None else ""
        used = self.trials.save_call(stop.sentence, confidence)
        counts = self.store.finished
        return SearchSummary(winner, verified, stop.sentence, self.cancelled(), used, counts, confidence)

    def _search_and_verify(self) -> tuple[Stop, Record | None, bool]:
        """Search and verify until neither can improve the result.

        Budget that verification leaves goes back to the search, if it suffices for another trial and its verification.
        The search also continues if verification has rejected candidates.

        Returns:
            The reason for the end, the winner, and whether it is verified.
        """
        stop, tried = self.loop.run(), -1
        while True:
            before = self.leaderboard.rejected
            winner, verified = self.verifier.run()
            learnt = self.leaderboard.rejected > before
            goes_on = not self.loop.parallel and self.loop.why_stop() is None and self.loop.tried > tried
            if goes_on and (learnt or (verified and stop.reason is StopReason.BUDGET_USED)):
                tried = self.loop.tried
                stop = self.loop.run()
            elif verified or not learnt:
                return stop, winner, verified


# -- search loop -------------------------------------------------------------------------------------------------------


class SearchLoop:
    """Measures proposed candidates until there is a reason to stop.

    Args:
        executors: one per search worker; the first worker is the calling thread.
        measure_spec: length of a trial.
        max_trials: trials of this call, at most; None without a limit.
    """

    def __init__(
        self, trials: TrialRecorder, executors: Sequence[Executor], measure_spec: MeasureSpec, max_trials: int | None
    ) -> None:
        self.trials, self.measure_spec, self.max_trials = trials, measure_spec, max_trials
        self.executor, self._beside = executors[0], executors[1:]
        self.proposer, self.workers = trials.proposer, trials.workers
        self.tried = 0
        trials.budget.following += len(self.proposer.space.levers)

    @property
    def parallel(self) -> bool:
        """Return True if several workers search."""
        return bool(self._beside)

    def run(self) -> Stop:
        """Search with all executors, turn the levers, and return the reason for the end of the search.

        Levers and verification use the first executor alone.
        """
        stop = self._search()
        self.trials.budget.following = 0
        with self.workers.locked():
            for name, domain in self.proposer.space.levers.items():
                self._turn(name, domain.values[0])
        return stop

    def _turn(self, name: str, value: Value) -> None:
        """Measure the best candidate with a lever, unless it was tried or no time is left for it and a verification."""
        board, budget = self.trials.leaderboard, self.trials.budget
        needed = budget.reserve_seconds + budget.following_seconds
        if board.best is None or budget.left_seconds < needed or self.why_stop():
            return
        turned = board.best.but(**{name: value})
        if turned not in {record.candidate for record in board.ended}:
            self._measure(self.executor, Proposal(turned, f"{describe({name: value})} at the best config"))

    def _search(self) -> Stop:
        if not self._beside or self.why_stop() is not None:
            with self.workers.locked():
                return self._work(self.executor)
        with ThreadPoolExecutor(len(self._beside)) as pool:
            # all executors open before the first trial, because their imports would slow measurements
            opened = list(pool.map(self._open, self._beside))
            for executor in itertools.compress(self._beside, opened):
                pool.submit(self._work_beside, executor)
            with self.workers.capture_failure(), self.workers.locked():
                stop = self._work(self.executor)
        self.workers.raise_failure()
        return stop

    def _open(self, executor: Executor) -> bool:
        with self.workers.capture_failure(), suppress(Stopped):  # the user stopped the call
            executor.open(self.trials.observer.print_line)
            executor.check(self.trials.observer.print_line)
            return True
        return False

    def _work_beside(self, executor: Executor) -> None:
        # the user stopped the call, or another worker failed
        with self.workers.capture_failure(), suppress(Stopped), self.workers.locked():
            self._work(executor)

    def _work(self, executor: Executor) -> Stop:
        while True:
            self._poll_peers()
            if (why := self.why_stop()) is not None:
                return why
            budget = self.trials.budget
            proposal = self.proposer.next(budget.left_seconds - budget.reserve_seconds)
            if proposal is None:
                # the running trials' outcomes may open new candidates, or be lost and retried
                if self.trials.running_elsewhere or self.workers.at_work:
                    self._await_news()
                    continue
                return self.proposer.stopped or StopReason.ALL_TRIED.stop()
            self._measure(executor, proposal)

    def _measure(self, executor: Executor, proposal: Proposal) -> None:
        patience = self.proposer.patience(proposal.candidate)
        name = f"{len(self.trials.store.study.get_trials(deepcopy=False)):04d}"
        session = executor.session(proposal.candidate, name, patience)
        try:
            self._measure_ladder(session, proposal)
        finally:
            with self.workers.teardown_section(proposal.candidate):
                session.close()

    def _await_news(self) -> None:
        """Wait until a trial of a peer or another worker starts or ends, or this call must stop."""

        def state() -> tuple[int, list[Record], int]:
            return len(self.trials.known), self.trials.running_elsewhere, len(self.workers.at_work)

        before = state()
        while before == state() and self.why_stop() is None:
            self.workers.wait()
            self._poll_peers()

    def _measure_ladder(self, session: Session, proposal: Proposal | None) -> None:
        """Measure ascending rungs in one engine until a trial fails or another engine is worth more."""
        while proposal is not None:
            outcome = self._trial(session, proposal)
            if outcome is None or not outcome.ok or not session.alive or self.why_stop() is not None:
                return
            self._poll_peers()
            proposal = self.proposer.next_rung(proposal.candidate)

    def why_stop(self) -> Stop | None:
        """Return the reason to stop that holds whatever is proposed, or None."""
        trials, budget = self.trials, self.trials.budget
        if trials.cancelled():
            return StopReason.INTERRUPTED.stop()
        if self.workers.failed:
            return StopReason.WORKER_FAILED.stop()
        if self.max_trials is not None and self.tried + len(self.workers.at_work) >= self.max_trials:
            return StopReason.MAX_TRIALS.stop(count=self.max_trials)
        if trials.machine_failures >= MACHINE_FAILURES:
            return StopReason.MACHINE_FAILED_REPEATEDLY.stop(count=trials.machine_failures)
        return StopReason.BUDGET_USED.stop() if budget.left_seconds <= budget.reserve_seconds else None

    def _poll_peers(self) -> None:
        """Learn outcomes of peer tuners, and reserve candidates that peers and other workers are measuring."""
        self.trials.poll_peers()
        if self.trials.store.shared or self.parallel:
            searched = [record.candidate for record in self.trials.running_elsewhere if record.role == SEARCH]
            self.proposer.reserve([*searched, *self.workers.at_work])

    def _measure_spec(self, candidate: Candidate) -> MeasureSpec:
        """Return the length of a trial, which ends early once the candidate cannot beat the best one.

        A trial that takes more than its share of the budget is cut. The first step of a compiled model has no such limit.
        """
        slowest = self.trials.leaderboard.least_winning_speed()
        compiles = candidate.get(COMPILED, self.proposer.job.compiled)
        return dataclasses.replace(
            self.measure_spec,
            beaten_step_seconds=samples(self.proposer.job, candidate) / slowest if slowest else math.inf,
            share_seconds=math.inf if compiles else self.proposer.trial_share_seconds,
        )

    def _trial(self, session: Session, proposal: Proposal) -> Outcome | None:
        """Measure a candidate; None if a peer tuner is already trying it."""
        candidate, budget = proposal.candidate, self.trials.budget
        number = self.trials.claim(candidate, proposal.note)
        if number is None:
            return None
        with self.workers.claim(candidate):
            with self.workers.device_section(candidate):
                reserved = budget.reserve_seconds if self.trials.leaderboard.measured else 0.0
                left = max(1.0, budget.left_seconds - reserved)
                limit, measure_spec = self.proposer.trial_seconds(candidate), self._measure_spec(candidate)
                with self.workers.unlocked():
                    outcome = session.measure(candidate, measure_spec, min(left, limit))
            self.tried += 1
            outcome = self.trials.end(number, candidate, outcome, SEARCH, limit, left)
        return outcome


# -- trial recorder ----------------------------------------------------------------------------------------------------


class TrialRecorder:
    """Stores each outcome before the next measurement, and teaches the proposer what the list of trials has gained."""

    def __init__(
        self,
        store: StudyStore,
        proposer: Proposer,
        budget: Budget,
        workers: SearchWorkers,
        observer: Observer,
        cancelled: Callable[[], bool],
    ) -> None:
        self.store, self.proposer, self.budget = store, proposer, budget
        self.workers, self.observer, self.cancelled = workers, observer, cancelled
        self.certifier = Certifier(proposer.job)
        self.known: set[int] = set()  # numbers of the trials that the proposer has learned
        self.running_elsewhere: list[Record] = []  # trials of peers
        self.is_inside, self._began = proposer.space.test_of(proposer.candidates), 0
        self._look()

    def _look(self) -> None:
        about = (self.proposer.hardware, self.proposer.job, self.is_inside, self._began)
        self.leaderboard = self.store.leaderboard(*about)

    def _gained(self) -> list[tuple[Record, Outcome]]:
        """Return the ended trials that the list has gained, of whichever tuner."""
        ended = [(one, one.outcome) for one in self.store.records() if one.outcome is not None]
        gained = [(record, outcome) for record, outcome in ended if record.number not in self.known]
        self.known.update(record.number for record, _ in gained)
        return gained

    def replay_study(self) -> None:
        """Learn the outcomes of the study's earlier calls."""
        self._began = len(self.store.study.get_trials(deepcopy=False))
        self._look()
        gained = self._gained()
        self.certifier = Certifier(self.proposer.job, [record for record, _ in gained])
        worked = [self.leaderboard.call(record) for record, outcome in gained if outcome.ok]
        # until some call has a success, the user may have fixed the machine or the job between two calls
        first_success = min(worked, default=-1.0 if self.store.peers() else math.inf)
        latest = 0
        for record, outcome in gained:
            call = self.leaderboard.call(record)
            if call > latest:  # a speed of an earlier call is that of a machine that may have been slower
                self.proposer.begin_call()
            latest = max(call, latest)
            self._learn(record, outcome, outcome.kind.may_be_fixed_between_calls and call < first_success)
        self.proposer.begin_call()
        self._drop_losers()

    def catch_up(self) -> None:
        """Show and learn the outcomes of this tuner and its peers since the last time."""
        gained = self._gained()
        if not gained:
            return
        self._look()
        for record, outcome in gained:
            self.observer.trial_finished(record.number, record.candidate, record.role, outcome)
            self._learn(record, outcome)
        self._drop_losers()

    def save_call(self, stop_sentence: str = "", confidence: str = "") -> float:
        """Store the seconds used, the sentence of the stop, and the sentence that bounds the speed of untried candidates.

        Returns:
            The seconds as stored, so that the last line of a call and `show` agree.
        """
        used_seconds = round(self.budget.used_seconds, 1)
        self.store.update_call(used_seconds, stop_sentence, confidence)
        return used_seconds

    def poll_peers(self) -> None:
        """Learn outcomes of peer tuners since the last poll."""
        if self.store.shared:
            self.running_elsewhere = self.store.running_elsewhere()
            self.catch_up()

    def claim(self, candidate: Candidate, note: str) -> int | None:
        """Store that a trial of the search begins; return its number, None if a peer tuner is trying the candidate."""
        number = self.store.claim(candidate, self.proposer.space, SEARCH, note, self.known)
        if number is not None:
            self.observer.trial_started(number, candidate, SEARCH, note)
        return number

    def begin(self, candidate: Candidate, role: str, note: str) -> int:
        """Store that another trial begins, and return its number."""
        number = self.store.start(candidate, self.proposer.space, role, note)
        self.observer.trial_started(number, candidate, role, note)
        return number

    def end(
        self, number: int, candidate: Candidate, outcome: Outcome, role: str, limit_seconds: float, left_seconds: float
    ) -> Outcome:
        """Store and learn the outcome of a trial, and return it.

        The outcome is downgraded if the trial is retried, and invalid if the candidate trains something else.

        Args:
            left_seconds: the budget that was left for the trial.
        """
        # the budget or the user may have ended the trial before its own limit
        limited = limit_seconds if limit_seconds < left_seconds and not self.cancelled() else None
        outcome = downgrade_first_failure(candidate, outcome, limited, self.proposer, self.workers)
        outcome = self.certifier.checked(candidate, outcome, role)
        self.store.finish(number, outcome)
        self.catch_up()
        self.save_call()
        self._attribute_failure(candidate, outcome)
        return outcome

    # -- learning ----------------------------------------------------------------------------------------------------

    def _learn(self, record: Record, outcome: Outcome, fixable: bool = False) -> None:
        """Teach the proposer an outcome.

        An OOM on a machine with clearly less memory (`Hardware.outgrew`), or a failure that is `fixable` (between calls),
        excludes nothing. Nor does a trial that was too slow for a shorter budget of another call.
        """
        candidate, proposer = record.candidate, self.proposer
        if not proposer.space.levers.keys().isdisjoint(candidate.as_dict):
            return  # a lever speaks for none of the candidates, which have none
        if outcome.least_step_seconds is not None and record.tuner != self.store.tuner:
            fixable |= outcome.seconds < TRIAL_SHARE * self.budget.left_seconds
        if fixable or proposer.hardware.outgrew(outcome.kind, outcome.capacity_bytes):
            if outcome.kind is not OutcomeKind.OOM_HOST and record.role not in (VERIFY, RESUME):
                proposer.observe(candidate, outcome, outdated=True)
            return
        if outcome.kind is OutcomeKind.INTERRUPTED and outcome.source in (Source.LIMIT, Source.SILENCE):
            proposer.allow_longer(candidate, outcome)
        if outcome.source is Source.TRACE:
            shares_cause = self.certifier.shares_cause(candidate, outcome)
            proposer.exclude_sharing_cause(candidate, shares_cause, outcome.reason)
        outcome = outcome.without_details()  # it is kept until the end of the search
        if record.role in (VERIFY, RESUME):
            self._learn_verification(record, outcome)
        else:
            proposer.observe(candidate, outcome)

    def _learn_verification(self, record: Record, outcome: Outcome) -> None:
        """Teach the proposer a verification or resume trial, which uses memory that no search trial uses."""
        candidate, board = record.candidate, self.leaderboard
        if record.role == VERIFY and outcome.measurement is not None and not board.why_not(candidate):
            mean = dataclasses.replace(outcome, measurement=board.mean_of(record))
            self.proposer.observe(candidate, mean, verified=True)
        share, searched = share_that_fits(outcome, self.proposer.hardware), board.searched.get(candidate)
        if share is not None:
            measured = searched[1] if searched is not None else None
            self.proposer.apply_verification_failure(candidate, outcome, measured, share)

    def _drop_losers(self) -> None:
        """Compare gains with the best candidate that is likely to win."""
        board = self.leaderboard
        for candidate in board.measured:
            if board.is_deprioritized(candidate) or not board.may_win(candidate):
                self.proposer.drop_from_best(candidate)

    # -- failure attribution -----------------------------------------------------------------------------------------

    @property
    def _own_outcomes(self) -> list[tuple[Candidate, Outcome]]:
        """Candidates and outcomes of this tuner's trials in this call."""
        own = [record for record in self.leaderboard.trials_now if record.tuner == self.store.tuner]
        return [(record.candidate, record.outcome) for record in own if record.outcome is not None]

    @property
    def machine_failures(self) -> int:
        """Number of trials in a row, up to the last one, in which the infrastructure failed."""
        kinds = [outcome.kind for _, outcome in reversed(self._own_outcomes)]
        return len(list(itertools.takewhile(lambda kind: kind is OutcomeKind.INFRASTRUCTURE, kinds)))

    def _attribute_failure(self, candidate: Candidate, outcome: Outcome) -> None:
        """Close a candidate whose retry failed, or end the call if the machine or the job fails.

        Raises:
            MachineError: the machine failed repeatedly before the first measurement.
            UserError: the model or the script fails with any candidate.
        """
        machines = (OutcomeKind.INFRASTRUCTURE, OutcomeKind.GPU_CONTENTION)
        own = self._own_outcomes
        if outcome.kind in machines and sum(one == candidate and end.kind in machines for one, end in own) > 1:
            self.proposer.close_candidate(candidate)
        if self.leaderboard.measured:
            return
        if self.machine_failures >= MACHINE_FAILURES:
            raise MachineError(
                f"the machine failed {self.machine_failures} times in a row, before anything was measured: "
                f"{outcome.reason} (logs: {outcome.log}); `autotune doctor` looks at the machine"
            )
        if outcome.kind is not OutcomeKind.CRASH or outcome.source is not Source.EXCEPTION:
            return
        crashed = {one for one, end in own if (end.kind, end.reason) == (outcome.kind, outcome.reason)}
        if len({one.family for one in crashed}) >= 2 and not self._model_is_the_cause(crashed):
            where = f"{outcome.log}/rank{outcome.rank or 0}.log"
            raise UserError(
                f"the job fails by itself, whatever the config: {outcome.reason} (phase {outcome.phase.value}; "
                f"traceback in {where})"
            )

    def _model_is_the_cause(self, crashed: set[Candidate]) -> bool:
        """Return True if all crashed candidates share the model settings and the space has other ones."""
        ways = {tuple(one.get(knob) for knob in MODEL_KNOBS) for one in crashed}
        knobs = self.proposer.space.knobs
        return len(ways) == 1 and any(len(knobs[knob].values) > 1 for knob in MODEL_KNOBS if knob in knobs)


# -- verifier ----------------------------------------------------------------------------------------------------------


class Verifier:
    """Verifies candidates in fresh processes until none that is unverified looks better."""

    def __init__(self, trials: TrialRecorder, executor: Executor, verify_spec: MeasureSpec) -> None:
        self.trials, self.executor, self.verify_spec = trials, executor, verify_spec
        self.store, self.proposer, self.budget = trials.store, trials.proposer, trials.budget
        self.observer, self.cancelled = trials.observer, trials.cancelled

    @property
    def leaderboard(self) -> Leaderboard:
        """Leaderboard of the trials so far."""
        return self.trials.leaderboard

    def run(self) -> tuple[Record | None, bool]:
        """Verify candidates and return the winner, and whether it is verified.

        The best candidate is verified in a fresh process, until no unverified candidate is faster, or as fast with less
        memory. The winner of an earlier call is verified again before it is compared. A verification replaces the
        search's measurement: a slower candidate falls back in the order, and the next one is verified. The winner must
        also resume from a checkpoint.
        """
        tried, repeated = 0, False
        while True:
            self.trials.poll_peers()
            candidate = self._to_verify() if tried < MAX_VERIFIED else None
            if candidate is None:
                if not repeated and (rival := self._rival()) is not None:
                    repeated = True
                    self._verification(rival, VERIFY)
                    continue
                chosen = self.leaderboard.chosen
                if chosen is None or self._goes_on(chosen):
                    break
                continue
            tried += 1
            outcome = self._verification(candidate, VERIFY)
            if outcome.is_retried_now and self.budget.left_seconds > self.budget.verification_seconds:
                outcome = self._verification(candidate, VERIFY)
            why = self.leaderboard.why_not(candidate)
            if why in ("", NOT_VERIFIED) and not outcome.ok:  # an earlier call may have verified it
                why = f"{outcome.kind.value}: {outcome.reason}"
            if why:
                self.observer.print_line(f"verification of {candidate} failed: {why}")
                if not outcome.kind.is_attributable_to_candidate:
                    break
        leaderboard = self.leaderboard
        if leaderboard.chosen is not None:
            return self.store.record(leaderboard.verified[leaderboard.chosen][0]), True
        if leaderboard.best is None:
            return None, False
        return self.store.record(leaderboard.measured[leaderboard.best][0]), False

    def _to_verify(self) -> Candidate | None:
        """Return the next candidate to verify; None if the verified ones are good enough or no time is left."""
        if self.cancelled() or self.budget.left_seconds < 1.0 or self.trials.machine_failures >= MACHINE_FAILURES:
            return None
        if self.leaderboard.chosen is not None and not self.budget.time_for_another:
            return None
        return self.leaderboard.contender()

    def _rival(self) -> Candidate | None:
        """Return the verified candidate to measure again, which shows the machine's drift; None if no time is left."""
        if self.cancelled() or not self.budget.time_for_another:
            return None
        return self.leaderboard.next_to_repeat()

    def _goes_on(self, candidate: Candidate) -> bool:
        """Return False if the candidate runs out of memory when it resumes from a checkpoint.

        True also covers untested candidates: no time, no disk space, or a failing save. Only an OOM rejects a
        candidate, because it would end a resumed training.
        """
        known = self.leaderboard.resumed.get(candidate)
        if not self.executor.resumes or (known is not None and known.ok):
            return True
        if not self.budget.tries_resuming:
            LOG.info(
                "resuming from a checkpoint was not tested: writing and reading one may take %.0f min of the budget",
                self.budget.checkpoint_seconds / 60,
            )
            return True
        if self.cancelled() or self.budget.left_seconds < self.budget.resume_seconds:
            LOG.info("resuming from a checkpoint was not tested: the budget is used")
            return True
        outcome = self._verification(candidate, RESUME)
        if why := self.leaderboard.why_not(candidate):
            self.observer.print_line(f"{candidate}: {why}")
            return False
        if not outcome.ok:
            self.observer.print_line(f"it is not known if it resumes from a checkpoint: {outcome.reason}")
        return True

    def _verification(self, candidate: Candidate, role: str) -> Outcome:
        """Run one VERIFY or RESUME trial in a fresh process. A peer tuner may verify the same candidate on its machine."""
        note = "verification in a fresh process" if role == VERIFY else "resumes from a checkpoint"
        number = self.trials.begin(candidate, role, note)
        session = self.executor.session(candidate, f"{number:04d}-{role}", self.proposer.patience(candidate))
        step_seconds = self.leaderboard.measured[candidate][1].step_seconds
        limit = self.budget.verification_limit(self.proposer.trial_seconds(candidate), step_seconds)
        left = max(1.0, self.budget.left_seconds)
        measure_spec = RESUME_SPEC
        if role == VERIFY:
            measure_spec = dataclasses.replace(self.verify_spec, share_seconds=VERIFYING_SHARE * left)
        try:
            outcome = session.measure(candidate, measure_spec, min(left, limit))
        except Unusable as error:  # a script may end early after it has loaded its previous training state
            outcome = Outcome(
                OutcomeKind.INTERRUPTED, reason=str(error), evidence="the script", source=Source.EXCEPTION
            )
        finally:
            session.close()
        return self.trials.end(number, candidate, outcome, role, limit, left)


# -- references --------------------------------------------------------------------------------------------------------


_SPLITTING = (MICRO_BATCH, ACCUMULATION, CHECKPOINTING)  # knobs that say how a batch is cut


class References:
    """Trials of plain DDP, and of FSDP2 on several ranks, with the winner's model, data, global batch and optimizer.

    They show what DeepSpeed gains. They are stored apart from the candidates, never win, and teach the search nothing.
    """

    def __init__(self, trials: TrialRecorder, executor: Executor) -> None:
        self.trials, self.executor, self.budget, self.proposer = trials, executor, trials.budget, trials.proposer
        self._print_line, self._job = trials.observer.print_line, trials.proposer.job
        is_possible = executor.runs_torch_alone and self.budget.budget_seconds >= LEAST_REFERENCE_BUDGET
        stages = (0, 3) if is_possible else ()
        self._why_not = {stage: why_no_reference(Candidate.of({"zero_stage": stage}), self._job) for stage in stages}
        self.budget.following += sum(not why for why in self._why_not.values())

    def run(self, winner: Candidate) -> None:
        """Measure each reference of a winner that this call verified, as long as they take a tenth of the budget."""
        self.budget.following, began = 0, self.budget.used_seconds  # the search no longer keeps their time free
        for stage, why in self._why_not.items():
            if self.trials.cancelled() or not self.trials.leaderboard.verified_now(winner):
                break
            name, spent = reference_name(stage, self._job), self.budget.used_seconds - began
            left = min(REFERENCE_SHARE * self.budget.budget_seconds - spent, self.budget.left_seconds)
            needed = self.budget.following_seconds
            if not why and needed > left:
                free = format_duration(max(0.0, left))
                why = f"it may take {format_duration(needed)}, and {free} of the budget are left for it"
            chosen = why or self._chosen(stage, winner)
            if isinstance(chosen, str):
                LOG.info(_not_measured(name, chosen))
                continue
            try:
                self._measure(chosen, name, left)
            except (UserError, MachineError) as error:  # the winner is verified, and exported without the comparison
                self._print_line(_not_measured(name, one_line(error)))
                break

    def _chosen(self, stage: int, winner: Candidate) -> Candidate | str:
        """Return the fastest split of the winner's batch that is predicted to fit, else why there is none."""
        lossy = lossy_of(winner.as_dict, self._job.precision)  # have no counterpart
        alike = (*MODEL_KNOBS, EXPANDABLE, *lossy)
        kept = {knob: value for knob, value in winner.knobs if knob in alike} | {"zero_stage": stage}
        splits = [one for one in [winner, *self.proposer.candidates] if one.rows_per_rank == winner.rows_per_rank]
        options = [
            Candidate.of(kept | {knob: value for knob, value in one.knobs if knob in _SPLITTING})
            for one in dict.fromkeys(splits)
        ]
        able = [one for one in options if not why_no_reference(one, self._job)]
        if not able:  # LoRA may be a knob
            return why_no_reference(options[0], self._job)
        predictor = self.proposer.predictor.for_torch_alone()
        table = predictor.table(able)
        if ranked := predictor.ranked(table):
            return able[ranked[0]]
        least, ceiling = format_bytes(int(table.needed.min())), format_bytes(predictor.hardware.ceiling_bytes)
        return f"it is predicted to need {least} of {ceiling}"

    def _measure(self, candidate: Candidate, name: str, left_seconds: float) -> None:
        job = dataclasses.replace(self.proposer.job, torch_alone=True)
        self._print_line(f"measuring {name} without DeepSpeed, for comparison: {candidate}")
        measure_spec = dataclasses.replace(REFERENCE_SPEC, share_seconds=left_seconds)
        with closing(self.executor.session(candidate, f"reference-{candidate.stage}", job=job)) as session:
            outcome = session.measure(candidate, measure_spec, left_seconds)
        self.trials.save_call()
        if outcome.kind.is_attributable_to_candidate and outcome.source is not Source.BUDGET:
            self.trials.store.note_reference(candidate, outcome)
        elif outcome.source is Source.BUDGET:
            LOG.info(_not_measured(name, f"{format_duration(left_seconds)} were not enough for it"))
        else:
            LOG.info(_not_measured(name, outcome.reason))


def _not_measured(name: str, why: str) -> str:
    return f"{name} was not measured for comparison: {why}"


# -- retries -----------------------------------------------------------------------------------------------------------


def downgrade_first_failure(
    candidate: Candidate, outcome: Outcome, limit: float | None, proposer: Proposer, workers: SearchWorkers
) -> Outcome:
    """Return the outcome, marked as interrupted if the trial is retried in this call.

    A time limit may have been too short, and host OOM may come from trials that ran in parallel. The retry has twice
    the time, or runs alone, and its outcome counts.

    Args:
        limit: the trial's limit in seconds; None if the budget or the user ended it.
    """
    if outcome.kind is OutcomeKind.INTERRUPTED and outcome.source is Source.BUDGET and limit:
        why = f"took over {format_duration(limit)}, far more than what similar trials took"
        outcome = dataclasses.replace(
            outcome, kind=OutcomeKind.TIMEOUT, reason=why, evidence="deadline of the trial", source=Source.LIMIT
        )
    if outcome.kind is OutcomeKind.OOM_HOST and workers.set_apart(candidate):
        again = f"{outcome.reason}, while others ran beside it; it is tried again alone"
        outcome = dataclasses.replace(outcome, kind=OutcomeKind.INTERRUPTED, reason=again, capacity_bytes=None)
    ours = outcome.source in (Source.LIMIT, Source.SILENCE)  # more time does not help against other causes
    if outcome.kind is OutcomeKind.TIMEOUT and ours and proposer.patience(candidate) == 1.0:
        again = f"{outcome.reason}; it is tried again with twice the time"
        outcome = dataclasses.replace(outcome, kind=OutcomeKind.INTERRUPTED, reason=again)
    return outcome


# -- candidates outside the space --------------------------------------------------------------------------------------


def mark_out_of_space(store: StudyStore, is_inside: Callable[[Candidate], bool]) -> str:
    """Store the trials of measured candidates outside this call's space.

    Returns:
        A line for the user; empty if there are none.
    """
    records = store.records()
    measured = {record.candidate for record in records if record.outcome and record.outcome.measurement}
    outside = measured - {*filter(is_inside, measured)}
    store.note_set_aside([record.number for record in records if record.candidate in outside])
    if not outside:
        return ""
    they, are = counted(len(outside), "measured candidate"), "is" if len(outside) == 1 else "are"
    return f"{they} {are} not in this call's space: what they taught counts, and they cannot win"


# -- observer ----------------------------------------------------------------------------------------------------------


class Observer(Protocol):
    """Receives events of a search. NullObserver ignores them."""

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        """Receive the start of a trial."""

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        """Receive the outcome of a trial."""

    def print_line(self, text: str) -> None:
        """Receive a message for the user."""


class NullObserver:
    """Observer that ignores all events."""

    def trial_started(self, *event: Any, **named: Any) -> None:
        """Do nothing."""

    trial_finished = print_line = trial_started
