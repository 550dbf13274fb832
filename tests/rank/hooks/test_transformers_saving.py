"""What a measured script saves and evaluates: nothing, and it goes on as if it had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.rank.hooks import transformers
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context


def train(folder: str, quiet: bool, early: bool) -> dict[str, Any]:
    """Trainer's own training, with a callback that stops by evaluations or a schedule that follows them, and one that asks for
    both at every step; and how often it evaluated and saved."""
    import torch
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    context, _ = make_context(f"{folder}/trial", make_candidate(1, 2), quiet=quiet)
    transformers.install(context)
    done = {"saved": 0, "evaluated": 0}

    class Asking(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
            control.should_evaluate = control.should_save = True
            return control

        def on_save(self, *args: Any, **more: Any) -> None:
            done["saved"] += 1

        def on_evaluate(self, *args: Any, **more: Any) -> None:
            done["evaluated"] += 1

    class Net(torch.nn.Linear):
        def forward(self, x: Any, labels: Any) -> Any:
            found = super().forward(x)
            return {"loss": (found - labels).square().mean(), "logits": found}

    more = {"load_best_model_at_end": True} if early else {"lr_scheduler_type": "reduce_lr_on_plateau"}
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        use_cpu=True,
        max_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]
    callbacks = [Asking(), *([EarlyStoppingCallback(9)] if early else [])]
    trainer = Trainer(Net(4, 1), arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=callbacks)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    if quiet:  # as callbacks of the script's call them
        trainer._save_checkpoint(trainer.model, None)
        trainer.push_to_hub()
    trained = {**done, "steps": trainer.state.global_step}
    return {**trained, "own evaluation": "eval_loss" in trainer.evaluate()}


@pytest.mark.few(1)
@pytest.mark.parametrize("early", [True, False])
def test_trainer_evaluates_and_saves_nothing_whatever_asks_for_it(
    in_rank: Callable[..., Any], tmp_path: Path, early: bool
) -> None:
    (tmp_path / "trial").mkdir()
    found = in_rank(train, str(tmp_path), True, early)
    assert found == {"saved": 0, "evaluated": 0, "steps": 3, "own evaluation": True}
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "saved").exists()
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.slow
def test_a_training_evaluates_and_saves(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    found = in_rank(train, str(tmp_path), False, True)
    assert (found["saved"], found["evaluated"], found["steps"]) == (3, 3, 3)
    assert (tmp_path / "saved").exists()


def save(folder: str, quiet: bool) -> list[Any]:
    """accelerate's saves: named by itself, with the oldest removed; into a folder of the trial; of a model."""
    import os

    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    context, _ = make_context(f"{folder}/trial", make_candidate(1, 2), quiet=quiet)
    transformers.install_silence(context)
    names = ProjectConfiguration(f"{folder}/theirs", automatic_checkpoint_naming=True, total_limit=1, iteration=2)
    named = Accelerator(cpu=True, project_config=names)
    os.chdir(f"{folder}/trial")
    found = [os.path.basename(named.save_state()), named.save_iteration]
    named.project_configuration.automatic_checkpoint_naming = False
    named.save_state("inside")
    named.save_state(f"{folder}/outside")
    named.save_model(torch.nn.Linear(1, 1), "model")
    return [*found, os.listdir("inside"), os.listdir("model"), os.path.exists(f"{folder}/outside")]


@pytest.mark.few(1)
@pytest.mark.parametrize("quiet", [True, False])
def test_accelerate_saves_and_removes_nothing(in_rank: Callable[..., Any], tmp_path: Path, quiet: bool) -> None:
    (tmp_path / "trial").mkdir()
    for number in range(2):
        (tmp_path / "theirs" / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
    name, following, inside, model, outside = in_rank(save, str(tmp_path), quiet)
    assert (name, following) == ("checkpoint_2", 3), "as accelerate counts on"
    kept = sorted(path.name for path in (tmp_path / "theirs" / "checkpoints").iterdir())
    assert kept == (["checkpoint_0", "checkpoint_1"] if quiet else ["checkpoint_2"])
    assert ([inside, model] == [[], []]) is quiet, "there to be written into"
    assert outside is not quiet
