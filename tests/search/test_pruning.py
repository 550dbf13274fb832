"""What a trial's end rules out."""

import numpy as np
import pytest

from autotune.executors.base import too_slow_outcome
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome, OutcomeKind, Phase, Source
from autotune.search.pruning import CandidatePool
from tests.conftest import make_candidate

CANDIDATES = [
    make_candidate(stage, micro, accumulation) for stage in (1, 2) for micro in (2, 8) for accumulation in (1, 4)
]
ENDED = Outcome(OutcomeKind.INVALID, reason="ended after 2 optimizer steps", source=Source.STEPS)


def left(pool: CandidatePool) -> list[Candidate]:
    return [one for one, is_open in zip(pool.candidates, pool.open_mask, strict=True) if is_open]


@pytest.mark.parametrize("worked", [False, True])
def test_a_batch_with_too_few_steps_rules_out_no_smaller_one(worked: bool) -> None:
    pool = CandidatePool(CANDIDATES)
    large, larger = make_candidate(1, 8, 1), make_candidate(2, 8, 4)
    if worked:  # so it was not the batch's size
        pool.observe(larger, Outcome(OutcomeKind.OK))
    pool.observe(large, ENDED)
    gone = {large, larger} if worked else {one for one in CANDIDATES if one.micro_batch * one.accumulation >= 8}
    assert set(left(pool)) == set(CANDIDATES) - gone


@pytest.mark.parametrize(
    ("slow", "kept"),
    [
        ((2, 4), {(2, 1), (8, 1)}),  # fewer micro-batches gather weights less often
        ((2, 1), set()),
        ((8, 1), {(2, 1), (2, 4)}),
    ],
)
@pytest.mark.parametrize("memory", [False, True])
def test_a_step_too_slow_or_too_large_rules_out_no_less_work_and_no_other_engine(
    slow: tuple[int, int], kept: set[tuple[int, int]], memory: bool
) -> None:
    pool = CandidatePool(CANDIDATES)
    candidate = make_candidate(1, *slow)
    too_slow = too_slow_outcome(Phase.FORWARD, candidate, 30.0)
    pool.observe(candidate, Outcome(OutcomeKind.OOM_DEVICE) if memory else too_slow)
    assert {(one.micro_batch, one.accumulation) for one in left(pool) if one.stage == 1} == kept
    assert sum(one.stage == 2 for one in left(pool)) == 4


def test_trials_too_slow_for_several_earlier_budgets_close_nothing() -> None:
    pool, slow = CandidatePool(CANDIDATES), CANDIDATES[0]
    for _ in range(3):
        pool.note_fixable(slow, too_slow_outcome(Phase.FORWARD, slow, 30.0))
    assert slow in left(pool)
    for _ in range(2):
        pool.note_fixable(slow, Outcome(OutcomeKind.TIMEOUT))
    assert slow not in left(pool)


def offloading(stage: int, micro: int, optimizer: str = "cpu", param: str = "none", **knobs: object) -> Candidate:
    return make_candidate(stage, micro, offload_optimizer=optimizer, offload_param=param, **knobs)


def test_a_host_that_ran_out_rules_out_what_offloads_no_less_to_it() -> None:
    ran_out = offloading(3, 8)
    hungrier = [offloading(3, 1), offloading(3, 8, param="cpu"), offloading(3, 2, overlap_comm=True)]
    others = [offloading(2, 1), offloading(3, 1, "nvme"), make_candidate(3, 8), offloading(3, 2, overlap_comm=False)]
    host = np.array([8.0, 8.0, 9.0, 8.0, 8.0, 1.0, 0.0, 7.0])
    for worked in (False, True):
        pool = CandidatePool([ran_out, *hungrier, *others], host)
        if worked:  # so it was not what is offloaded
            pool.observe(hungrier[0], Outcome(OutcomeKind.OK))
        pool.observe(ran_out, Outcome(OutcomeKind.OOM_HOST))
        assert set(left(pool)) == {*others, *(hungrier[1:] if worked else [])}


@pytest.mark.parametrize("kind", [OutcomeKind.TIMEOUT, OutcomeKind.CRASH, OutcomeKind.OOM_HOST])
@pytest.mark.parametrize("bad", [{"zero_stage": 3}, {"offload_optimizer": "nvme"}])
def test_what_failures_have_in_common_is_ruled_out_after_a_few_engines(
    kind: OutcomeKind, bad: dict[str, object]
) -> None:
    candidates = [
        offloading(stage, micro, where, overlap_comm=overlap)
        for stage in (1, 2, 3)
        for micro in (1, 4)
        for where in ("none", "cpu", "nvme")
        for overlap in (True, False)
    ]

    def fails(one: Candidate) -> bool:
        return all(one.get(name) == value for name, value in bad.items())

    pool, failed = CandidatePool(candidates, np.zeros(len(candidates))), set()
    for one in sorted(candidates, key=lambda c: not fails(c)):
        if pool.open_mask[pool.index[one]]:
            pool.observe(one, Outcome(kind if fails(one) else OutcomeKind.OK, source=Source.SIGNAL))
            failed |= {one.family} if fails(one) else set()
    assert len(failed) <= 4, "of the engines"
    assert all(pool._worked.count(one) == (not fails(one)) for one in candidates), "nothing that works is ruled out"


def test_where_everything_fails_a_few_engines_show_it_and_one_shows_nothing() -> None:
    candidates = [offloading(stage, 1, where) for stage in (0, 1, 2, 3) for where in ("none", "cpu", "nvme")]
    pool, failed = CandidatePool(candidates), 0
    while there := left(pool):
        pool.observe(there[0], Outcome(OutcomeKind.TIMEOUT, source=Source.SILENCE))
        failed += 1
        assert failed > 3 or pool.open_mask.any()
    assert failed <= 8


@pytest.mark.parametrize("worked", [False, True])
def test_candidates_that_train_otherwise_for_one_reason_are_excluded_together(worked: bool) -> None:
    pool = CandidatePool(CANDIDATES)
    otherwise = make_candidate(2, 8, 1)
    if worked:  # so it was not the stage
        pool.observe(make_candidate(2, 2, 1), Outcome(OutcomeKind.OK))
    pool.observe(otherwise, Outcome(OutcomeKind.INVALID, reason="update is 0.26x of yours", source=Source.TRACE))
    pool.exclude_sharing_cause(otherwise, lambda other: other.stage == 2, "update is 0.26x of yours")
    gone = {otherwise, make_candidate(2, 2, 1)} if worked else {one for one in CANDIDATES if one.stage == 2}
    assert set(left(pool)) == set(CANDIDATES) - gone
    assert worked or pool.skipped == {"update is 0.26x of yours": 3}
