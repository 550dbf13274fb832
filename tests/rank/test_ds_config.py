import json
from pathlib import Path

import pytest

from autotune.problem.candidate import COMPILED, Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Script
from autotune.problem.knobs import KNOBS
from autotune.rank.ds_config import needed_ops, optimizer_section, trial_config
from autotune.script.profile import unknown_job
from tests.conftest import make_candidate, make_job


def test_autos_and_trackers_go_and_an_optimizer_comes() -> None:
    base = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "wandb": {"enabled": True},
        "gradient_clipping": "auto",
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    }
    config = trial_config(make_candidate(2), make_job(base_config=base))
    assert config["optimizer"] == {"type": "AdamW", "params": {}}
    assert not {"wandb", "gradient_clipping", "scheduler"} & set(config)
    plain = trial_config(make_candidate(3), make_job())
    assert plain["optimizer"]["type"] == "AdamW"
    assert plain["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize(
    ("own", "power"),
    [({}, 8), ({"initial_scale_power": 32}, 8), ({"initial_scale_power": 4}, 4), ({"loss_scale": 128}, None)],
)
def test_random_weights_begin_at_a_scale_that_they_bear(own: dict[str, int], power: int | None) -> None:
    job = make_job(precision="fp16", base_config={"fp16": own})
    assert trial_config(make_candidate(2), job)["fp16"].get("initial_scale_power") == power
    exported = make_candidate(2).ds_config(job)["fp16"]
    assert exported == {**own, "enabled": True}, "the training keeps its own"


@pytest.mark.parametrize("name", ["adamw", "adam", "fused_adam", "lion", "sgd", "adagrad"])
def test_every_optimizer_has_a_section(name: str) -> None:
    section = optimizer_section(make_job(optimizer=name), make_candidate(2, offload_optimizer="cpu"))
    assert section["params"]["lr"] > 0
    assert "torch_adam" not in section["params"]


def test_ops_that_are_built_before_the_budget() -> None:
    job, offloads = make_job(), [make_candidate(2, offload_optimizer="cpu")]
    assert "CPUAdamBuilder" in needed_ops(offloads, job, "cpu")
    assert "CPUAdamBuilder" not in needed_ops([make_candidate()], job, "cpu")
    assert "CPULionBuilder" in needed_ops(offloads, make_job(optimizer="lion"), "cuda")
    assert "FusedAdamBuilder" in needed_ops([make_candidate()], make_job(optimizer="fused_adam"), "cuda")
    nvme = [make_candidate(3, offload_optimizer="nvme")]
    assert "AsyncIOBuilder" in needed_ops(nvme, job, "cuda")


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.op])
def test_the_op_of_a_knobs_row_is_built_if_the_knob_is_on(name: str) -> None:
    op, job = KNOBS[name].op, make_job()
    on, off = (Candidate.of({"zero_stage": 3, COMPILED: True, name: value}) for value in (True, False))
    assert needed_ops([off, on, on], job, "cuda").count(op) == 1
    assert op not in needed_ops([off], job, "cuda")


@pytest.mark.parametrize(
    ("optimizer", "fused"),
    [
        ({"type": "AdamW", "params": {"lr": "auto"}}, True),
        ({"type": "Adam", "params": {"torch_adam": True}}, False),
        ({"type": "Lion"}, False),
        (None, False),  # the script's own, or Trainer's
        ("AdamW", False),  # DeepSpeed will say what is wrong with it
    ],
)
def test_a_scripts_fused_adam_is_built_where_its_config_asks_for_it(
    tmp_path: Path, optimizer: object, fused: bool
) -> None:
    config = {"train_batch_size": 4, **({"optimizer": optimizer} if optimizer else {})}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    named = Script(("train.py", "--deepspeed", "ds.json"), str(tmp_path))
    handed = Script(("train.py",), str(tmp_path), ds_config=str(tmp_path / "ds.json"))
    for script in (named, handed):
        ops = needed_ops([make_candidate()], unknown_job(script, detect("cpu", 2)), "cuda")
        assert ("FusedAdamBuilder" in ops) == fused
