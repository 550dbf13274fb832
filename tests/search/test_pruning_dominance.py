"""Which candidates need no less memory than another: every rule by a pair, and what any such relation must obey."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.predict.trace_data import Pass, Trace
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import OutcomeKind
from autotune.search.pruning import Dominance, DominanceRules
from tests.conftest import make_candidate

RATIO = "zero_optimization.offload_optimizer.ratio"
STAGE_2 = make_candidate(2, 4, 2, overlap_comm=False, contiguous_gradients=True)
STAGE_3 = make_candidate(3, 4, 2, overlap_comm=False)


def dominates(one: Candidate, other: Candidate) -> bool:
    """Whether `one` is known to need at least as much memory as `other`."""
    return bool(Dominance([other, one]).at_least_as_large(0)[1])


@pytest.mark.parametrize(
    ("than", "changes", "needs_no_less"),
    [
        (STAGE_2, {}, True),
        # sizes: more is more, less says nothing
        (STAGE_2, {"train_micro_batch_size_per_gpu": 8}, True),
        (STAGE_2, {"train_micro_batch_size_per_gpu": 3}, False),
        (STAGE_2, {"reduce_bucket_size": 600_000}, True),
        (STAGE_2, {"reduce_bucket_size": 400_000}, False),
        (STAGE_2, {"allgather_bucket_size": 600_000}, True),
        (STAGE_2, {"allgather_bucket_size": 400_000}, False),
        (STAGE_3, {"sub_group_size": 2_000_000}, True),
        (STAGE_3, {"sub_group_size": 500_000}, False),
        # stages are not compared: each has buffers of its own
        (STAGE_2, {"zero_stage": 1}, False),
        (make_candidate(1, 4, 2, overlap_comm=False, contiguous_gradients=True), {"zero_stage": 2}, False),
        (make_candidate(0), {"zero_stage": 1}, False),
        (make_candidate(1), {"zero_stage": 0}, False),
        (make_candidate(2), {"zero_stage": 0}, False),
        (make_candidate(0), {"zero_stage": 2}, False),
        (STAGE_3, {"zero_stage": 2}, False),
        # accumulating may need a gradient buffer of its own; how often makes no difference
        (STAGE_2, {"gradient_accumulation_steps": 8}, True),
        (make_candidate(2, 4, 8), {"gradient_accumulation_steps": 2}, True),
        (STAGE_2, {"gradient_accumulation_steps": 1}, False),
        (make_candidate(2, 4, 1), {"gradient_accumulation_steps": 1}, True),
        (make_candidate(2, 4, 1), {"gradient_accumulation_steps": 2}, True),
        # what spares memory: the same way, or not at all
        (make_candidate(2, activation_checkpointing=True), {"activation_checkpointing": False}, True),
        (make_candidate(2, activation_checkpointing=False), {"activation_checkpointing": True}, False),
        (make_candidate(2, activation_checkpointing=True), {"activation_checkpointing": True}, True),
        (make_candidate(2, expandable_segments=True), {"expandable_segments": False}, True),
        (make_candidate(2, expandable_segments=False), {"expandable_segments": True}, False),
        (make_candidate(3, offload_optimizer="cpu"), {"offload_optimizer": "none"}, True),
        (make_candidate(3, offload_optimizer="cpu"), {"offload_optimizer": "nvme"}, False),
        (make_candidate(3, offload_optimizer="nvme"), {"offload_optimizer": "cpu"}, False),
        (make_candidate(3, offload_optimizer="none"), {"offload_optimizer": "cpu"}, False),
        (make_candidate(3, offload_param="nvme"), {"offload_param": "none"}, True),
        (make_candidate(3, offload_param="none"), {"offload_param": "nvme"}, False),
        (make_candidate(2, activation_checkpointing=0.5), {"activation_checkpointing": False}, True),
        (make_candidate(2, activation_checkpointing=0.5), {"activation_checkpointing": True}, False),
        # overlap doubles buckets; left open it is compared with nothing but overlap
        (STAGE_2, {"overlap_comm": True}, True),
        (STAGE_3, {"overlap_comm": True}, False),
        # stage 1 keeps gradients above its bucket in place
        (make_candidate(1), {"reduce_bucket_size": 600_000}, False),
        # a split optimizer: less of it on the host is more on the device, by whole sub-groups
        (make_candidate(3, offload_optimizer="cpu", **{RATIO: 0.8}), {RATIO: 0.3}, True),
        (make_candidate(3, offload_optimizer="cpu", **{RATIO: 0.3}), {RATIO: 0.8}, False),
        (make_candidate(3, offload_optimizer="cpu", **{RATIO: 0.8}), {RATIO: 0.3, "sub_group_size": 2_000_000}, False),
        (make_candidate(3, offload_optimizer="cpu", **{RATIO: 1.0}), {RATIO: 0.3, "sub_group_size": 2_000_000}, True),
        (make_candidate(3, offload_optimizer="cpu", **{RATIO: 0.3}), {"offload_optimizer": "none"}, True),
        (make_candidate(2, overlap_comm=True), {"overlap_comm": False}, False),
        (make_candidate(2), {"overlap_comm": True}, True),
        (make_candidate(3), {"overlap_comm": True}, False),
        (make_candidate(2), {"overlap_comm": False}, False),
        (STAGE_2, {"contiguous_gradients": False}, False),  # not known to move memory one way
        (make_candidate(2, attention="sdpa"), {"attention": "eager"}, False),
    ],
)
def test_the_rules(than: Candidate, changes: dict, needs_no_less: bool) -> None:
    assert dominates(than.but(**changes), than) is needs_no_less


def test_a_size_that_one_leaves_open_is_compared_with_none() -> None:
    silent = Candidate.of({"zero_stage": 2})
    sized = Candidate.of({"zero_stage": 2, "reduce_bucket_size": 0})
    assert dominates(silent, silent)
    assert not dominates(sized, silent), "DeepSpeed's own is 5e8"
    assert not dominates(silent, sized)
    assert not dominates(silent, Candidate.of({"zero_stage": 2, "overlap_comm": False})), "DeepSpeed decides"


def test_on_cpu_ranks_offloading_spares_nothing() -> None:
    out, kept = make_candidate(3, offload_optimizer="cpu"), make_candidate(3)
    on_gpus = DominanceRules.for_device("cuda", 2, trace_of(10**6))
    assert Dominance([out, kept], on_gpus).at_least_as_large(0).tolist() == [True, True]
    assert Dominance([out, kept], DominanceRules.for_device("cpu")).at_least_as_large(0).tolist() == [True, False]


def trace_of(largest: int) -> Trace:
    nothing = Pass([], [], [], [], (0, 0), (0, 0), (0, 0), ((0, 0), (0, 0)), (0, 0))
    return Trace([largest] * 10, 0, nothing, None, largest=largest)


@pytest.mark.parametrize(("ranks", "spares"), [(1, True), (8, True), (64, False)])
def test_an_offloaded_optimizer_spares_where_its_share_is_more_than_one_gradient(ranks: int, spares: bool) -> None:
    assert ("offload_optimizer" in DominanceRules.for_device("cuda", ranks, trace_of(10**6)).spared_by) is spares
    assert "offload_param" in DominanceRules.for_device("cuda", ranks, trace_of(10**6)).spared_by


def test_each_of_many_is_compared_by_its_place() -> None:
    bigger, other = STAGE_2.but(train_micro_batch_size_per_gpu=8), STAGE_3
    assert Dominance([other, bigger, STAGE_2]).at_least_as_large(2).tolist() == [False, True, True]


candidates = st.builds(
    Candidate.of,
    st.fixed_dictionaries(
        {
            "zero_stage": st.integers(0, 3),
            "train_micro_batch_size_per_gpu": st.sampled_from([1, 2]),
            "gradient_accumulation_steps": st.sampled_from([1, 2, 4]),
            "activation_checkpointing": st.booleans(),
            "offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
            "overlap_comm": st.booleans(),
            "reduce_bucket_size": st.sampled_from([10, 20]),
            "contiguous_gradients": st.booleans(),
        }
    ),
)


@given(st.lists(candidates, min_size=1, max_size=12, unique=True))
def test_it_is_a_preorder(all_of_them: list[Candidate]) -> None:
    dominance = Dominance(all_of_them)
    rows = [dominance.at_least_as_large(at) for at in range(len(all_of_them))]
    for i, row in enumerate(rows):
        assert row[i], "each needs no less than itself"
        for j in np.flatnonzero(row):
            assert not (rows[j] & ~row).any(), "what needs no less than the greater does of the lesser"


def test_on_cpu_ranks_many_small_micro_batches_of_stage_2_may_need_more() -> None:
    for stage, larger_is_ruled_out in ((1, True), (2, False)):
        many, few, as_many = (make_candidate(stage, size, steps) for size, steps in ((1, 16), (4, 4), (4, 16)))
        found = Dominance([many, few, as_many], DominanceRules.for_device("cpu")).at_least_as_large(0)
        assert found.tolist() == [True, larger_is_ruled_out, True]
        on_gpus = Dominance([many, few, as_many]).at_least_as_large(0)
        assert on_gpus.all()


OFFLOADS = make_candidate(3, 4, 2, offload_optimizer="cpu")
BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}


@pytest.mark.parametrize(
    ("than", "changes", "gib", "needs_no_less"),
    [
        (OFFLOADS, {}, (8, 8), True),
        # by the bill: of the same offloading no fewer bytes, however small the micro-batch
        (OFFLOADS, {"train_micro_batch_size_per_gpu": 1}, (8, 8), True),
        (OFFLOADS, {"train_micro_batch_size_per_gpu": 8}, (8, 9), True),
        (OFFLOADS, {"train_micro_batch_size_per_gpu": 8}, (8, 7), False),
        # all that it offloads, to where it does; more may be offloaded besides
        (OFFLOADS, {"offload_param": "cpu"}, (8, 9), True),
        (OFFLOADS, {"offload_optimizer": "nvme"}, (8, 9), False),
        (OFFLOADS, {"offload_optimizer": "none", "offload_param": "cpu"}, (8, 9), False),
        (OFFLOADS.but(**BOTH), {"offload_param": "none"}, (8, 9), False),
        (OFFLOADS.but(**BOTH), {"offload_param": "nvme"}, (8, 9), False),
        # other stages keep other things there
        (OFFLOADS, {"zero_stage": 2}, (8, 9), False),
        # the host says nothing of what offloads nothing
        (OFFLOADS.but(offload_optimizer="none"), {"train_micro_batch_size_per_gpu": 8}, (0, 0), False),
        (OFFLOADS.but(offload_optimizer="none"), BOTH, (0, 9), False),
        (OFFLOADS, {"offload_optimizer": "none"}, (8, 0), False),
        (OFFLOADS, {"offload_param": "cpu"}, (0.5, 1), True),
    ],
)
def test_which_need_no_less_of_the_host(
    than: Candidate, changes: dict[str, str], gib: tuple[float, float], needs_no_less: bool
) -> None:
    dominance = Dominance([than, than.but(**changes)], host=np.array(gib))
    found = dominance.at_least_as_large(0, OutcomeKind.OOM_HOST)
    assert found.dtype == bool
    assert found.tolist() == [gib[0] > 0, needs_no_less]


def test_what_is_left_open_of_offloading_is_none() -> None:
    bare = Candidate.of({"zero_stage": 3, "train_micro_batch_size_per_gpu": 1, "offload_optimizer": "cpu"})
    said = OFFLOADS.but(offload_param="cpu")
    dominance = Dominance([bare, said], host=np.array([8.0, 9.0]))
    assert dominance.at_least_as_large(0, OutcomeKind.OOM_HOST).all()
    assert dominance.at_least_as_large(1, OutcomeKind.OOM_HOST).tolist() == [False, True]
