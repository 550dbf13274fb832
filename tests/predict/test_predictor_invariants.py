"""What any prediction must hold to, whatever the candidate: a plan that breaks one of these is nonsense."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.predict.predictor import Prediction, Predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.util.units import MIB
from tests.conftest import make_job
from tests.predict.recorded import MODELS, SEQ_LEN, recorded_trace

SIZES = [10**3, 10**5, 5 * 10**8]
KNOBS = st.fixed_dictionaries(
    {
        "zero_stage": st.integers(0, 3),
        "train_micro_batch_size_per_gpu": st.sampled_from([1, 4, 64, 1024]),
        "gradient_accumulation_steps": st.sampled_from([1, 3]),
        "activation_checkpointing": st.booleans(),
        "reduce_bucket_size": st.sampled_from(SIZES),
        "sub_group_size": st.sampled_from(SIZES),
        "contiguous_gradients": st.booleans(),
        "overlap_comm": st.booleans(),
        "offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
        "offload_param": st.sampled_from(["none", "cpu"]),
    }
)
CARDS = st.sampled_from(["t4", "rtx3060", "v100-32gb", "a100-80gb", "b200"])
predicted = settings(max_examples=40, deadline=None)


def predict(knobs: dict[str, object], card: str, ranks: int, model: tuple[str, str], optimizer: str) -> Prediction:
    name, precision = model
    job = make_job(ranks, model=name, precision=precision, seq_len=SEQ_LEN, optimizer=optimizer)
    return Predictor(job, named_hardware(card, ranks), recorded_trace(job)).predict(Candidate.of(knobs))


jobs = (st.sampled_from(MODELS), st.sampled_from(["adamw", "lion", "sgd", "adagrad"]))


@predicted
@given(KNOBS, CARDS, st.sampled_from([1, 2, 8]), *jobs)
def test_figures_are_finite_and_lie_in_their_intervals(
    knobs: dict[str, object], card: str, ranks: int, model: tuple[str, str], optimizer: str
) -> None:
    one = predict(knobs, card, ranks, model, optimizer)
    for value, (low, high) in (
        (one.peak_bytes, one.peak_interval),
        (one.allocated_bytes, one.allocated_interval),
        (one.step_seconds, one.step_interval),
    ):
        assert math.isfinite(value)
        assert 0 <= low <= value <= high < math.inf
    assert one.allocated_bytes < one.needed_bytes <= one.peak_bytes
    assert min(one.memory.values()) >= 0
    assert min(one.time.values()) >= 0
    assert one.host_bytes >= 0


@predicted
@given(KNOBS, CARDS, st.sampled_from([2, 8, 64]), *jobs)
def test_more_gpus_never_take_more_of_each(
    knobs: dict[str, object], card: str, ranks: int, model: tuple[str, str], optimizer: str
) -> None:
    few, many = (predict(knobs, card, count, model, optimizer) for count in (ranks, 2 * ranks))
    assert many.allocated_bytes <= few.allocated_bytes * (1 + 1e-9)


@predicted
@given(KNOBS, CARDS, *jobs)
def test_more_sequences_never_take_less_and_checkpoints_never_hold_more(
    knobs: dict[str, object], card: str, model: tuple[str, str], optimizer: str
) -> None:
    size = knobs["train_micro_batch_size_per_gpu"]
    one, more, less = (
        predict({**knobs, **changes}, card, 2, model, optimizer)
        for changes in ({}, {"train_micro_batch_size_per_gpu": 2 * size}, {"activation_checkpointing": True})
    )
    assert more.allocated_bytes >= one.allocated_bytes
    assert (
        more.needed_bytes >= one.needed_bytes - 2 * MIB
    )  # a segment of the allocator, filled better by larger tensors
    assert more.step_seconds > one.step_seconds
    assert less.allocated_bytes <= one.allocated_bytes * (1 + 1e-9)


@predicted
@given(KNOBS, CARDS, *jobs)
def test_what_is_offloaded_leaves_the_device(
    knobs: dict[str, object], card: str, model: tuple[str, str], optimizer: str
) -> None:
    """The states do; where a micro-batch is large, buckets that offloading needs in backward may outweigh them."""
    stays, leaves = (
        predict({**knobs, "zero_stage": 3, "offload_optimizer": place}, card, 2, model, optimizer)
        for place in ("none", "cpu")
    )
    assert leaves.memory["optimizer states"] <= stays.memory["optimizer states"] * (1 + 1e-9)
    assert leaves.host_bytes > stays.host_bytes
