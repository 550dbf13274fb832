"""A space narrowed to one job and one machine."""

import dataclasses

import pytest

from autotune.errors import UserError
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.knobs import missing_package
from autotune.problem.space import SearchSpace, fitted, for_job, parse_space
from autotune.util import inquiry
from tests.conftest import make_job

SPACE = """
name: mine
knobs:
  zero_stage: [1, 2]
  train_micro_batch_size_per_gpu: [1, 2, 4]
  activation_checkpointing: [true, false]
  attention: [sdpa, eager]
  compile: [true, false]
  lora: [none, 8]
  packing: [true, false]
  expandable_segments: [true, false]
"""
GPUS = named_hardware("a100-80", 2)
BATCH = {"zero_stage", "train_micro_batch_size_per_gpu", "expandable_segments"}
MODEL = {"attention", "compile", "lora", "packing"}
PROFILE = {"checkpointing": True, "batch_note": "", "micro_batch": 3, "accumulation": 5}
LENGTHS = {"lengths": ((16, 1), (32, 1))}


def script_job(**changes: object) -> Job:
    return make_job(script=Script(("train.py",), ".", profile=ScriptProfile(**{**PROFILE, **changes})), **LENGTHS)


@pytest.mark.parametrize(
    ("job", "knobs"),
    [
        (make_job(**LENGTHS), BATCH | MODEL | {"activation_checkpointing"}),
        (make_job(), BATCH | (MODEL - {"packing"}) | {"activation_checkpointing"}),  # one length: batches are full
        (make_job(workload="a:b", **LENGTHS), BATCH | {"activation_checkpointing", "compile", "packing"}),
        # a script makes its own model and batches
        (script_job(), BATCH | {"activation_checkpointing"}),
        (script_job(checkpointing=False), BATCH),
    ],
)
def test_a_job_has_not_every_knob(job: Job, knobs: set[str]) -> None:
    space = parse_space(SPACE)
    assert set(for_job(space, job).knobs) == knobs
    assert set(space.knobs) == BATCH | MODEL | {"activation_checkpointing"}, "the space given is not changed"


@pytest.mark.parametrize(
    "job", [make_job(), make_job(workload="a:b"), script_job(), script_job(checkpointing=False)], ids=range(4)
)
def test_a_space_without_any_of_these_stays_as_it_is(job: Job) -> None:
    space = parse_space("knobs: {zero_stage: [1, 2]}")
    assert for_job(space, job) == space


def test_a_script_whose_batch_cannot_be_told_keeps_it() -> None:
    knobs = for_job(parse_space(SPACE), script_job(batch_note="it has its own")).knobs
    assert knobs["train_micro_batch_size_per_gpu"].values == (3,)
    assert knobs["gradient_accumulation_steps"].values == (5,)
    assert knobs["zero_stage"].values == (1, 2)
    assert "gradient_accumulation_steps" not in for_job(parse_space(SPACE), script_job()).knobs


def test_a_script_whose_checkpointing_nothing_switches_keeps_it() -> None:
    kept = for_job(parse_space(SPACE), script_job(checkpointing=False, checkpointed=True)).knobs
    assert kept["activation_checkpointing"].values == (True,)
    left_alone = for_job(parse_space("knobs: {zero_stage: [1, 2]}"), script_job(checkpointed=True)).knobs
    assert left_alone["activation_checkpointing"].values == (True,)
    tuned = for_job(parse_space(SPACE), script_job(checkpointed=True)).knobs
    assert tuned["activation_checkpointing"].values == (True, False)


def test_what_the_users_own_config_sets_is_held_unless_it_is_tuned() -> None:
    own = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "gradient_accumulation_steps": "auto"}
    knobs = for_job(parse_space(SPACE), make_job(base_config=own)).knobs
    assert knobs["zero_stage"].values == (1, 2)
    assert knobs["overlap_comm"].values == (True,)
    assert "gradient_accumulation_steps" not in knobs


# -- packages that are not installed -------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> SearchSpace:
    """A space, on a machine without peft and without kernels of attention."""
    monkeypatch.setattr(inquiry, "has", lambda module: False)
    return parse_space(
        "{name: mine, knobs: {zero_stage: [1], attention: [sdpa, flash_attention_2, flash_attention_3], lora: [none, 8]}}"
    )


def test_what_is_not_installed_is_left_out_and_said(bare: SearchSpace) -> None:
    left, lines = fitted(bare, make_job(), GPUS)
    assert left.knobs["attention"].values == ("sdpa",)
    assert left.knobs["lora"].values == ("none",)
    assert left.knobs["zero_stage"] == bare.knobs["zero_stage"]
    assert lines == [
        "attention flash_attention_2 needs the package flash_attn, which is not installed: left out",
        "attention flash_attention_3 needs the package flash_attn_interface, which is not installed: left out",
        "lora r=8 needs the package peft, which is not installed: left out",
    ]
    assert len(bare.knobs["attention"].values) == 3, "the space given is not changed"


def test_what_is_installed_stays(bare: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "has", lambda module: True)
    assert fitted(bare, make_job(), GPUS) == (bare, [])
    plain = parse_space("knobs: {zero_stage: [1], lora: [8]}")
    assert fitted(plain, make_job(), GPUS) == (plain, [])


def test_an_optimizer_of_the_scripts_own_has_one_place() -> None:
    space = parse_space("name: mine\nknobs: {zero_stage: [0, 1, 2, 3], offload_optimizer: [none, cpu, nvme]}")
    left, lines = fitted(space, script_job(optimizer="FusedAdam"), GPUS)
    assert left.knobs["offload_optimizer"].values == ("none",)
    assert left.knobs["zero_stage"].values == (0, 1, 2, 3)
    assert lines == [
        "offload_optimizer cpu, offload_optimizer nvme is not for the script's own FusedAdam, which steps on the GPU alone: "
        "left out"
    ]
    left, lines = fitted(space, script_job(optimizer="DeepSpeedCPUAdam"), GPUS)
    assert left.knobs["offload_optimizer"].values == ("cpu", "nvme")
    assert left.knobs["zero_stage"].values == (1, 2, 3)
    assert lines == [
        "zero_stage 0, offload_optimizer none is not for the script's own DeepSpeedCPUAdam, which steps on the CPU alone: "
        "left out"
    ]
    for job in (script_job(), make_job()):
        assert fitted(space, job, GPUS).space.knobs == space.knobs


def test_offloading_that_a_stage_does_not_read_is_left_out_as_ever() -> None:
    space = parse_space("name: mine\nknobs: {zero_stage: [0], offload_optimizer: [cpu]}")
    left, lines = fitted(space, make_job(), GPUS)
    assert "offload_optimizer" not in left.knobs
    assert "is read by no candidate of space mine" in lines[0]


def test_a_knob_that_has_no_value_left(bare: SearchSpace) -> None:
    adapters = dataclasses.replace(bare.knobs["lora"], values=("r=8", "r=16"))
    with pytest.raises(UserError) as caught:
        fitted(dataclasses.replace(bare, knobs={"lora": adapters}), make_job(), GPUS)
    assert str(caught.value) == (
        "space mine: lora r=8 needs the package peft, which is not installed; add another value, or leave lora out"
    )


@pytest.mark.parametrize(
    ("choice", "package"),
    [(None, None), ("none", None), ("sdpa", None), ("flash_attention_2", "flash_attn"), ("r=8,targets=q_proj", "peft")],
)
def test_the_package_that_a_choice_needs(bare: SearchSpace, choice: object, package: str | None) -> None:
    assert missing_package(choice) == package
