import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import MachineError, UserError
from autotune.executors.base import SEARCH as SEARCH_SPEC
from autotune.executors.base import MeasureSpec, too_slow_outcome
from autotune.executors.local import no_space_outcome
from autotune.predict.predictor import Predictor, Prepared, Table
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate, samples
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.space import Domain
from autotune.rank.step_statistics import OVERRUN
from autotune.script.profile import own_candidate
from autotune.search.budget import too_short
from autotune.search.leaderboard import SPEED_FOR_MEMORY, Leaderboard, SpeedRatio
from autotune.search.proposer import TRIAL_SHARE, Proposer
from autotune.search.stopping import StopReason
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH, VERIFY, Record
from autotune.search.tuner import MACHINE_FAILURES, MAX_VERIFIED, SearchSummary, Tuner
from autotune.util.units import GIB, MIB
from benchmarks.search.replay import ReplayExecutor, ReplaySession, ReplayTable, Row, load_replay_table
from tests.conftest import make_candidate, make_job

REAL_TABLES = Path(__file__).parents[2] / "benchmarks" / "data" / "landscapes_real"
TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def search(
    replay_table: ReplayTable,
    budget: float,
    seed: int = 0,
    store: StudyStore | None = None,
    executor: ReplayExecutor | None = None,
    levers: Sequence[str] = (),
    **options: object,
) -> tuple[SearchSummary, ReplayExecutor, StudyStore]:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    space = dataclasses.replace(space, levers=dict.fromkeys(levers, Domain((True,))))
    store = store or StudyStore.in_memory(job, hardware, space)
    store.tuner = f"tuner {len(store.calls())}"  # of one call
    executor = executor or ReplayExecutor(replay_table, seed)
    candidates = sorted(replay_table.rows, key=str)
    proposer = Proposer(candidates, space, Predictor(job, hardware, trace_job(job)))
    tuner = Tuner(store, executor, proposer, budget_seconds=budget, **options)  # type: ignore[arg-type]
    return tuner.run(), executor, store


class Board:
    """Trials of several calls, and the leaderboard of those so far."""

    def __init__(self, hardware: Hardware, job: Job | None = None) -> None:
        self._hardware, self._job = hardware, job
        self._records: list[Record] = []
        self._call = self._began = 0

    def begin_call(self) -> None:
        self._call, self._began = self._call + 1, len(self._records)

    def learn(self, candidate: Candidate, outcome: Outcome, role: str) -> None:
        call = str(self._call)
        self._records.append(Record(len(self._records), candidate, outcome, role, tuner=call, started=call))

    def __getattr__(self, name: str) -> Any:
        return getattr(Leaderboard(self._records, self._hardware, self._job, began=self._began), name)


@pytest.mark.main_path
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_it_finds_the_best_soon_and_verifies_it(whole_table: ReplayTable, seed: int) -> None:
    replay_table = whole_table
    result, executor, store = search(replay_table, 1800, seed)
    assert result.verified
    assert result.winner.role == VERIFY
    assert replay_table.best_step_seconds / replay_table.seconds_per_sample(result.winner.candidate) > 0.95
    first = next(
        seconds
        for seconds, candidate, kind in executor.log.trials
        if kind is OutcomeKind.OK and replay_table.best_step_seconds / replay_table.seconds_per_sample(candidate) > 0.95
    )
    assert first < 240
    failed = sum(kind is not OutcomeKind.OK for _, _, kind in executor.log.trials)
    assert failed <= 0.25 * len(executor.log.trials), "measurements alone expect some that do not fit"
    searched = [r.candidate for r in store.records() if r.role == SEARCH]
    assert len(searched) == len(set(searched))
    assert result.confidence.endswith(" trials)")
    assert store.calls()[-1].confidence == result.confidence


@pytest.mark.slow
@pytest.mark.main_path
@pytest.mark.parametrize("name", ["encoder-script_2xcpu", "images-script_1xcpu", "llama-wide_2xcpu"])
def test_recorded_landscapes_need_few_trials_and_few_ooms(name: str) -> None:
    """Bounds of the gate; the sequences of these searches are in tests/golden."""
    table = load_replay_table(REAL_TABLES / f"{name}.csv.gz")
    _, executor, _ = search(table, 1800)
    trials = [(candidate, kind) for _, candidate, kind in executor.log.trials]
    near = [
        kind is OutcomeKind.OK and table.best_step_seconds / table.seconds_per_sample(candidate) > 0.95
        for candidate, kind in trials
    ]
    assert near.index(True) < 6
    assert sum(kind.is_oom for _, kind in trials) <= 0.4 * len(trials)


@pytest.mark.parametrize("budget", [20, 45, 90, 300])
def test_the_budget_is_never_overrun(replay_table: ReplayTable, budget: float) -> None:
    result, executor, _ = search(replay_table, budget)
    assert executor.now() <= budget
    assert result.used_seconds <= budget


def test_a_second_call_goes_on_and_repeats_nothing(replay_table: ReplayTable) -> None:
    result, _executor, store = search(replay_table, 60)
    before = [
        record.candidate for record in store.records() if record.role == SEARCH and record.outcome and record.outcome.ok
    ]
    again, _, _ = search(replay_table, 600, store=store, executor=ReplayExecutor(replay_table, 9))
    later = [record.candidate for record in store.records() if record.role == SEARCH][len(before) :]
    assert not set(before) & set(later)
    assert again.winner is not None
    assert len(store.calls()) == 2
    assert result.used_seconds <= 60


