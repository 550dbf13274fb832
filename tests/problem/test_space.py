"""A search space as an object: its families, its rungs and its candidates for a job."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.problem import space as space_module
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate, is_read
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.space import Domain, SearchSpace, for_job, load_space, parse_space, shipped_spaces
from tests.conftest import make_job


def space_of(**knobs: Domain) -> SearchSpace:
    return SearchSpace("mine", "", knobs, "")


def test_a_condition_is_met_by_all_that_it_names() -> None:
    domain = Domain((1,), (("a", (1, 2)), ("b", (True,))))
    space = space_of(a=Domain((1, 2, 3)), b=Domain((True, False)), c=domain)
    assert [(one["a"], one["b"]) for one in space.families() if "c" in one] == [(1, True), (2, True)]


def test_levers_are_of_scripts_that_have_them_off() -> None:
    space = parse_space("{levers: {compile: true, dataloader_num_workers: 4}, knobs: {zero_stage: [1]}}")
    script = Script(("train.py",), ".", profile=ScriptProfile(levers=("compile",)))
    assert for_job(space, make_job(script=script)).levers == {"compile": Domain((True,))}
    assert not for_job(space, make_job()).levers


# -- families ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_candidate_of_a_shipped_space_is_canonical_and_there_once() -> None:
    for name in shipped_spaces():
        found = load_space(name).candidates(make_job())
        assert len(set(found)) == len(found) > 50
        for one in found[:: max(1, len(found) // 50)]:
            assert all(is_read(knob, one.as_dict) for knob in one.as_dict)
            assert Candidate.of(one.as_dict) == one


def test_a_knob_comes_after_those_that_its_condition_names() -> None:
    space = space_of(
        c=Domain((1,), (("b", (1,)),)),
        b=Domain((1,), (("a", (1,)), ("zero_stage", (1,)))),
        a=Domain((1,), ((MICRO_BATCH, (1,)),)),  # not of the family: no order between them
        **{MICRO_BATCH: Domain((1,)), ACCUMULATION: Domain((1,))},
        offload_param=Domain(("none",)),
        zero_stage=Domain((1,)),
    )
    assert space.order == ("zero_stage", "offload_param", "a", "b", "c")


def test_conditions_in_a_circle_end_in_some_order() -> None:
    space = space_of(a=Domain((1,), (("b", (1,)),)), b=Domain((1,), (("a", (1,)),)), c=Domain((1,)))
    assert space.order == ("c", "a", "b")


def test_families_are_what_needs_an_engine_of_its_own() -> None:
    space = parse_space(
        """
knobs:
  zero_stage: [0, 3]
  train_micro_batch_size_per_gpu: [1, 2]
  sub_group_size: [5, 6]
  activation_checkpointing: {values: [true], when: {sub_group_size: 6}}
"""
    )
    assert list(space.families()) == [
        {"zero_stage": 0},  # stage 0 reads no sub_group_size, so it has no checkpointing either
        {"zero_stage": 3, "sub_group_size": 5},
        {"zero_stage": 3, "sub_group_size": 6, "activation_checkpointing": True},
    ]


def test_a_knob_that_one_stage_reads_makes_no_copies_of_the_others() -> None:
    space = parse_space("knobs: {offload_optimizer: [none, cpu], zero_stage: [0, 1]}")
    families = list(space.families())
    assert families == [
        {"zero_stage": 0},
        {"zero_stage": 1, "offload_optimizer": "none"},
        {"zero_stage": 1, "offload_optimizer": "cpu"},
    ]


def test_values_that_are_equal_make_one_family() -> None:
    space = parse_space("knobs: {gradient_clipping: [1, 1.0]}")  # as YAML two values, as numbers one
    assert list(space.families()) == [{"gradient_clipping": 1}]


# -- rungs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "ranks", "batch", "expected"),
    [
        ({}, 2, None, [(1, 1)]),
        ({MICRO_BATCH: Domain((1, 2)), ACCUMULATION: Domain((3, 1))}, 2, None, [(1, 1), (1, 3), (2, 1), (2, 3)]),
        # with a global batch the accumulation follows, unless the space lists its values
        ({MICRO_BATCH: Domain((1, 2, 3, 4))}, 2, 16, [(1, 8), (2, 4), (4, 2)]),
        ({MICRO_BATCH: Domain((1, 2, 4)), ACCUMULATION: Domain((2, 8))}, 2, 16, [(1, 8), (4, 2)]),
        (
            {MICRO_BATCH: Domain((1, 2, 4)), ACCUMULATION: Domain((2, 8), is_range=True)},
            2,
            16,
            [(1, 8), (2, 4), (4, 2)],
        ),
        # a range may use any whole number in it, up to the share of a rank
        ({MICRO_BATCH: Domain((2, 4, 8), is_range=True)}, 2, 12, [(2, 3), (3, 2), (6, 1)]),
        ({MICRO_BATCH: Domain((2, 4), is_range=True)}, 2, 20, [(2, 5)]),
    ],
)
def test_micro_batch_and_accumulation(knobs: dict, ranks: int, batch: int | None, expected: list) -> None:
    pairs = space_of(**knobs).rungs(make_job(ranks, global_batch_size=batch))
    assert pairs == expected
    assert {type(number) for pair in pairs for number in pair} == {int}


@given(batch=st.integers(1, 500), ranks=st.integers(1, 8))
def test_only_exact_factorisations_meet_a_global_batch(batch: int, ranks: int) -> None:
    space = load_space("default")
    try:
        job = make_job(ranks, global_batch_size=batch)
        pairs = space.rungs(job)
    except UserError:
        assert batch % ranks
        return
    assert pairs
    assert all(micro * accumulation * ranks == batch for micro, accumulation in pairs)
    assert len(set(pairs)) == len(pairs)


def test_a_global_batch_that_nothing_meets() -> None:
    space = space_of(**{MICRO_BATCH: Domain((4, 6, 8))})
    with pytest.raises(UserError) as caught:
        space.candidates(make_job(global_batch_size=22))
    assert str(caught.value) == (
        "a global batch of 22 over 2 ranks cannot be made from the micro-batches of space 'mine' (4 to 8): "
        "change the batch (--global-batch-size) or the space"
    )


# -- candidates ----------------------------------------------------------------------------------------------------------


def test_candidates_are_families_times_rungs() -> None:
    space = parse_space("knobs: {zero_stage: [1, 2], train_micro_batch_size_per_gpu: [2, 1], overlap_comm: [true]}")
    assert space.candidates(make_job()) == [
        Candidate.of({"zero_stage": stage, MICRO_BATCH: micro, ACCUMULATION: 1, "overlap_comm": True})
        for stage, micro in itertools.product((1, 2), (1, 2))
    ]


def test_a_space_of_nothing() -> None:
    with pytest.raises(UserError) as caught:
        space_of(zero_stage=Domain(())).candidates(make_job())
    assert str(caught.value) == "space 'mine' has no valid candidate: `autotune spaces validate` shows its knobs"


def test_more_candidates_than_can_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "MAX_CANDIDATES", 4)
    space = space_of(zero_stage=Domain((0, 1)), **{MICRO_BATCH: Domain((1, 2))})
    assert len(space.candidates(make_job())) == 4
    with pytest.raises(UserError) as caught:
        space_of(zero_stage=Domain((0, 1, 2)), **{MICRO_BATCH: Domain((1, 2))}).candidates(make_job())
    assert str(caught.value) == "space 'mine' has over 4 candidates: give its ranges fewer values"
