import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.problem.candidate import (
    ACCUMULATION,
    GATHER_ON_SAVE,
    MICRO_BATCH,
    Candidate,
    is_read,
    job_with_candidate,
    knobs_of,
    samples,
)
from autotune.problem.job import Lora
from tests.conftest import make_candidate, make_job

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


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, None),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"enabled": False, "loss_scale": 0}),
        ({"fp16": "auto"}, {"enabled": False}),  # no section: written as one
    ],
)
def test_the_other_precision_is_off(base: dict, expected: dict | None) -> None:
    config = Candidate.of({"zero_stage": 0}).ds_config(make_job(precision="bf16", base_config=base))
    assert config["bf16"] == {"enabled": True}
    assert config.get("fp16") == expected


def test_the_precisions_own_settings_are_kept() -> None:
    job = make_job(precision="fp16", base_config={"fp16": {"loss_scale": 128}, "bf16": {"enabled": True}})
    config = Candidate.of({"zero_stage": 0}).ds_config(job)
    assert config["fp16"] == {"loss_scale": 128, "enabled": True}
    assert config["bf16"] == {"enabled": False}


@pytest.mark.parametrize(
    ("zero", "knobs", "left"),
    [
        # refused by the stage
        ({"offload_param": {"device": "cpu"}}, {"zero_stage": 2}, {"stage": 2}),
        ({"offload_optimizer": {"device": "cpu"}}, {"zero_stage": 0}, {"stage": 0}),
        # turned off by the candidate, the other one stays
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            {"zero_stage": 3, "offload_optimizer": "none"},
            {"stage": 3, "offload_param": {"device": "cpu"}, GATHER_ON_SAVE: True},
        ),
        # not tuned: as the user wrote it
        (
            {"offload_optimizer": {"device": "cpu"}},
            {"zero_stage": 2},
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        ),
        # no section: DeepSpeed's to judge
        ({"offload_param": None}, {"zero_stage": 2}, {"stage": 2, "offload_param": None}),
        ("auto", {"zero_stage": 1}, {"stage": 1}),
    ],
)
def test_offload_sections_of_the_users_own(zero: object, knobs: dict, left: dict) -> None:
    assert Candidate.of(knobs).ds_config(make_job(base_config={"zero_optimization": zero}))["zero_optimization"] == left


def test_a_candidate_without_zero_leaves_the_section_alone() -> None:
    config = Candidate.of({MICRO_BATCH: 2}).ds_config(make_job(base_config={"zero_optimization": "auto"}))
    assert config["zero_optimization"] == "auto"


@pytest.mark.parametrize(
    ("name", "knobs", "expected"),
    [
        ("overlap_comm", {}, False),  # no stage is stage 0
        ("contiguous_gradients", {"zero_stage": 2, "offload_optimizer": "cpu"}, False),  # DeepSpeed forces it on
        ("contiguous_gradients", {"zero_stage": 2, "offload_optimizer": "none"}, True),
        ("contiguous_gradients", {"zero_stage": 3, "offload_optimizer": "cpu"}, True),
        ("zero_optimization.offload_optimizer.ratio", {"zero_stage": 3, "offload_optimizer": "cpu"}, True),
        ("zero_optimization.offload_optimizer.ratio", {"zero_stage": 2, "offload_optimizer": "cpu"}, False),
        ("zero_optimization.offload_optimizer.pin_memory", {"zero_stage": 2, "offload_optimizer": "cpu"}, True),
        ("zero_optimization.offload_optimizer.pin_memory", {"zero_stage": 2}, False),
        ("zero_optimization.offload_param.buffer_count", {"zero_stage": 3, "offload_param": "nvme"}, True),
        ("zero_optimization.offload_param.buffer_count", {"zero_stage": 2, "offload_param": "nvme"}, False),
        ("zero_optimization.offload_param.buffer_count", {"zero_stage": 3, "offload_param": "none"}, False),
        ("zero_optimization.zeropp_loco_param.err_beta", {"zero_stage": 3, "offload_param": "none"}, True),
        ("zero_optimization.offload_param", {"zero_stage": 3, "offload_param": "none"}, True),  # the section itself
    ],
)
def test_what_offloading_changes(name: str, knobs: dict, expected: bool) -> None:
    assert is_read(name, knobs) is expected