def test_max_trials_and_cancelling_end_it(replay_table: ReplayTable) -> None:
    result, _executor, _ = search(replay_table, 1800, max_trials=3)
    assert result.stop_sentence == "--max-trials 3 reached"
    assert result.winner is not None
    calls = iter(range(100))
    result, _, _ = search(replay_table, 1800, cancelled=lambda: next(calls) > 4)
    assert result.interrupted
    assert result.stop_sentence == "interrupted"


class Scripted(ReplayExecutor):
    """A replay in which some trials end otherwise."""

    def __init__(self, replay_table: ReplayTable, script: Callable[[int, Candidate], Outcome | None]) -> None:
        super().__init__(replay_table)
        self.script, self.count = script, 0

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        executor = self

        class Session(ReplaySession):
            def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
                executor.count += 1
                if (outcome := executor.script(executor.count, candidate)) is not None:
                    executor.advance(5.0)
                    self.alive = False
                    return outcome
                return super().measure(candidate, measure_spec, deadline_seconds)

        return Session(self, candidate)


def test_each_lever_is_turned_once_at_the_best_and_a_failing_one_is_left_out(replay_table: ReplayTable) -> None:
    fast = Outcome(OutcomeKind.OK, Phase.STEP, Measurement(1.0, 0.001, 9, 1e6, 1e6, GIB))

    def script(_: int, candidate: Candidate) -> Outcome | None:
        outcomes = {(True, None): fast, (True, True): Outcome(OutcomeKind.CRASH, reason="no such kernel")}
        return outcomes.get((candidate.get("compile"), candidate.get("liger_kernel")))

    executor = Scripted(replay_table, script)
    *_, store = search(replay_table, 600, executor=executor, levers=("compile", "liger_kernel"))
    base, gains = store.facts().levers
    winner = base.but(compile=True)
    assert [*gains] == ["compile"]
    turned = [one.candidate for one in store.records() if one.role == SEARCH]
    assert turned[-2:] == [winner, winner.but(liger_kernel=True)]


