"""Lightning's Trainer, told how many batches an optimizer step is made of. (It wants GPUs for DeepSpeed: its two classes are
stood in for; by hand it was tried on CPU ranks, with its check for GPUs taken out.)"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.problem.job import Script, ScriptProfile, under_lightning
from autotune.rank.hooks.config import merged_arguments
from autotune.rank.hooks.deepspeed import accumulate, trainer_of
from tests.conftest import make_candidate, make_job
from tests.rank.hooks.conftest import make_context


def a_module(package: str, trainer: Any) -> Any:
    """An object of a user's class below Lightning's."""

    def its_trainer(self: Any) -> Any:
        if trainer is None:
            raise RuntimeError("is not attached to a `Trainer`")
        return trainer

    base = type("LightningModule", (), {"__module__": f"{package}.core.module", "trainer": property(its_trainer)})
    return type("Mine", (base,), {"__module__": "train"})()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_its_trainer_counts_as_the_candidate_does(package: str) -> None:
    trainer = SimpleNamespace(accumulate_grad_batches=2)
    config = {"gradient_accumulation_steps": 2}  # as Lightning has written it
    context, _ = make_context(candidate=make_candidate(1, 2, 8))
    accumulate(context, a_module(package, trainer), config)
    assert trainer.accumulate_grad_batches == config["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    "model",
    [
        object(),
        a_module("mine", SimpleNamespace(accumulate_grad_batches=2)),
        a_module("lightning.pytorch", None),
        a_module("lightning.pytorch", SimpleNamespace()),  # Fabric's stand-in for one
    ],
    ids=["none", "another's", "without a trainer", "Fabric's"],
)
def test_other_loops_are_left_alone(model: Any) -> None:
    assert trainer_of(model) is None
    config: dict[str, Any] = {"gradient_accumulation_steps": 2}
    accumulate(make_context(candidate=make_candidate(1, 2, 8))[0], model, config)
    assert config == {"gradient_accumulation_steps": 2}


def test_a_config_that_it_reads_leaves_the_key_out() -> None:
    profile = {"lightning": True}
    job = make_job(
        script=Script(("train.py",), ".", profile=ScriptProfile.from_json(profile)),
        base_config={"gradient_accumulation_steps": 2},
    )
    config = make_candidate(1, 2, 8).ds_config(job)
    assert "gradient_accumulation_steps" not in config
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (2, 2 * 8 * job.ranks)


@pytest.mark.parametrize(
    ("text", "profile", "known"),
    [
        ("import lightning as L\n", {}, True),
        ("import torch\n  from pytorch_lightning import Trainer\n", {}, True),
        ("# import lightning\nimport lightningcss\n", {}, False),
        (None, {"lightning": True}, True),
        (None, {}, False),
    ],
)
def test_it_is_known_before_and_after_the_first_run(
    tmp_path: Path, text: str | None, profile: dict[str, Any], known: bool
) -> None:
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    assert under_lightning(Script(("train.py",), str(tmp_path), profile=ScriptProfile.from_json(profile))) == known


def test_a_launch_of_a_study_that_knows_no_script_names_a_config_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "train.py").write_text("import pytorch_lightning\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    context, _ = make_context(
        tmp_path, make_candidate(2, 2, 8), argv=("train.py", "--config", str(tmp_path / "ds.json"))
    )
    (_, named) = merged_arguments(context)
    config = json.loads(Path(named).read_text())
    assert (config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]) == (2, 2)
    assert "gradient_accumulation_steps" not in config