@pytest.mark.parametrize(
    ("own", "knobs", "expected"),
    [
        ({}, {}, (None, False, None, False)),
        ({}, {"attention": "sdpa", "compile": True, "lora": "r=8", "packing": True}, ("sdpa", True, Lora(8), True)),
        ({"lora": Lora(4), "packed": True}, {"lora": "none", "packing": False}, (None, False, None, False)),
    ],
)
def test_the_job_under_a_candidate(own: dict, knobs: dict, expected: tuple) -> None:
    job = job_with_candidate(make_job(lengths=((16, 1), (32, 1)), **own), Candidate.of({"zero_stage": 1, **knobs}))
    assert (job.attention, job.compiled, job.lora, job.packed) == expected


def test_samples_of_a_step() -> None:
    job = make_job(ranks=2, seq_len=32, lengths=((8, 1),))
    plain = Candidate.of({MICRO_BATCH: 3, ACCUMULATION: 5})
    assert samples(job, plain) == 3 * 5 * 2
    assert samples(job, plain.but(packing=True)) == 3 * 5 * 2 * 4, "four sequences of 8 tokens fill a row of 32"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({MICRO_BATCH: "auto", ACCUMULATION: 4}, {ACCUMULATION: 4}),
        ({"zero_optimization": "auto"}, {}),
        ({"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}, {"zero_stage": 3, "sub_group_size": 10**9}),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, {}),
        ({"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": True}}}, {"offload_param": "cpu"}),
        ({"attention": "sdpa", "": 1}, {}),  # not DeepSpeed's
    ],
)
def test_the_knobs_of_a_config(config: dict, expected: dict) -> None:
    found = knobs_of(config)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {k: type(v) for k, v in expected.items()}


def test_what_a_candidate_leaves_open_is_deepspeeds_default() -> None:
    silent = Candidate.of({})
    assert (silent.stage, silent.micro_batch, silent.accumulation, silent.checkpointing) == (0, 1, 1, False)
    assert (silent.offload_optimizer, silent.offload_param) == ("none", "none")
    assert silent.get("overlap_comm") is None
    assert silent.get("overlap_comm", 7) == 7
    assert str(silent.but(zero_stage=2)) == "z2"


# -- what a DeepSpeed config cannot say ------------------------------------------------------------------------------------

OWN = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("on", "own", "expected"),
    [
        (None, {OWN: "expandable_segments:True"}, {}),
        (True, {}, {OWN: "expandable_segments:True"}),
        (False, {}, {}),
        (False, {OWN: "max_split_size_mb:64"}, {}),
        (True, {OWN: "", "PYTORCH_ALLOC_CONF": "backend:native"}, {OWN: "backend:native,expandable_segments:True"}),
    ],
)
def test_expandable_segments_join_the_users_own_settings(on: bool | None, own: dict, expected: dict) -> None:
    knobs = {} if on is None else {"expandable_segments": on}
    candidate = make_candidate(2, **knobs)
    assert candidate.environment(own) == expected
    assert "expandable" not in str(candidate.ds_config(make_job())), "it is no key of DeepSpeed's"


@pytest.mark.parametrize(
    ("stage", "own", "expected"),
    [
        (2, {}, None),
        (3, {}, True),
        (3, {"zero_optimization": {GATHER_ON_SAVE: False}}, False),
        (3, {"zero_optimization": {"stage": 2}}, True),
    ],
)
def test_stage_3_gathers_what_it_saves_unless_the_user_says_otherwise(stage: int, own: dict, expected: object) -> None:
    config = make_candidate(stage).ds_config(make_job(base_config=own))
    assert config["zero_optimization"].get(GATHER_ON_SAVE) is expected


def test_what_a_config_says_by_old_names_is_a_knob_like_any() -> None:
    zero = {"stage": 2, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": False}
    job = dataclasses.replace(make_job(), base_config={"zero_optimization": zero})
    assert knobs_of(job.base_config) == {"zero_stage": 2, "offload_optimizer": "cpu"}

    def told(candidate: Candidate) -> dict:
        return candidate.ds_config(job)["zero_optimization"]

    assert "offload_optimizer" not in told(make_candidate(2, offload_optimizer="none"))
    offloaded = told(make_candidate(3, offload_optimizer="cpu"))
    assert offloaded["offload_optimizer"]["device"] == "cpu"
    assert offloaded[GATHER_ON_SAVE] is False
    for found in (told(make_candidate(2, offload_optimizer="none")), offloaded):
        assert not found.keys() & zero.keys() - {"stage"}
