from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors.base import Effort
from autotune.executors.replay import Landscape, ReplayExecutor, ReplaySession, load_landscape
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Phase, Source
from autotune.search.proposer import Proposer
from autotune.search.study import SEARCH, VERIFY, StudyStore
from autotune.search.tuner import SearchSummary, Tuner, overlap, too_short
from tests.conftest import make_candidate

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


@pytest.fixture(scope="module")
def landscape() -> Landscape:
    return load_landscape(TABLE)


def search(
    landscape: Landscape,
    budget: float,
    seed: int = 0,
    store: StudyStore | None = None,
    executor: ReplayExecutor | None = None,
    **options: object,
) -> tuple[SearchSummary, ReplayExecutor, StudyStore]:
    job, hardware, space = landscape.job(), landscape.hardware(), landscape.space()
    store = store or StudyStore.in_memory(job, hardware, space)
    executor = executor or ReplayExecutor(landscape, seed)
    candidates = sorted(landscape.rows, key=str)
    proposer = Proposer(candidates, space, job, hardware, store, seed, Predictor(job, hardware, trace_job(job)))
    tuner = Tuner(store, executor, proposer, space, hardware, budget_seconds=budget, **options)  # type: ignore[arg-type]
    return tuner.run(), executor, store


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_best_soon_and_verifies_it(landscape: Landscape, seed: int) -> None:
    result, executor, store = search(landscape, 1800, seed)
    assert result.verified
    assert result.winner is not None
    assert result.winner.role == VERIFY
    assert landscape.best_step_seconds / landscape.seconds_per_sample(result.winner.candidate) > 0.95
    first = next(
        seconds
        for seconds, candidate, kind in executor.ledger.trials
        if kind is Kind.OK and landscape.best_step_seconds / landscape.seconds_per_sample(candidate) > 0.95
    )
    assert first < 240
    assert sum(kind is not Kind.OK for _, _, kind in executor.ledger.trials) <= 3
    searched = [r.candidate for r in store.records() if r.role == SEARCH]
    assert len(searched) == len(set(searched))


@pytest.mark.parametrize("budget", [20, 45, 90, 300])
def test_the_budget_is_never_overrun(landscape: Landscape, budget: float) -> None:
    result, executor, _ = search(landscape, budget)
    assert executor.now() <= budget
    assert result.used_seconds <= budget


def test_a_second_call_goes_on_and_repeats_nothing(landscape: Landscape) -> None:
    result, _executor, store = search(landscape, 60)
    before = [
        record.candidate for record in store.records() if record.role == SEARCH and record.outcome and record.outcome.ok
    ]
    again, _, _ = search(landscape, 600, store=store, executor=ReplayExecutor(landscape, 9))
    later = [record.candidate for record in store.records() if record.role == SEARCH][len(before) :]
    assert not set(before) & set(later)
    assert again.winner is not None
    assert len(store.calls()) == 2
    assert result.used_seconds <= 60


def test_max_trials_and_cancelling_end_it(landscape: Landscape) -> None:
    result, _executor, _ = search(landscape, 1800, max_trials=3)
    assert result.ended == "--max-trials 3 reached"
    assert result.winner is not None
    calls = iter(range(100))
    result, _, _ = search(landscape, 1800, cancelled=lambda: next(calls) > 4)
    assert result.interrupted
    assert result.ended == "interrupted"


class Scripted(ReplayExecutor):
    """A replay in which some trials end otherwise."""

    def __init__(self, landscape: Landscape, script: Callable[[int, Candidate], Outcome | None]) -> None:
        super().__init__(landscape)
        self.script, self.count = script, 0

    def session(self, candidate: Candidate, name: str) -> ReplaySession:
        executor = self

        class Session(ReplaySession):
            def measure(self, candidate: Candidate, effort: Effort, deadline_seconds: float) -> Outcome:
                executor.count += 1
                if (outcome := executor.script(executor.count, candidate)) is not None:
                    executor.advance(5.0)
                    self._ended = True
                    return outcome
                return super().measure(candidate, effort, deadline_seconds)

        return Session(self, candidate)


def test_trouble_of_the_machine_is_retried_once(landscape: Landscape) -> None:
    seen: list[Candidate] = []

    def script(count: int, candidate: Candidate) -> Outcome | None:
        seen.append(candidate)
        return Outcome(Kind.INFRASTRUCTURE, reason="address in use") if count <= 2 else None

    result, _, _store = search(landscape, 1800, executor=Scripted(landscape, script))
    assert seen[0] == seen[1]
    assert seen[0] not in seen[2:]
    assert result.winner is not None


def test_a_job_that_fails_by_itself_stops_the_study_with_its_reason(landscape: Landscape) -> None:
    def script(count: int, candidate: Candidate) -> Outcome | None:
        return Outcome(
            Kind.CRASH,
            Phase.FORWARD,
            reason="ValueError: your bug",
            evidence="exception builtins.ValueError",
            source=Source.EXCEPTION,
            log="runs/x/trials/0",
            seconds=5.0,
        )

    executor = Scripted(landscape, script)
    with pytest.raises(UserError, match=r"fails by itself.*your bug"):
        search(landscape, 1800, executor=executor)
    assert executor.count <= 4


def test_verification_that_fails_gives_the_next(landscape: Landscape) -> None:
    failed: list[Candidate] = []

    class Fussy(Scripted):
        def session(self, candidate: Candidate, name: str) -> ReplaySession:
            if name.endswith("-verify") and not failed:
                failed.append(candidate)
                self.script = lambda count, c: Outcome(Kind.OOM_DEVICE, Phase.SAVE, reason="gathered save")
            else:
                self.script = lambda count, c: None
            return super().session(candidate, name)

    result, _, _ = search(landscape, 1800, executor=Fussy(landscape, lambda count, c: None))
    assert failed
    assert result.verified
    assert result.winner is not None
    assert result.winner.candidate != failed[0]


def test_nothing_fits_has_no_winner(landscape: Landscape) -> None:
    script: Callable[[int, Candidate], Outcome | None] = lambda count, c: Outcome(Kind.OOM_DEVICE, missing_bytes=10**9)  # noqa: E731
    result, _, store = search(landscape, 300, executor=Scripted(landscape, script))
    assert result.winner is None
    assert not result.verified
    assert store.skips


def test_intervals_overlap() -> None:
    from autotune.problem.outcome import Measurement

    def at(seconds: float, spread: float) -> Measurement:
        return Measurement(seconds, spread, 5, 1 / seconds, 1.0, 1)

    assert overlap(at(1.0, 0.1), at(1.1, 0.1))
    assert not overlap(at(1.0, 0.01), at(1.1, 0.01))
    assert too_short(2.0) is not None
    assert too_short(60.0) is None
    assert make_candidate() == make_candidate()
