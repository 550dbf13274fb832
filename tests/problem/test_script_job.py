"""The Job that a user's script is, before its first run and after it."""

import json
from pathlib import Path

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.problem.script_job import job_of, own_candidate, unknown_job

HARDWARE = named_hardware("rtx3090", 4)
PROFILE = {
    "config": {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    },
    "client_optimizer": False,
    "through_arguments": False,
    "untested_optimizer": False,
    "micro_batch": 2,
    "accumulation": 3,
    "trained": [100, 20],
    "frozen": 7,
    "model_config": {"hidden_size": 64},
    "seq_len": 512,
    "precision": "fp16",
    "checkpointing": True,
    "checkpointed": False,
}


def script(**changes: object) -> Script:
    return Script(("train.py", "--lr", "1"), "/home/me", profile={**PROFILE, **changes})


# -- before --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (None, {"optimizer": {"type": "AdamW"}}),  # no config is named: what most scripts take
        ({"optimizer": {"type": "Lion"}}, {"optimizer": {"type": "Lion"}}),
        ({"optimizer": "auto"}, {}),
        ({}, {}),
    ],
)
def test_a_script_that_has_not_run(tmp_path: Path, config: dict | None, base: dict) -> None:
    argv = ("train.py", "--deepspeed", "ds.json")
    if config is not None:
        (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, **config}))
    one = Script(argv, str(tmp_path))
    assert unknown_job(one, HARDWARE) == Job(
        ModelSpec("train", {}, "train.py --deepspeed ds.json"), 4, 1, "fp32", base_config=base, script=one
    )


# -- after ---------------------------------------------------------------------------------------------------------------


def test_a_script_that_has_run() -> None:
    assert job_of(script(), HARDWARE, None) == Job(
        ModelSpec("train", {"model_type": "", "hidden_size": 64}, "train.py --lr 1", 127),
        4,
        512,
        "fp16",
        global_batch_size=24,
        base_config={"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}},
        script=script(),
    )
    assert job_of(script(), HARDWARE, 48).global_batch_size == 48
    named = script(model_config={"model_type": "llama"})
    assert job_of(named, HARDWARE, None).model.config == {"model_type": "llama"}


KEEP, ALLOW = "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"client_optimizer": True}, {KEEP: False}),  # offloaded or not, it stays the script's own
        ({"client_optimizer": True, "through_arguments": True}, {}),  # Trainer makes it by the config
        ({"through_arguments": True}, {}),
        ({"untested_optimizer": True}, {ALLOW: True}),
        ({"untested_optimizer": True, "client_optimizer": True}, {KEEP: False, ALLOW: True}),
        # what the script's config says itself is left
        ({"client_optimizer": True, "config": {KEEP: True}}, {KEEP: True}),
        ({"untested_optimizer": True, "config": {ALLOW: False}}, {ALLOW: False}),
    ],
)
def test_an_optimizer_of_the_scripts_own(changes: dict, added: dict) -> None:
    base = job_of(script(**{"config": {}, **changes}), HARDWARE, None).base_config
    assert base == added


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        ({}, {"activation_checkpointing": False}),
        ({"checkpointed": True}, {"activation_checkpointing": True}),
        ({"checkpointing": False, "checkpointed": True}, {}),  # it cannot be told
    ],
)
def test_its_own_config_as_a_candidate(changes: dict, checkpointing: dict) -> None:
    # as measured: `"auto"` in a config says nothing of the batch
    seen = {"config": {"train_micro_batch_size_per_gpu": 9, "zero_optimization": {"stage": 2}}, **changes}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert own_candidate(script(**seen)) == Candidate.of({"zero_stage": 2, **batch, **checkpointing})
