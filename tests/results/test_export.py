"""What is written of a winner, and that nothing is in it that was neither tuned nor asked for."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autotune import __version__
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import ArgumentFile, Job, Lora, Script, ScriptProfile
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement
from autotune.results.console import usage_lines
from autotune.results.export import (
    accelerate_config,
    hf_deepspeed_config,
    meta,
    training_arguments,
    training_changes,
    write_export,
)
from autotune.util.interpreter import Interpreter
from tests.conftest import make_candidate, make_job

OWN = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "fused": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage3_prefetch_bucket_size": 123},
}


def winner(stage: int = 2, **knobs: object) -> Candidate:
    """With no more knobs than these, so that a whole config can be compared."""
    return Candidate.of(
        {"zero_stage": stage, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, **knobs}  # type: ignore[dict-item]
    )


def test_the_users_own_config_is_kept_and_nothing_is_invented() -> None:
    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": 24}
    assert winner().ds_config(make_job()) == {**batch, "zero_optimization": {"stage": 2}}
    config = winner(3).ds_config(make_job(base_config=OWN))
    zero = {"stage3_prefetch_bucket_size": 123, "stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    assert config == {**OWN, **batch, "zero_optimization": zero}


def test_hugging_face_gets_auto_where_it_insists() -> None:
    job = make_job(base_config=OWN, precision="bf16")
    assert hf_deepspeed_config(winner(), job) == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "fused": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}},
        "zero_optimization": {"stage3_prefetch_bucket_size": 123, "stage": 2},
    }
    assert OWN["optimizer"]["params"]["lr"] == 3e-4, "the user's own config is not touched"  # type: ignore[index]


@pytest.mark.parametrize(
    ("base", "section", "expected"),
    [
        ({"optimizer": {"type": "Adam", "params": {"eps": 1e-8, "weight_decay": 0.1}}}, "optimizer", None),
        ({"optimizer": {"type": "Adam"}}, "optimizer", {"type": "Adam"}),
        ({"scheduler": "auto"}, "scheduler", "auto"),
        ({}, "gradient_clipping", "auto"),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1, "total_num_steps": 9}}},
            "scheduler",
            {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1, "total_num_steps": "auto"}},
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-4}}},
            "scheduler",
            {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": "auto"}},
        ),
        ({"fp16": {"loss_scale": 0}}, "fp16", {"loss_scale": 0, "enabled": "auto"}),
    ],
)
def test_hugging_face_of_configs_that_lack_a_section(base: dict, section: str, expected: object) -> None:
    expected = expected or {"type": "Adam", "params": {"eps": "auto", "weight_decay": "auto"}}
    assert hf_deepspeed_config(winner(), make_job(base_config=base))[section] == expected


def test_a_config_of_the_users_own_that_does_not_clip_still_does_not() -> None:
    assert "gradient_clipping" not in hf_deepspeed_config(
        winner(), make_job(base_config={"optimizer": {"type": "Adam"}})
    )


def test_arguments_of_a_trainer() -> None:
    job = make_job(precision="bf16")
    plain = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": False,
        "bf16": True,
        "fp16": False,
        "deepspeed": hf_deepspeed_config(winner(), job),
    }
    assert training_arguments(winner(), job) == plain
    assert training_arguments(winner(), job, "cpu") == {**plain, "use_cpu": True}
    levers = {"torch_compile": True, "use_liger_kernel": True}
    assert training_arguments(winner(compile=True, liger_kernel=True), job) == {**plain, **levers}
    spared = training_arguments(winner(activation_checkpointing=True), make_job(precision="fp16"))
    assert spared["gradient_checkpointing"] is True
    assert spared["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert (spared["bf16"], spared["fp16"]) == (False, True)


def test_accelerate_points_at_the_config() -> None:
    expected = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "x.json", "zero3_init_flag": True},
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": 2,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    assert accelerate_config(winner(3), make_job(), "x.json") == expected
    other = accelerate_config(winner(2), make_job(), "x.json", "cpu")
    assert other["deepspeed_config"]["zero3_init_flag"] is False
    assert other["use_cpu"] is True


@pytest.mark.parametrize(
    ("knobs", "job", "lines"),
    [
        ({}, {"base_config": OWN}, []),
        ({}, {"optimizer": "lion"}, ["the optimizer and its learning rate are yours; it was measured with lion"]),
        (
            {"activation_checkpointing": True},
            {"base_config": OWN},
            [
                "call model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}) "
                "(Trainer: gradient_checkpointing=True): it was measured with activation checkpointing"
            ],
        ),
        (
            {"attention": "sdpa", "compile": True},
            {"base_config": OWN},
            [
                "make the model with attn_implementation='sdpa': it was measured with it",
                "compile the model by engine.compile() (Trainer: torch_compile=True): it was measured so",
            ],
        ),
        (
            {},
            {"base_config": OWN, "lora": Lora(8), "lengths": ((8, 1),), "packed": True},
            [
                "train adapters alone (peft's LoraConfig, r=8): it was measured with them",
                "pack sequences into rows of 32 tokens: the batch sizes count rows",
            ],
        ),
        (
            {"offload_optimizer": "cpu"},
            {},
            [
                'give deepspeed.ops.adam.DeepSpeedCPUAdam as the optimizer, or an "optimizer" section: offload takes no '
                "other unless zero_force_ds_cpu_optimizer is false, and that is slow",
                "the optimizer and its learning rate are yours; it was measured with adamw",
            ],
        ),
        (
            {"liger_kernel": True},
            {"base_config": OWN, "task": "classification"},
            [
                "train the model with its head for classification: it was measured with it",
                "use Liger's kernels (Trainer: use_liger_kernel=True): it was measured so",
            ],
        ),
    ],
)
def test_what_a_config_cannot_carry_is_said(knobs: dict, job: dict, lines: list[str]) -> None:
    variables = {"OMP_NUM_THREADS": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    first = "start it with OMP_NUM_THREADS=3 CUDA_DEVICE_ORDER=PCI_BUS_ID: it was measured so"
    assert training_changes(winner(**knobs), make_job(**job), variables) == [first, *lines]


@pytest.mark.parametrize(
    ("stage", "ranks", "transformers", "model", "told"),
    [
        (3, 8, "4.57.1", "mixtral-8x7b", True),
        (3, 8, "5.0.0", "mixtral-8x7b", False),  # all experts of a layer are one parameter
    ],
)
def test_a_training_sets_the_leaf_modules_that_the_ranks_have_set(
    stage: int, ranks: int, transformers: str, model: str, told: bool
) -> None:
    """Ranks that skip different experts hang at stage 3 without them."""
    other = Interpreter({"executable": "/other/bin/python", "versions": {"transformers": transformers}, "cuda": None})
    job = Job(resolve_model(model), ranks, 2048, "bf16", interpreter=other)
    lines = training_changes(make_candidate(zero_stage=stage), job, {})
    assert any("set_z3_leaf_modules" in line for line in lines) == told


CALL, WITHOUT = "unet.enable_gradient_checkpointing()", "activation checkpointing"


def of_a_script(folder: Path, **profile: object) -> Script:
    """A run of `train.py --deepspeed ds.json`, at 2 x 2 samples a rank."""
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    seen = {"micro_batch": 2, "accumulation": 2, "through_arguments": False, **profile}
    return Script(("train.py", "--deepspeed", "ds.json"), str(folder), profile=ScriptProfile.from_json(seen))


def test_what_a_script_must_see_to(tmp_path: Path) -> None:
    def said(knobs: dict[str, object], script: Script) -> list[str]:
        return training_changes(winner(**knobs), make_job(base_config=OWN, script=script), {"A": "1"})[1:]

    same = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    (other,) = said({}, of_a_script(tmp_path))
    assert other.startswith("its steps are of 24 samples, the script's own of 8: ")
    assert said(same, of_a_script(tmp_path)) == []
    (lightning,) = said(same, of_a_script(tmp_path, lightning=True))
    assert lightning == "with accumulate_grad_batches=4 in its Trainer, which takes it from no config"
    on = {"checkpointed": True}
    (without,) = said({**same, "activation_checkpointing": False}, of_a_script(tmp_path, **on))
    assert "calls model.gradient_checkpointing_enable()" in without
    assert "measured without activation checkpointing" in without
    assert said(same, of_a_script(tmp_path, **on)) == [], "which the space does not tune"
    assert said({**same, "activation_checkpointing": False}, of_a_script(tmp_path)) == []
    (own,) = said({**same, "activation_checkpointing": False}, of_a_script(tmp_path, **on, checkpointing_call=CALL))
    assert own == f"where your script's code itself has model.{CALL}, take it out: it was measured without {WITHOUT}"
    (own,) = said({**same, "activation_checkpointing": True}, of_a_script(tmp_path, checkpointing_call=CALL))
    assert own == f"have model.{CALL} in your script's code: it was measured with {WITHOUT}"
    (whole,) = said(same, of_a_script(tmp_path, zero_init=True))
    assert whole.startswith("take deepspeed.zero.Init out of your script's code, or give it enabled=False: ")
    assert said({**same, "zero_stage": 3}, of_a_script(tmp_path, zero_init=True)) == []
    told = dataclasses.replace(of_a_script(tmp_path, lightning=True), flags=((ACCUMULATION, "--accumulate"),))
    assert said(same, told) == [], "its own flag says it"


def test_what_stands_beside_the_config() -> None:
    measured = Measurement(2.0, 0.1, 5, 24.0, 768.0, 10**9, mfu=0.25)
    told = meta(
        winner(),
        make_job(optimizer="lion"),
        measured,
        study="s",
        trial=7,
        verified=True,
        fingerprint={"torch": "2"},
        headroom=0.05,
        threads=6,
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        resume_peak_bytes=11,
    )
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "6"}
    assert told == {
        "autotune": __version__,
        "study": "s",
        "trial": 7,
        "verified": True,
        "candidate": {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 4, "zero_stage": 2},
        "measurement": {key: value for key, value in vars(measured).items() if value is not None},
        "samples_per_second_per_gpu": 12.0,
        "tokens_per_second_per_gpu": 384.0,
        "throughput_interval_95": [pytest.approx(24 / 1.05), pytest.approx(24 / 0.95)],
        "headroom": 0.05,
        "threads_per_rank": 6,
        "environment": variables,
        "resume_peak_bytes": 11,
        "your_training_must": training_changes(winner(), make_job(optimizer="lion"), variables),
        "measured_with_optimizer": "lion",
        "fingerprint": {"torch": "2"},
    }
    assert "mfu" in told["measurement"]
    assert "nvml_peak_bytes" not in told["measurement"]
    json.dumps(told)


def test_a_spread_of_more_than_a_step_and_an_optimizer_of_the_users_own() -> None:
    measured = Measurement(1.0, 2.0, 2, 24.0, 768.0, 1)
    job = make_job(base_config={"optimizer": {"type": "Lamb"}}, optimizer="sgd")
    told = meta(winner(), job, measured, study="s", trial=1, verified=False, fingerprint={}, headroom=0.0, threads=1)
    assert told["measured_with_optimizer"] == "Lamb"
    low, high = told["throughput_interval_95"]
    assert low == pytest.approx(8)
    assert high == pytest.approx(24e9), "no bound above"
    unnamed = make_job(base_config={"optimizer": {"params": {}}}, optimizer="sgd")
    told = meta(
        winner(), unnamed, measured, study="s", trial=1, verified=False, fingerprint={}, headroom=0.0, threads=1
    )
    assert told["measured_with_optimizer"] == "sgd"


# -- files ---------------------------------------------------------------------------------------------------------------


def test_a_deepspeed_config_and_its_meta(tmp_path: Path) -> None:
    out = tmp_path / "new" / "winner.json"
    assert write_export(winner(), make_job(), out, {"study": "s"}) == [out, out.with_name("winner.meta.json")]
    assert out.read_text() == json.dumps(winner().ds_config(make_job()), indent=2) + "\n"
    assert json.loads(out.with_name("winner.meta.json").read_text()) == {"study": "s"}


def test_links_to_an_export_go_on_pointing_to_their_files(tmp_path: Path) -> None:
    out, kept = tmp_path / "winner.json", tmp_path / "kept"
    kept.mkdir()
    for name in ("winner.json", "winner.meta.json"):
        (kept / name).write_text("earlier")
        (tmp_path / name).symlink_to(kept / name)
    for path in write_export(winner(), make_job(), out, {"study": "s"}):
        assert path.is_symlink()
    assert json.loads((kept / "winner.meta.json").read_text()) == {"study": "s"}


def test_an_export_that_is_ended_amid_leaves_no_figures_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "winner.json"
    _, about = write_export(winner(), make_job(), out, {"study": "s"})

    def full(path: Path, content: str) -> None:
        if path == about:
            raise OSError("full")
        path.write_text(content)

    monkeypatch.setattr("autotune.results.export.write_atomically", full)
    with pytest.raises(OSError, match="full"):
        write_export(make_candidate(3), make_job(), out, {"study": "another"})
    assert not about.exists()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_arguments_of_a_trainer_as_a_file(tmp_path: Path, device: str) -> None:
    out = tmp_path / "args.json"
    assert write_export(winner(), make_job(), out, {}, style="hf", device=device) == [out, tmp_path / "args.meta.json"]
    assert json.loads(out.read_text()) == training_arguments(winner(), make_job(), device)
    write_export(winner(), make_job(), out, {}, style="hf")
    assert "use_cpu" not in json.loads(out.read_text()), "a GPU unless said otherwise"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_accelerate_has_its_config_in_a_file_of_its_own(tmp_path: Path, device: str) -> None:
    out, config = tmp_path / "w.yaml", tmp_path / "w.accelerate.deepspeed.json"
    written = write_export(winner(3), make_job(), out, {}, style="accelerate", device=device)
    assert written == [out, config, tmp_path / "w.accelerate.meta.json"]
    assert yaml.safe_load(out.read_text()) == accelerate_config(winner(3), make_job(), str(config), device)
    assert list(yaml.safe_load(out.read_text())) == list(accelerate_config(winner(3), make_job(), "", device)), (
        "in order"
    )
    assert json.loads(config.read_text()) == winner(3).ds_config(make_job())


def test_accelerates_path_is_as_the_file_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    write_export(winner(), make_job(), Path("runs/w.yaml"), {}, style="accelerate")
    text = (tmp_path / "runs/w.yaml").read_text()
    assert text.startswith(
        "# deepspeed_config_file is looked for from the folder in which `accelerate launch` is started"
    )
    assert yaml.safe_load(text)["deepspeed_config"]["deepspeed_config_file"] == "runs/w.accelerate.deepspeed.json"


@pytest.mark.parametrize("through_arguments", [True, False])
def test_accelerates_config_of_a_trainers_script_is_trainers(tmp_path: Path, through_arguments: bool) -> None:
    script = Script(("train.py",), ".", profile=ScriptProfile(through_arguments=through_arguments))
    job = make_job(script=script, base_config=OWN)
    write_export(winner(), job, tmp_path / "w.yaml", {}, style="accelerate")
    written = json.loads((tmp_path / "w.accelerate.deepspeed.json").read_text())
    expected = hf_deepspeed_config(winner(), job) if through_arguments else winner().ds_config(job)
    assert written == expected


def test_copies_of_a_scripts_files_of_arguments_are_beside_the_config(tmp_path: Path) -> None:
    text = "deepspeed: ds.json\nper_device_train_batch_size: 2\nseed: 7  # mine\n"
    file = ArgumentFile(1, "x.yaml", text, yaml.safe_load(text))
    script = Script(("train.py", "x.yaml"), str(tmp_path), files=(file,))
    config, copy, about = tmp_path / "w.json", tmp_path / "w.argument.x.yaml", tmp_path / "w.meta.json"
    assert write_export(winner(), make_job(script=script), config, {}) == [config, copy, about]
    assert yaml.safe_load(copy.read_text())["deepspeed"] == str(config)
    assert "per_device_train_batch_size: 4\nseed: 7  # mine\n" in copy.read_text()


def test_an_exports_command_names_only_files_that_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "w"

    def said(style: str, script: Script) -> str:
        job, won = make_job(2, script=script), SimpleNamespace(candidate=winner())
        files = write_export(winner(), job, out, {"your_training_must": []}, style=style)
        known = {"name": "s", "folder": out, "threads": 1, "python": None, "fingerprint": {}, "extensions": None}
        store: Any = SimpleNamespace(job=job, hardware=named_hardware("h100", 2), winner=won, **known)
        return usage_lines(style, files, store, None)[0]

    named, config = of_a_script(tmp_path), tmp_path / "w.accelerate.deepspeed.json"
    assert said("deepspeed", named).endswith(
        f" OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 train.py --deepspeed {out}"
    )
    of_variable = dataclasses.replace(named, flags=((MICRO_BATCH, "$BATCH"),))
    assert said("accelerate", of_variable).startswith("use: BATCH=4 accelerate launch --config_file ")
    assert said("accelerate", named) == f"use: accelerate launch --config_file {out} train.py --deepspeed {config}"
    assert said("fsdp", named).endswith(" YOUR_SCRIPT.py ITS_ARGUMENTS"), "FSDP2 reads no DeepSpeed config"


@pytest.mark.parametrize("through_torchrun", [True, False])
def test_a_batch_script_trains_the_studys_own_script(tmp_path: Path, through_torchrun: bool) -> None:
    script = dataclasses.replace(of_a_script(tmp_path), flags=((ACCUMULATION, "--accumulate"),))
    if not through_torchrun:
        script = dataclasses.replace(script, argv=("mytrain", *script.argv[1:]), program="mytrain")
    about = {"study": "night", "environment": {"OMP_NUM_THREADS": "3"}}
    out = tmp_path / "w.sbatch"
    write_export(winner(), make_job(8, script=script), out, about, style="sbatch", device="cuda", nodes=2)
    lines = out.read_text().splitlines()
    started = "train.py" if through_torchrun else "--no-python mytrain"
    words = f"{started} --deepspeed {tmp_path / 'w.sbatch.deepspeed.json'} --accumulate 3"
    assert lines[-1].strip() == f'--rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 12000))" {words}'
    assert {f"cd {tmp_path}", "export OMP_NUM_THREADS=3", "#SBATCH --job-name=night", "#SBATCH --gpus-per-node=4"} <= {
        *lines
    }
    assert any(line.startswith("srun torchrun --nnodes 2 --nproc-per-node 4 ") for line in lines)
