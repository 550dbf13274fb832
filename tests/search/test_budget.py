"""What is kept for verification, and what goes back to the search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.executors.base import VERIFY as VERIFY_SPEC
from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.search.budget import MOST_RESERVED, Budget
from autotune.search.trials import SEARCH, VERIFY, Record
from tests.conftest import make_candidate, make_job

QUICK, SLOW = make_candidate(0, 4), make_candidate(3, 4)


def measurement(step_seconds: float, extrapolated: bool = False) -> Measurement:
    return Measurement(step_seconds, 0.0, 5, 1.0, 1.0, 1, extrapolated=extrapolated)


def started(seconds: float) -> Outcome:
    return Outcome(OutcomeKind.OK, measurement=measurement(0.1), outside_seconds=seconds, started=True)


def make_budget(
    budget: float,
    best: Candidate | None = QUICK,
    parameters: int = 0,
    frozen: int = 0,
    precision: str = "bf16",
    measure_spec: MeasureSpec = VERIFY_SPEC,
    **measured: Any,
) -> Budget:
    """A budget of which nothing is used, of a model with so many parameters."""
    executor: Any = SimpleNamespace(now=lambda: 0.0, resumes=True)
    own = measured.pop("own", None)
    trace = SimpleNamespace(parameters=[parameters], frozen=frozen)
    job = make_job(precision=precision)
    proposer: Any = SimpleNamespace(predictor=SimpleNamespace(trace=trace, job=job))
    about = {best: (0, measurement(0.1, **measured))} if best else {}
    board: Any = SimpleNamespace(best=best, measured=about, incumbent=None, ended=[], trials_now=[])
    return Budget(executor, proposer, measure_spec, budget, 0.0, lambda: board, own)


def note(budget: Budget, candidate: Candidate, outcome: Outcome, role: str) -> None:
    board = budget._look()
    (board.trials_now if role == VERIFY else board.ended).append(Record(0, candidate, outcome, role))


def test_the_best_s_own_start_is_what_verifying_it_takes() -> None:
    slow, quick = make_budget(600, SLOW), make_budget(600, QUICK)
    for one in (slow, quick):
        note(one, SLOW, started(12.0), SEARCH)
        note(one, QUICK, started(1.0), SEARCH)
    assert slow.verification_seconds - quick.verification_seconds == pytest.approx(1.2 * 11.0)
    assert slow.resume_seconds - quick.resume_seconds == pytest.approx(1.2 * 2 * 11.0)


def test_a_rung_of_a_living_engine_says_nothing_of_a_start() -> None:
    one = make_budget(600)
    note(one, QUICK, started(8.0), SEARCH)
    before = one.verification_seconds
    note(one, make_candidate(0, 8), Outcome(OutcomeKind.OK, measurement=measurement(0.1), outside_seconds=0.2), SEARCH)
    assert one.verification_seconds == before


def test_what_verification_took_is_expected_of_the_next() -> None:
    one = make_budget(600)
    note(one, QUICK, started(5.0), SEARCH)
    before = one.verification_seconds
    note(one, QUICK, Outcome(OutcomeKind.OK, measurement=measurement(0.1), seconds=1.0), VERIFY)
    assert one.verification_seconds == pytest.approx(1.2)
    note(one, QUICK, Outcome(OutcomeKind.OK, measurement=measurement(0.1), seconds=100.0), VERIFY)
    assert one.verification_seconds == before, "a slow one is no reason to keep more"


def test_whole_steps_warm_up_where_shortened_ones_did() -> None:
    assert make_budget(600, extrapolated=True).verification_seconds == pytest.approx(
        make_budget(600).verification_seconds + 1.2 * 3 * 0.1
    )


def test_time_for_going_on_from_a_checkpoint_is_kept_whole_or_not_at_all() -> None:
    long, short = make_budget(600), make_budget(30)
    for one in (long, short):
        note(one, QUICK, started(5.0), SEARCH)
    assert long.reserve_seconds == pytest.approx(long.verification_seconds + long.resume_seconds)
    assert short.verification_seconds + short.resume_seconds > MOST_RESERVED * 30
    assert short.reserve_seconds == pytest.approx(short.verification_seconds)


@pytest.mark.parametrize(("budget", "reserve"), [(600, 9.6), (15, 5.4), (5, 0.0)])
def test_first_candidate_of_a_script_gets_as_much_as_a_verification_takes(budget: float, reserve: float) -> None:
    """A verification of the script's own config is expected to take 9.6 s."""
    one = make_budget(budget, own=QUICK)
    note(one, QUICK, started(5.0), SEARCH)
    assert one.reserve_seconds == pytest.approx(reserve)


def test_another_is_verified_where_what_is_left_is_of_no_other_use() -> None:
    one = make_budget(30)
    note(one, QUICK, started(5.0), SEARCH)
    need = one.verification_seconds
    for left, expected in ((need - 0.1, False), (need + 0.1, True), (need + one.resume_seconds + 0.1, True)):
        one.executor.now = lambda left=left: 30 - left  # type: ignore[method-assign, misc]
        one._began = 0.0
        assert one.time_for_another is (expected and (left < one.resume_seconds or left > need + one.resume_seconds))


def test_verifying_a_large_model_is_left_the_time_of_gathering_it() -> None:
    """70 billion parameters in 16 bits are 140 GB, which one process gathers, copies and writes."""
    large = 70_000_000_000
    tiny = make_budget(600).verification_seconds
    assert make_budget(600, parameters=2_000_000).verification_seconds == pytest.approx(tiny, abs=0.1)
    assert make_budget(3600, parameters=large).verification_seconds == pytest.approx(tiny + 1.2 * 140)
    assert make_budget(3600, parameters=large, precision="fp32").verification_seconds == pytest.approx(tiny + 1.2 * 280)
    assert make_budget(3600, parameters=large // 2, frozen=large // 2).verification_seconds == pytest.approx(
        tiny + 1.2 * 140
    )
    without_checkpoint = make_budget(3600, parameters=large)
    assert not without_checkpoint.tries_resuming
    assert without_checkpoint.reserve_seconds == without_checkpoint.verification_seconds
    quick = MeasureSpec(full=True, min_steps=5, min_seconds=3.0)
    assert make_budget(3600, parameters=large, measure_spec=quick).verification_seconds == tiny, "which saves nothing"


def test_references_keep_a_tenth_of_the_budget_at_most() -> None:
    """Two references of five minutes each, and a budget of ten."""
    one = make_budget(600)
    note(one, QUICK, started(300.0), SEARCH)
    one.following = 2
    assert one.left_seconds == pytest.approx(540.0)
    one.following = 0
    assert one.left_seconds == 600.0