class Noting(ReplayExecutor):
    """Notes the measure spec of each search trial, and the best speed before it."""

    def __init__(self, replay_table: ReplayTable) -> None:
        super().__init__(replay_table)
        self.noted: list[tuple[float, float]] = []  # samples per second that a trial must reach, best measured before
        self._best = 0.0

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        session = super().session(candidate, name)
        measure = session.measure

        def noted(candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
            outcome = measure(candidate, measure_spec, deadline_seconds)
            if not measure_spec.full:
                self.noted.append((samples(self.job, candidate) / measure_spec.beaten_step_seconds, self._best))
            if outcome.measurement is not None:
                self._best = max(self._best, outcome.measurement.samples_per_second)
            return outcome

        session.measure = noted  # type: ignore[method-assign]
        return session


def test_trials_end_early_below_what_could_win_by_speed_or_thrift(replay_table: ReplayTable) -> None:
    executor = Noting(replay_table)
    search(replay_table, 1800, executor=executor)
    assert executor.noted[0] == (0.0, 0.0), "nothing to be beaten by"
    for least, best in executor.noted[1:]:
        assert least == 0.0 if not best else 0.9 * best < least < (1 - SPEED_FOR_MEMORY) * best


@pytest.mark.slow
def test_short_budget_measures_four_candidates_and_verifies_a_winner() -> None:
    """Two CPU ranks of real DeepSpeed, if imports take 5 of 30 seconds."""
    for name in ("gemma_2xcpu", "llama-wide_2xcpu", "t5_2xcpu"):
        result, executor, _ = search(load_replay_table(REAL_TABLES / f"{name}.csv.gz"), 30, spent_seconds=5.0)
        assert result.verified, name
        measured = {candidate for _, candidate, kind in executor.log.trials if kind is OutcomeKind.OK}
        assert len(measured) >= 4, name
        assert executor.now() <= 25


@pytest.mark.few(1)
@pytest.mark.parametrize(("slower", "large_slower", "too_slow"), [(1, 1, False), (20, 20, False), (4, 200, True)])
def test_steps_many_times_slower_than_predicted_leave_time_for_four_trials_and_a_winner(
    slower: float, large_slower: float, too_slow: bool
) -> None:
    """A loaded machine: the first trials are cut or end as too slow, and the search goes on with smaller ones."""
    table = load_replay_table(REAL_TABLES / "llama-wide_2xcpu.csv.gz")
    rows = {
        one: dataclasses.replace(
            row, step_seconds=row.step_seconds and row.step_seconds * (large_slower if one.micro_batch == 8 else slower)
        )
        for one, row in table.rows.items()
    }
    result, executor, store = search(dataclasses.replace(table, rows=rows), 60)
    assert result.verified
    assert executor.now() <= 60
    ended = [(r.candidate, r.outcome) for r in store.records() if r.role == SEARCH and r.outcome]
    assert len(ended) >= 4
    share = TRIAL_SHARE * 60
    for candidate, outcome in ended:
        start = table.rows[candidate].startup_seconds
        assert outcome.seconds <= max(OVERRUN * share, start + 0.5 * OVERRUN * share)
    slow = [(one, outcome) for one, outcome in ended if outcome.least_step_seconds is not None]
    for candidate, outcome in slow:
        assert outcome.least_step_seconds <= rows[candidate].step_seconds  # type: ignore[operator]
        assert outcome.reason.startswith("too slow for this budget: its first step took over ")
    assert bool(slow) is too_slow


@pytest.mark.parametrize(("budget", "opened"), [(60, False), (3600, True)])
def test_too_slow_for_one_budget_is_not_too_slow_for_a_longer_one(
    replay_table: ReplayTable, budget: float, opened: bool
) -> None:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    store = StudyStore.in_memory(job, hardware, space)
    worked, *_, slow = (one for one, row in replay_table.rows.items() if row.kind is OutcomeKind.OK)
    predictor = Predictor(job, hardware, trace_job(job))
    expected = float(predictor.table([slow]).step[0])
    for one, outcome in (
        (worked, measured_at(replay_table, worked, 0.5)),
        (slow, dataclasses.replace(too_slow_outcome(Phase.FORWARD, slow, 20 * expected), seconds=20.0)),
    ):
        number = store.claim(one, space, SEARCH, "", set())
        assert number is not None
        store.finish(number, outcome)
    proposer = Proposer(list(replay_table.rows), space, predictor)
    executor, store.tuner = ReplayExecutor(replay_table), "of a later call"
    Tuner(store, executor, proposer, budget_seconds=budget, max_trials=0).run()
    assert (slow in proposer.open_candidates) is opened
    assert predictor.table([slow]).step[0] > expected, "its lower bound of the step counts in any call"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_scripts_first_candidate_comes_before_the_verification_of_its_own_config(is_own: bool) -> None:
    """20 s are left, and a verification is expected to take more."""
    table = load_replay_table(REAL_TABLES / "encoder-script_2xcpu.csv.gz")
    job, hardware, space = table.job(), table.hardware(), table.space()
    assert job.script is not None
    own = own_candidate(job.script)
    known = own if is_own else next(one for one in table.rows if one.stage == 1)
    outcome = measured_at(table, next(iter(table.rows)), 0.5)
    assert outcome.measurement is not None
    measured = dataclasses.replace(outcome.measurement, step_seconds=5.0)
    slow = dataclasses.replace(outcome, measurement=measured, outside_seconds=14.0, started=True)
    store = StudyStore.in_memory(job, hardware, space)
    number = store.claim(known, space, SEARCH, "", set())
    assert number is not None
    store.finish(number, slow)
    candidates = list(dict.fromkeys([*table.rows, own]))
    proposer = Proposer(candidates, space, Predictor(job, hardware, trace_job(job)))
    executor = ReplayExecutor(table)
    tuner = Tuner(store, executor, proposer, budget_seconds=60.0, spent_seconds=40.0, max_trials=1)
    tuner.trials.replay_study()
    assert tuner.loop.run().reason is (StopReason.MAX_TRIALS if is_own else StopReason.BUDGET_USED)


def test_a_script_whose_own_config_alone_runs_ends_verified_within_the_budget() -> None:
    table = load_replay_table(REAL_TABLES / "encoder-script_2xcpu.csv.gz")
    job, hardware, space = table.job(), table.hardware(), table.space()
    assert job.script is not None
    own = own_candidate(job.script)
    failing = {
        one: dataclasses.replace(row, kind=OutcomeKind.OOM_DEVICE, step_seconds=None, startup_seconds=8.0)
        for one, row in table.rows.items()
    }
    table = dataclasses.replace(table, rows=failing | {own: Row(0.5, 0.5, 8.0, OutcomeKind.OK)})
    store = StudyStore.in_memory(job, hardware, space)
    number = store.claim(own, space, SEARCH, "", set())
    assert number is not None
    store.finish(number, ReplayExecutor(table).session(own, "").measure(own, SEARCH_SPEC, 60.0))
    proposer = Proposer(list(table.rows), space, Predictor(job, hardware, trace_job(job)), exhaustive=True)
    found = Tuner(store, ReplayExecutor(table), proposer, budget_seconds=60.0, spent_seconds=9.0).run()
    assert (found.winner.candidate, found.verified) == (own, True)
    assert found.by_kind[OutcomeKind.OOM_DEVICE.value] >= 2
    assert found.used_seconds <= 60.0


class QuicklyVerified(ReplayExecutor):
    """Verification takes a second, however long it was expected to take."""

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        executor = self

        class Session(ReplaySession):
            def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
                began = executor.now()
                outcome = super().measure(candidate, measure_spec, deadline_seconds)
                if not measure_spec.full:
                    return outcome
                executor.advance(began + 1.0 - executor.now())
                return dataclasses.replace(outcome, seconds=1.0)

        return Session(self, candidate)


def test_what_verification_leaves_goes_back_to_the_search(replay_table: ReplayTable) -> None:
    result, executor, store = search(replay_table, 90, executor=QuicklyVerified(replay_table))
    roles = [record.role for record in store.records()]
    assert SEARCH in roles[roles.index(VERIFY) :]
    assert result.verified
    assert result.stop_sentence == "budget used"
    assert executor.now() <= 90


def test_trouble_of_the_machine_is_retried_once(replay_table: ReplayTable) -> None:
    seen: list[Candidate] = []

    def script(count: int, candidate: Candidate) -> Outcome | None:
        seen.append(candidate)
        return Outcome(OutcomeKind.INFRASTRUCTURE, reason="address in use") if count <= 2 else None

    result, _, _store = search(replay_table, 1800, executor=Scripted(replay_table, script))
    assert seen[0] == seen[1]
    assert seen[0] not in seen[2:]
    assert result.winner is not None


def test_a_machine_that_always_fails_is_said_at_once(replay_table: ReplayTable) -> None:
    broken = Outcome(OutcomeKind.INFRASTRUCTURE, reason="DistBackendError: NCCL error", source=Source.EXCEPTION)
    executor = Scripted(replay_table, lambda count, c: broken)
    with pytest.raises(MachineError, match=r"3 times in a row.*NCCL error"):
        search(replay_table, 1800, executor=executor)
    assert executor.count == MACHINE_FAILURES


def test_a_machine_that_fails_later_ends_the_search_and_keeps_what_was_measured(replay_table: ReplayTable) -> None:
    broken = Outcome(OutcomeKind.INFRASTRUCTURE, reason="a GPU fell off the bus")
    executor = Scripted(replay_table, lambda count, c: broken if count > 3 else None)
    result, _, store = search(replay_table, 1800, executor=executor)
    assert "the machine failed 3 times in a row" in result.stop_sentence
    assert result.winner is not None
    assert not result.verified
    kept = [r.outcome.kind for r in store.records() if r.outcome]
    assert len([kind for kind in kept if kind in (OutcomeKind.OK, OutcomeKind.OOM_DEVICE)]) == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("startup_seconds", [120.0, 300.0, 900.0])
def test_engines_that_start_slowly_are_no_timeouts_for_ever(replay_table: ReplayTable, startup_seconds: float) -> None:
    slow = {c: dataclasses.replace(row, startup_seconds=startup_seconds) for c, row in replay_table.rows.items()}
    result, _, store = search(
        replay_table, 2 * 3600, executor=ReplayExecutor(dataclasses.replace(replay_table, rows=slow))
    )
    assert result.winner is not None
    assert result.verified
    kinds = Counter(r.outcome.kind for r in store.records() if r.outcome)
    assert kinds[OutcomeKind.TIMEOUT] <= (startup_seconds > 300)
    assert kinds[OutcomeKind.INTERRUPTED] <= 2, "each limit that was too short raises those that follow"


def test_a_hang_is_tried_again_with_twice_the_time_and_then_ruled_out(replay_table: ReplayTable) -> None:
    hung: list[tuple[Candidate, float]] = []

    class Hanging(ReplayExecutor):
        def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
            session = super().session(candidate, name)
            if not hung or hung[0][0].family == candidate.family:
                hung.append((candidate, patience))
                silence = Outcome(OutcomeKind.TIMEOUT, Phase.FORWARD, reason="no sign of life", source=Source.SILENCE)
                session.measure = lambda *_: silence  # type: ignore[method-assign]
            return session

    result, _, store = search(replay_table, 1800, executor=Hanging(replay_table))
    assert [patience for _, patience in hung] == [1.0, 2.0]
    kinds = [r.outcome.kind for r in store.records() if r.outcome and r.candidate == hung[0][0]]
    assert kinds == [OutcomeKind.INTERRUPTED, OutcomeKind.TIMEOUT]
    assert result.winner is not None


class Resuming(ReplayExecutor):
    """A replay in which going on from a checkpoint ends as told, by candidate."""

    resumes = True

    def __init__(self, replay_table: ReplayTable, end: Callable[[Candidate], Outcome | None]) -> None:
        super().__init__(replay_table)
        self.end, self.tried = end, list[Candidate]()

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        session = super().session(candidate, name)
        if name.endswith(RESUME):
            self.tried.append(candidate)
            if (outcome := self.end(candidate)) is not None:
                session.measure = lambda *_: outcome  # type: ignore[method-assign]
        return session


def test_a_winner_must_go_on_from_a_checkpoint(replay_table: ReplayTable) -> None:
    out = Outcome(OutcomeKind.OOM_DEVICE, Phase.LOAD, reason="CUDA out of memory")
    executor = Resuming(replay_table, lambda candidate: out if candidate == executor.tried[0] else None)
    result, _, store = search(replay_table, 1800, executor=executor)
    assert len(executor.tried) >= 2
    assert result.verified
    assert result.winner.candidate in executor.tried[1:]
    assert result.winner.role == VERIFY, "what one step after loading measured is not its speed"
    again = Resuming(replay_table, lambda candidate: None)
    search(replay_table, 1800, store=store, executor=again)
    assert executor.tried[0] not in again.tried, "what died on resume is not tried in a later call"


def test_a_checkpoint_that_takes_the_budget_is_not_tried(
    replay_table: ReplayTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.problem.job.BYTES_PER_SECOND", 1e7)
    executor = Resuming(replay_table, lambda candidate: None)
    result, _, _ = search(replay_table, 1800, executor=executor)
    assert not executor.tried
    assert result.verified
    assert result.winner is not None


def test_a_save_that_fails_by_itself_rejects_nobody(replay_table: ReplayTable) -> None:
    broken = Outcome(OutcomeKind.CRASH, Phase.SAVE, reason="KeyError: 'bias_correction'", source=Source.EXCEPTION)
    executor = Resuming(replay_table, lambda candidate: broken)
    result, _, _ = search(replay_table, 1800, executor=executor)
    assert result.verified
    assert executor.tried == [result.winner.candidate]


def test_disk_without_space_for_a_checkpoint_lengthens_no_time_limit(replay_table: ReplayTable) -> None:
    patiences: list[float] = []

    class Noticing(Resuming):
        def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
            patiences.append(patience)
            return super().session(candidate, name, patience)

    executor = Noticing(replay_table, lambda candidate: no_space_outcome(Path("trials/0001-resume")))
    result, _, store = search(replay_table, 1800, executor=executor)
    assert result.verified
    assert executor.tried == [result.winner.candidate]
    search(replay_table, 1800, store=store, executor=executor)  # verifies the winner again
    assert set(patiences) == {1.0}


def test_a_job_that_fails_by_itself_stops_the_study_with_its_reason(replay_table: ReplayTable) -> None:
    def script(count: int, candidate: Candidate) -> Outcome | None:
        return Outcome(
            OutcomeKind.CRASH,
            Phase.FORWARD,
            reason="ValueError: your bug",
            evidence="exception builtins.ValueError",
            source=Source.EXCEPTION,
            log="runs/x/trials/0",
            seconds=5.0,
        )

    executor = Scripted(replay_table, script)
    with pytest.raises(UserError, match=r"fails by itself.*your bug"):
        search(replay_table, 1800, executor=executor)
    assert executor.count <= 4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "failure",
    [
        Outcome(OutcomeKind.CRASH, Phase.FORWARD, reason="killed from outside (SIGKILL)", source=Source.SIGNAL),
        Outcome(OutcomeKind.TIMEOUT, Phase.INIT, reason="hangs", source=Source.SILENCE),
        Outcome(OutcomeKind.CRASH, Phase.INIT, reason="ImportError: no such package", source=Source.EXCEPTION),
    ],
    ids=lambda failure: failure.reason,
)
def test_what_failed_before_anything_worked_may_work_in_another_call(
    replay_table: ReplayTable, failure: Outcome
) -> None:
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    broken = Scripted(replay_table, lambda count, candidate: failure)
    with suppress(UserError):  # the job fails by itself
        assert search(replay_table, 3600, store=store, executor=broken)[0].winner is None
    failed = [record.candidate for record in store.records()]
    short, executor, _ = search(replay_table, 600, store=store, executor=ReplayExecutor(replay_table, 9), max_trials=1)
    assert short.winner is not None, "it was the machine or the job, and somebody has mended it"
    assert executor.log.trials[0][1] in failed, "the most promising is tried again"
    result, executor, _ = search(replay_table, 3600, store=store, executor=ReplayExecutor(replay_table, 9))
    assert result.verified
    families = {one.family for one in failed}
    assert any(one.family in families for _, one, _ in executor.log.trials), "it stays mended in every later call"


def test_what_fails_again_in_every_call_is_not_what_each_call_begins_with(replay_table: ReplayTable) -> None:
    """As where the job is preempted and begun again, each time before anything has worked."""
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    died = Outcome(OutcomeKind.CRASH, Phase.INIT, reason="died by SIGSEGV", source=Source.SIGNAL)
    for _ in range(8):
        broken = Scripted(replay_table, lambda count, candidate: died)
        search(replay_table, 3600, store=store, executor=broken, max_trials=1)
    tried = Counter(record.candidate for record in store.records())
    assert max(tried.values()) == 2
    assert len(tried) == 4
    result, _, _ = search(replay_table, 3600, store=store, executor=ReplayExecutor(replay_table, 9))
    assert result.verified


def test_a_tuner_that_joins_others_takes_nothing_for_mended(
    replay_table: ReplayTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    died = Outcome(OutcomeKind.CRASH, Phase.INIT, reason="died by SIGSEGV", source=Source.SIGNAL)
    search(
        replay_table, 3600, store=store, executor=Scripted(replay_table, lambda count, candidate: died), max_trials=1
    )
    monkeypatch.setattr(store, "peers", lambda: ["another"])
    _, executor, _ = search(replay_table, 600, store=store, executor=ReplayExecutor(replay_table, 9), max_trials=4)
    failed = store.records()[0].candidate
    assert failed.family not in [candidate.family for _, candidate, _ in executor.log.trials]


def test_what_failed_where_something_worked_fails_for_ever(replay_table: ReplayTable) -> None:
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    killed = Outcome(OutcomeKind.CRASH, Phase.FORWARD, reason="killed from outside (SIGKILL)", source=Source.SIGNAL)
    once = Scripted(replay_table, lambda count, candidate: killed if count == 1 else None)
    search(replay_table, 3600, store=store, executor=once, max_trials=4)
    failed = store.records()[0].candidate
    _, executor, _ = search(replay_table, 600, store=store, executor=ReplayExecutor(replay_table, 9))
    assert failed.family not in [candidate.family for _, candidate, _ in executor.log.trials]


def test_verification_that_fails_gives_the_next(replay_table: ReplayTable) -> None:
    failed: list[Candidate] = []

    class Fussy(Scripted):
        def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
            if name.endswith("-verify") and not failed:
                failed.append(candidate)
                self.script = lambda count, c: Outcome(OutcomeKind.OOM_DEVICE, Phase.SAVE, reason="gathered save")
            else:
                self.script = lambda count, c: None
            return super().session(candidate, name)

    result, _, _ = search(replay_table, 1800, executor=Fussy(replay_table, lambda count, c: None))
    assert failed
    assert result.verified
    assert result.winner.candidate != failed[0]


class Tighter(ReplayExecutor):
    """Verification ends in `fails(candidate)` where more than `cut` of a card was held in the search."""

    def __init__(self, replay_table: ReplayTable, cut: float, fails: Callable[[Candidate], Outcome | None]) -> None:
        super().__init__(replay_table)
        self.most_gib, self.fails, self.failed = cut * self.hardware.memory_bytes / GIB, fails, list[Candidate]()

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        outer = self

        class Session(ReplaySession):
            def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
                tight = measure_spec.full and outer.replay_table.rows[candidate].peak_gib > outer.most_gib
                if not tight or (outcome := outer.fails(candidate)) is None:
                    return super().measure(candidate, measure_spec, deadline_seconds)
                outer.advance(outcome.seconds)
                outer.failed.append(candidate)
                self.alive = outcome.measurement is not None
                return outcome

        return Session(self, candidate)


def measured_at(replay_table: ReplayTable, candidate: Candidate, share: float, retries: int = 0) -> Outcome:
    hardware, row = replay_table.hardware(), replay_table.rows[candidate]
    rate = 1 / replay_table.seconds_per_sample(candidate)
    assert row.step_seconds is not None
    peak = int(share * hardware.memory_bytes)
    one = Measurement(row.step_seconds, 0.01, 4, rate, rate, peak, alloc_retries=retries)
    return Outcome(OutcomeKind.OK, measurement=one, seconds=10.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["runs out", "leaves too little", "retries"])
def test_verification_that_fails_again_and_again_teaches_the_search(replay_table: ReplayTable, how: str) -> None:
    def fails(candidate: Candidate) -> Outcome | None:
        if how == "runs out":
            return Outcome(OutcomeKind.OOM_DEVICE, Phase.STEP, reason="evaluation", seconds=10.0)
        return measured_at(replay_table, candidate, 1.1 if how == "leaves too little" else 0.9, 3 * (how == "retries"))

    executor = Tighter(replay_table, 0.65, fails)
    result, _, _ = search(replay_table, 1800, executor=executor)
    assert result.verified
    assert replay_table.rows[result.winner.candidate].peak_gib <= executor.most_gib
    passing = (
        replay_table.seconds_per_sample(c)
        for c, row in replay_table.rows.items()
        if row.kind is OutcomeKind.OK and row.peak_gib <= executor.most_gib
    )
    assert min(passing) / replay_table.seconds_per_sample(result.winner.candidate) > 0.9
    assert len(executor.failed) <= 30  # 18, and up to 10 more while the bound of the speed left is loose
    assert len(executor.log.trials) <= 90, "candidates as tight as those are not measured again and again"


def test_more_than_one_round_of_verifications_may_fail(replay_table: ReplayTable) -> None:
    """Whatever they fail of, and without another trial of the search."""
    hangs = Outcome(OutcomeKind.CRASH, Phase.SAVE, reason="died", source=Source.SIGNAL, seconds=5.0)
    executor = Tighter(replay_table, 0.0, lambda c: hangs if len(executor.failed) < MAX_VERIFIED + 2 else None)
    result, _, _ = search(replay_table, 1800, executor=executor, max_trials=12)
    assert len(executor.failed) == MAX_VERIFIED + 2
    assert result.verified


def test_what_fails_verification_is_not_what_gains_are_measured_against(replay_table: ReplayTable) -> None:
    job, hardware, candidates = replay_table.job(), replay_table.hardware(), sorted(replay_table.rows, key=str)
    proposer = Proposer(candidates, replay_table.space(), Predictor(job, hardware, trace_job(job)))
    store = StudyStore.in_memory(job, hardware, replay_table.space())
    ran = sorted(
        (c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK and c.stage == 2),
        key=lambda c: replay_table.rows[c].peak_gib,
    )
    least_memory_candidate, tight, tighter = ran[0], ran[-2], ran[-1]
    for candidate, share in ((tight, 0.9), (tighter, 0.95), (least_memory_candidate, 0.4)):
        store.finish(store.start(candidate, None), measured_at(replay_table, candidate, share))
    trials = Tuner(store, ReplayExecutor(replay_table), proposer, budget_seconds=60).trials
    trials.replay_study()
    fits = proposer._forecast.fits
    out = Outcome(OutcomeKind.OOM_DEVICE, Phase.SAVE, missing_bytes=GIB)
    trials.end(store.start(tight, None, RESUME), tight, out, RESUME, 9.0, 9.0)
    able = [candidates[at] for at in proposer._measured if at not in proposer._cannot_win]
    assert able == [least_memory_candidate], "what holds no less in the search is doubted, too"
    assert trials.leaderboard.best == least_memory_candidate
    after = proposer._forecast.fits
    mine = np.array([c.stage == tight.stage for c in candidates])
    assert (after <= fits)[mine].all(), "its stage is believed to have less room"
    assert (after == fits)[~mine].all()
    assert proposer._values(proposer._forecast)[0][candidates.index(tighter)] == -np.inf


def test_nothing_fits_has_no_winner(replay_table: ReplayTable) -> None:
    def script(count: int, candidate: Candidate) -> Outcome | None:
        return Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=10**9)

    result, _, store = search(replay_table, 300, executor=Scripted(replay_table, script))
    assert result.winner is None
    assert not result.verified
    assert store.skips


def test_intervals_overlap() -> None:
    from autotune.problem.outcome import Measurement

    def at(seconds: float, spread: float) -> Measurement:
        return Measurement(seconds, spread, 5, 1 / seconds, 1.0, 1)

    assert SpeedRatio.of(at(1.0, 0.1), at(1.1, 0.1)).is_noise
    assert not SpeedRatio.of(at(1.0, 0.01), at(1.1, 0.01)).is_noise
    assert too_short(2.0) is not None
    assert too_short(60.0) is None
    assert make_candidate() == make_candidate()


def test_rivals_are_measured_in_turn(replay_table: ReplayTable) -> None:
    """The machine slows down by 4 % after the first verification: who came first must not win by it."""
    rows = {c: row for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK and row.step_seconds}
    fastest = min(rows, key=replay_table.seconds_per_sample)
    rival = next(c for c in rows if c.family != fastest.family)
    pace = rows[fastest].step_seconds
    assert pace is not None
    leaderboard = Board(replay_table.hardware())

    def verified(candidate: Candidate, seconds: float) -> None:
        measurement = Measurement(seconds, 0.01 * seconds, 9, 1 / seconds, 512 / seconds, 10**9)
        leaderboard.learn(candidate, Outcome(OutcomeKind.OK, measurement=measurement), VERIFY)

    verified(fastest, pace)
    leaderboard.begin_call()
    verified(rival, 1.0)
    assert leaderboard.next_to_repeat() is None, "what an earlier call verified was not measured in turn"
    verified(fastest, 1.03)
    assert leaderboard.next_to_repeat() == rival, "the first of the two, once more"
    verified(rival, 1.08)
    assert leaderboard.next_to_repeat() is None
    assert leaderboard.verified[rival][1].step_seconds == pytest.approx(1.04)


def test_a_rivals_second_turn_is_run_and_a_machine_that_slows_down_does_not_choose(replay_table: ReplayTable) -> None:
    """Of two rivals that are equally fast in truth the first is verified before the machine slows down by 4 %."""
    fastest = min(
        (c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK), key=replay_table.seconds_per_sample
    )
    other = next(c for c in replay_table.rows if c.family != fastest.family and c.micro_batch == fastest.micro_batch)
    rows = dict.fromkeys((fastest, other), replay_table.rows[fastest])
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    verified: list[Candidate] = []

    class Slowing(ReplayExecutor):
        def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
            session = super().session(candidate, name, patience)
            if name.endswith(VERIFY):
                verified.append(candidate)
                pace = (1.0 if len(verified) == 1 else 1.04) * (rows[candidate].step_seconds or 0.0)
                rate = candidate.micro_batch * candidate.accumulation / pace
                measured = Measurement(pace, 0.001 * pace, 9, rate, rate, GIB)
                session.measure = lambda *_: Outcome(OutcomeKind.OK, measurement=measured)  # type: ignore[method-assign]
            return session

    result, _, _ = search(
        dataclasses.replace(replay_table, rows=rows), 1800, store=store, executor=Slowing(replay_table), max_trials=2
    )
    first, second, *again = verified
    assert {first, second} == set(rows)
    assert again == [first], "first, second, first"
    turns = [r.outcome.measurement for r in store.records() if r.role == VERIFY and r.candidate == first and r.outcome]
    assert len(turns) == 2
    assert result.verified


def of_peak(leaderboard: Board, candidate: Candidate, speed: float, mib: int, role: str = VERIFY) -> None:
    measurement = Measurement(1 / speed, 0.1 / speed, 9, speed, speed, mib * MIB)
    leaderboard.learn(candidate, Outcome(OutcomeKind.OK, measurement=measurement), role)


def test_a_rival_that_is_nearer_than_a_search_is_sure_of_has_its_turn(replay_table: ReplayTable) -> None:
    winner, near, far = (make_candidate(0, size) for size in (1, 2, 4))
    leaderboard = Board(replay_table.hardware())
    of_peak(leaderboard, near, 108.0, 500, SEARCH)
    of_peak(leaderboard, far, 90.0, 500, SEARCH)
    of_peak(leaderboard, winner, 110.0, 500)
    assert leaderboard.contender() == near
    of_peak(leaderboard, near, 100.0, 500)
    of_peak(leaderboard, far, 105.0, 500, SEARCH)
    assert leaderboard.contender() is None, "one such rival is enough, and none is faster than what has passed"


@pytest.mark.parametrize(("speed", "turn"), [(50.0, 1), (109.0, 1), (111.0, 1), (150.0, 2)])
def test_the_fastest_or_an_earlier_one_that_is_close_is_verified_again(
    replay_table: ReplayTable, speed: float, turn: int
) -> None:
    leaderboard = Board(replay_table.hardware())
    of_peak(leaderboard, make_candidate(0, 1), 110.0, 500)
    of_peak(leaderboard, make_candidate(0, 2), speed, 500)
    assert leaderboard.next_to_repeat() == make_candidate(0, turn)


def test_the_least_bytes_of_a_failed_verification_deprioritize_a_stage(replay_table: ReplayTable) -> None:
    leaderboard, sizes = Board(replay_table.hardware()), {1: 300, 2: 500, 4: 600, 8: 550}
    candidates = {size: make_candidate(2, size) for size in sizes}
    for size, mib in sizes.items():
        of_peak(leaderboard, candidates[size], 100.0, mib, SEARCH)
    for size in (2, 4):
        leaderboard.learn(candidates[size], Outcome(OutcomeKind.OOM_DEVICE, Phase.SAVE), VERIFY)
    assert [size for size, one in candidates.items() if leaderboard.is_deprioritized(one)] == [2, 4, 8]


POOL = [make_candidate(0, size) for size in (1, 2, 4, 8, 16)]
CALLS = st.lists(
    st.tuples(st.floats(0.3, 3.0), st.sets(st.integers(0, 4), min_size=1), st.integers(0, 9)), min_size=2, max_size=4
)


def chosen_over_calls(
    speeds: list[float], calls: list[tuple[float, set[int], int]]
) -> tuple[list[Candidate | None], list[set[Candidate]]]:
    """Measure and verify as a tuner does, each call at a pace and with so many verifications at most.

    Returns:
        The choice after each call, and what each call verified.
    """
    leaderboard, chosen, verified = Board(detect("cpu", 1)), list[Candidate | None](), list[set[Candidate]]()
    known: set[int] = set()
    for pace, searched, most in calls:
        leaderboard.begin_call()
        for i in sorted(searched - known):
            of_peak(leaderboard, POOL[i], pace * speeds[i], 500, SEARCH)
        known |= searched
        mine: set[Candidate] = set()
        while len(mine) < most and (candidate := leaderboard.contender()) is not None:
            assert candidate not in mine, "verified twice"
            of_peak(leaderboard, candidate, pace * speeds[POOL.index(candidate)], 500)
            mine.add(candidate)
        chosen.append(leaderboard.chosen)
        verified.append(mine)
    return chosen, verified


@given(st.permutations([1.0, 1.2, 1.44, 1.73, 2.07]), CALLS)
def test_the_pace_of_the_machine_in_a_call_chooses_no_winner(
    speeds: list[float], calls: list[tuple[float, set[int], int]]
) -> None:
    chosen, verified = chosen_over_calls(speeds, calls)
    for before, after, mine in zip(chosen, chosen[1:], verified[1:], strict=False):
        if before is not None and after != before:
            assert {before, after} <= mine, "one replaces another only in a call that has verified both"
    unlimited = [(pace, searched, 9) for pace, searched, _ in calls]
    known: set[int] = set()
    for choice, (_, searched, _) in zip(chosen_over_calls(speeds, unlimited)[0], unlimited, strict=True):
        known |= searched
        assert choice == POOL[max(known, key=speeds.__getitem__)]


def test_a_resumed_study_measures_its_winner_again_before_another_replaces_it(replay_table: ReplayTable) -> None:
    """The machine is twice as fast in the second call, and a slower config looks faster than the winner was."""

    class Faster(ReplayExecutor):
        def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
            session = super().session(candidate, name, patience)
            measure = session.measure

            def doubled(candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
                outcome = measure(
                    candidate, dataclasses.replace(measure_spec, beaten_step_seconds=np.inf), deadline_seconds
                )
                if (found := outcome.measurement) is None:
                    return outcome
                faster = dataclasses.replace(
                    found,
                    step_seconds=found.step_seconds / 2,
                    samples_per_second=2 * found.samples_per_second,
                    tokens_per_second=2 * found.tokens_per_second,
                )
                return dataclasses.replace(outcome, measurement=faster)

            session.measure = doubled  # type: ignore[method-assign]
            return session

    ok = sorted(
        (c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK), key=replay_table.seconds_per_sample
    )
    best, slower = (
        ok[0],
        next(c for c in ok if replay_table.seconds_per_sample(c) > 1.3 * replay_table.seconds_per_sample(ok[0])),
    )
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    only_best, both = (
        dataclasses.replace(replay_table, rows={one: replay_table.rows[one] for one in some})
        for some in ([best], [best, slower])
    )
    first, _, _ = search(only_best, 900, store=store)
    second, _, _ = search(both, 900, store=store, executor=Faster(both))
    assert first.winner is not None
    assert second.winner.candidate == best
    assert [r.candidate for r in store.records() if r.role == VERIFY].count(best) == 4, "twice in each call"


def test_speeds_of_earlier_calls_follow_what_two_calls_verified(replay_table: ReplayTable) -> None:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    fits = sorted((c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK), key=str)[:12]
    proposer = Proposer(fits, space, Predictor(job, hardware, trace_job(job)))

    def learn(at: int, pace: float, role: str) -> None:
        seconds = replay_table.rows[fits[at]].step_seconds
        assert seconds is not None
        step = seconds / pace
        outcome = Outcome(
            OutcomeKind.OK, measurement=Measurement(step, 0.0, 5, samples(job, fits[at]) / step, 1e4, 4 * GIB)
        )
        proposer.observe(fits[at], outcome, verified=role == VERIFY)

    learn(0, 1.0, SEARCH)
    learn(1, 1.0, SEARCH)
    learn(0, 1.0, VERIFY)
    before = proposer._forecast.speed.mean
    proposer.begin_call()
    learn(0, 0.5, VERIFY)
    after = proposer._forecast.speed.mean
    assert proposer._best == pytest.approx(before[0] + np.log(0.5), abs=0.05)
    assert after[1] == pytest.approx(before[1] + np.log(0.5), abs=0.2)
    assert (after < before).all()


def test_thrift_is_worth_something_only_where_something_is_saved(replay_table: ReplayTable) -> None:
    fast, slower = make_candidate(0, 1), make_candidate(0, 2)
    leaderboard = Board(replay_table.hardware())
    of_peak(leaderboard, fast, 105.0, 500)
    of_peak(leaderboard, slower, 103.0, 499)
    assert leaderboard.chosen == fast
    of_peak(leaderboard, slower, 103.0, 400)
    assert leaderboard.chosen == fast, "the highest peak of any turn counts"
    frugal = make_candidate(0, 4)
    of_peak(leaderboard, frugal, 103.0, 400)
    assert leaderboard.chosen == frugal


def test_a_script_as_it_is_does_not_win_with_another_global_batch() -> None:
    own, asked = make_candidate(1, 4, 1), make_candidate(1, 4, 2)
    for total, best in ((16, asked), (8, own), (None, own)):
        leaderboard = Board(detect("cpu", 2), make_job(2, global_batch_size=total))
        for candidate, speed in ((own, 9.0), (asked, 5.0)):
            measured = Measurement(1.0, 0.0, 9, speed, 512.0, 1)
            leaderboard.learn(candidate, Outcome(OutcomeKind.OK, measurement=measured), SEARCH)
        assert leaderboard.best == best


class Inverted(Predictor):
    """Holds what is fast for slow, whatever is measured."""

    def prepared_table(self, prepared: Prepared) -> Table:
        table = super().prepared_table(prepared)
        logs = np.log(table.samples)
        samples = np.exp(2 * np.median(logs) - logs)
        return dataclasses.replace(table, samples=samples, step=table.step * table.samples / samples)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Predictor, Inverted])
def test_a_resumed_study_believes_whom_it_believed_before(replay_table: ReplayTable, kind: type[Predictor]) -> None:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    store = StudyStore.in_memory(job, hardware, space)
    candidates = sorted(replay_table.rows, key=str)

    def call(trials: int) -> Proposer:
        proposer = Proposer(candidates, space, kind(job, hardware, trace_job(job)), exhaustive=True)
        executor = ReplayExecutor(replay_table, 1)
        Tuner(store, executor, proposer, budget_seconds=1800, max_trials=trials).run()
        return proposer

    before = call(12)._forecast
    assert (before.speed.trust < 0.5) == (kind is Inverted)
    after = call(0)._forecast  # learns, and tries nothing
    assert (after.speed.trust < 0.5) == (before.speed.trust < 0.5)
    assert (after.peak.trust < 0.5) == (before.peak.trust < 0.5)
