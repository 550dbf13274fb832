import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate, describe, is_read, short_name
from tests.conftest import make_job

knobs = st.fixed_dictionaries(
    {
        "zero_stage": st.integers(0, 3),
        MICRO_BATCH: st.sampled_from([1, 2, 4]),
        ACCUMULATION: st.sampled_from([1, 2]),
        "activation_checkpointing": st.booleans(),
        "offload_optimizer": st.sampled_from(["none", "cpu"]),
        "offload_param": st.sampled_from(["none", "cpu"]),
        "reduce_bucket_size": st.sampled_from([10, 20]),
        "sub_group_size": st.sampled_from([10, 20]),
        "contiguous_gradients": st.booleans(),
        "overlap_comm": st.booleans(),
        "zero_optimization.stage3_max_live_parameters": st.sampled_from([5, 6]),
        "zero_optimization.offload_optimizer.ratio": st.sampled_from([0.5, 1.0]),
    }
)


@given(knobs)
def test_canonical_is_stable_and_a_candidate_is_what_deepspeed_reads(values: dict) -> None:
    candidate = Candidate.of(values)
    assert Candidate.of(candidate.as_dict) == candidate
    assert all(is_read(name, candidate.as_dict) for name in candidate.as_dict)
    assert hash(candidate) == hash(Candidate.of(dict(reversed(values.items()))))


@given(knobs, knobs)
def test_equal_candidates_give_equal_configs_and_no_others(one: dict, other: dict) -> None:
    job = make_job()
    a, b = Candidate.of(one), Candidate.of(other)
    same_config = a.ds_config(job) == b.ds_config(job) and a.checkpointing == b.checkpointing
    assert (a == b) == same_config


def test_what_deepspeed_ignores_or_forces_is_dropped() -> None:
    base = {MICRO_BATCH: 1, ACCUMULATION: 1}
    assert Candidate.of({**base, "zero_stage": 0, "overlap_comm": True, "sub_group_size": 5}).as_dict == {
        **base,
        "zero_stage": 0,
    }
    offloaded = Candidate.of({**base, "zero_stage": 2, "offload_optimizer": "cpu", "contiguous_gradients": False})
    assert "contiguous_gradients" not in offloaded.as_dict
    assert "offload_param" not in Candidate.of({**base, "zero_stage": 2, "offload_param": "cpu"}).as_dict
    assert "allgather_bucket_size" not in Candidate.of({**base, "zero_stage": 3, "allgather_bucket_size": 5}).as_dict


def test_short_and_dotted_names_are_one_knob() -> None:
    assert short_name("zero_optimization.stage") == "zero_stage"
    assert Candidate.of({"zero_optimization.stage": 2}) == Candidate.of({"zero_stage": 2})


def test_the_config_keeps_what_the_user_brought() -> None:
    base = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "round_robin_gradients": True},
    }
    job = make_job(precision="bf16", base_config=base)
    config = Candidate.of({"zero_stage": 2, MICRO_BATCH: 3, ACCUMULATION: 2}).ds_config(job)
    assert config["optimizer"] == base["optimizer"]
    assert config["gradient_clipping"] == 1.0
    assert config["train_batch_size"] == 12
    assert config["bf16"] == {"enabled": True}
    assert config["fp16"] == {"enabled": False}
    assert config["zero_optimization"] == {"stage": 2, "round_robin_gradients": True}  # stage 2 refuses offload_param
    assert base["zero_optimization"]["stage"] == 3, "the user's own config is not touched"


def test_offload_is_pinned_unless_the_user_said_otherwise() -> None:
    config = Candidate.of({"zero_stage": 3, "offload_optimizer": "cpu"}).ds_config(make_job())
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    job = make_job(base_config={"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}})
    config = Candidate.of({"zero_stage": 3, "offload_optimizer": "cpu"}).ds_config(job)
    assert config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    config = Candidate.of({"zero_stage": 3, "offload_optimizer": "none"}).ds_config(job)
    assert "offload_optimizer" not in config["zero_optimization"]


def test_one_line() -> None:
    text = describe(
        {
            "zero_stage": 3,
            MICRO_BATCH: 8,
            ACCUMULATION: 4,
            "activation_checkpointing": True,
            "offload_optimizer": "cpu",
            "overlap_comm": False,
            "reduce_bucket_size": 500_000_000,
        }
    )
    assert text == "z3 mb8 ga4 ckpt opt=cpu no-overlap rbs=5e+08"


@pytest.mark.parametrize(("change", "same_family"), [({MICRO_BATCH: 4}, True), ({"zero_stage": 1}, False)])
def test_families(change: dict, same_family: bool) -> None:
    one = Candidate.of({"zero_stage": 0, MICRO_BATCH: 1, ACCUMULATION: 1})
    assert (one.but(**change).family == one.family) is same_family
