"""Exports as the libraries that take them read them: transformers' Trainer and accelerate."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.problem.candidate import GATHER_ON_SAVE, Candidate
from autotune.problem.job import Job, Lora, Script, ScriptProfile
from autotune.results.export import training_arguments, write_export
from autotune.versions import release, version_of
from tests.conftest import make_candidate, make_job

SCHEDULERS = {
    "WarmupLR": {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 90, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 90, "warmup_num_steps": 10, "cos_min_ratio": 0.1, "warmup_type": "linear"},
}
KEPT = {"warmup_min_lr", "warmup_type", "cos_min_ratio"}  # no argument of Trainer's says it
WINNER = make_candidate(3, 4, 2, offload_optimizer="cpu")


def own(scheduler: str) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}},
        "scheduler": {"type": scheduler, "params": SCHEDULERS[scheduler]},
    }


def as_trainer_fills(config: dict[str, Any], job: Job, candidate: Candidate) -> dict[str, Any]:
    """What Trainer makes of a DeepSpeed config, with arguments unlike those that the config names.

    Raises:
        ValueError: it refuses the config.
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    passed = training_arguments(candidate, job)
    arguments = SimpleNamespace(
        world_size=job.ranks,
        per_device_train_batch_size=passed["per_device_train_batch_size"],
        gradient_accumulation_steps=passed["gradient_accumulation_steps"],
        bf16=passed["bf16"],
        fp16=passed["fp16"],
        bf16_full_eval=False,
        fp16_full_eval=False,
        max_grad_norm=0.7,
        learning_rate=2e-5,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
        weight_decay=0.0,
        save_on_each_node=False,
        fp16_backend="auto",  # these two before transformers 5
        fp16_opt_level="O1",
        get_warmup_steps=lambda steps: 5,
    )
    found = HfTrainerDeepSpeedConfig(config)
    found.trainer_config_process(arguments)
    found.trainer_config_finalize(arguments, SimpleNamespace(), 50)
    return dict(found.config)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_trainer_fills_what_is_auto_and_keeps_the_rest(scheduler: str, precision: str) -> None:
    from deepspeed.runtime import lr_schedules

    job = make_job(precision=precision, base_config=own(scheduler))
    found = as_trainer_fills(training_arguments(WINNER, job)["deepspeed"], job, WINNER)
    assert '"auto"' not in json.dumps(found)
    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 16}
    assert batch.items() <= found.items()
    assert "gradient_clipping" not in found, "neither has the user's own"
    assert found["zero_optimization"][GATHER_ON_SAVE] is True
    told = found["scheduler"]["params"]
    for name, value in SCHEDULERS[scheduler].items():
        assert (told[name] == value) == (name in KEPT), name
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    made = getattr(lr_schedules, scheduler)(optimizer, **told)
    assert made.warmup_type == "linear", "DeepSpeed takes a word that it does not know for another schedule"


def test_trainer_clips_by_its_own_argument_where_no_config_was_brought() -> None:
    job = make_job()
    found = as_trainer_fills(training_arguments(WINNER, job)["deepspeed"], job, WINNER)
    assert found["gradient_clipping"] == 0.7


@pytest.mark.parametrize("trainers", [True, False])
def test_accelerate_finds_the_config_from_where_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: bool
) -> None:
    from accelerate import DeepSpeedPlugin
    from accelerate.commands.config.config_args import load_config_from_file

    monkeypatch.chdir(tmp_path)
    script = Script(("train.py",), ".", profile=ScriptProfile(through_arguments=trainers))
    job = dataclasses.replace(make_job(precision="bf16", base_config=own("WarmupLR")), script=script)
    write_export(WINNER, job, Path("runs/w.yaml"), {}, style="accelerate")
    launched = load_config_from_file("runs/w.yaml")
    plugin = DeepSpeedPlugin(hf_ds_config=launched.deepspeed_config["deepspeed_config_file"])
    assert plugin.zero_stage == 3
    assert plugin.zero3_save_16bit_model is True, "else accelerate raises when the model is saved"
    assert plugin.is_auto("train_micro_batch_size_per_gpu") is trainers
    if trainers:  # as Trainer does with the plugin that `accelerate launch` gives it
        assert as_trainer_fills(plugin.hf_ds_config.config, job, WINNER)["train_batch_size"] == 16
    else:
        with pytest.raises(ValueError, match="Please correct"):
            as_trainer_fills(plugin.hf_ds_config.config, job, WINNER)


# -- FSDP --------------------------------------------------------------------------------------------------------------


def launch_arguments(config: Path) -> Any:
    """Arguments of `accelerate launch --config_file`."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(config), "train.py"])
    )
    return arguments


def launches_ranks(config: Path) -> bool:
    """Return True if it starts all ranks, as `launch_command` decides."""
    arguments = launch_arguments(config)
    return bool(arguments.multi_gpu or arguments.use_fsdp)


def launched(config: Path) -> dict[str, str]:
    """Variables that it gives its ranks."""
    from accelerate.utils.launch import prepare_multi_gpu_env

    found = prepare_multi_gpu_env(launch_arguments(config))
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def test_accelerate_reads_the_fsdp_config(tmp_path: Path) -> None:
    """Under other names accelerate ignores a key and trains with its default."""
    job = make_job(precision="bf16")
    for stage, knobs, found in (
        (3, {"activation_checkpointing": True}, ("true", "false", "true")),
        (2, {"offload_optimizer": "cpu"}, ("false", "true", "false")),
    ):
        out = tmp_path / f"{stage}.fsdp.yaml"
        write_export(make_candidate(stage, **knobs), job, out, {}, style="fsdp")
        text = out.read_text()
        assert "accelerate 1.6 or newer reads it" in text
        if release(version_of("accelerate")) < (1, 6):
            continue
        env = launched(out)
        keys = ("FSDP_RESHARD_AFTER_FORWARD", "FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING")
        assert tuple(env[key] for key in keys) == found
        assert (env["FSDP_VERSION"], env["ACCELERATE_MIXED_PRECISION"]) == ("2", "bf16")
        assert "# without a counterpart: " in text
        assert ("weights are sharded between steps too, unlike ZeRO-2" in text) is (stage == 2)
    write_export(make_candidate(0), job, tmp_path / "0.fsdp.yaml", {}, style="fsdp")
    assert "ACCELERATE_USE_FSDP" not in launched(tmp_path / "0.fsdp.yaml"), "stage 0 is DDP"
    quantized = make_job(precision="bf16", lora=Lora(8, quantize="nf4"))
    write_export(make_candidate(0), quantized, tmp_path / "q.fsdp.yaml", {}, style="fsdp")
    text = (tmp_path / "q.fsdp.yaml").read_text()
    assert "# load the base model with BitsAndBytesConfig(load_in_4bit=True" in text
    assert "# train fp32 weights under torch.autocast " in text
    write_export(make_candidate(0), job, tmp_path / "cpu.yaml", {}, style="fsdp", device="cpu")
    assert launches_ranks(tmp_path / "cpu.yaml"), "it starts one process for MULTI_CPU"
