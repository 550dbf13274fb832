"""Measurements of scripts that resume: they start anew, and the script goes on as if it had found what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.rank.hooks import deepspeed, transformers
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}},
}


def save_and_load(folder: str, written: int, stage: int, quiet: bool) -> dict[str, Any]:
    """A checkpoint of one stage, loaded by a script whose engine is of another."""
    import deepspeed as library
    import torch

    def engine_of(stage: int) -> Any:
        net = torch.nn.Linear(4, 1)
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        return library.initialize(model=net, model_parameters=net.parameters(), config=config)[0]

    first = engine_of(written)
    first.backward(first(torch.ones(2, 4)).sum())
    first.step()
    first.save_checkpoint(f"{folder}/all", client_state={"step": 7, "note": "mine"})
    context, _ = make_context(folder, make_candidate(stage, 2), quiet=quiet)
    deepspeed.install(context)
    transformers.install_silence(context)
    second = engine_of(stage)
    path, state = second.load_checkpoint(f"{folder}/all")
    by_tag, _ = second.load_checkpoint(load_dir=f"{folder}/all", tag="global_step1", load_module_only=True)
    nothing, _ = second.load_checkpoint(f"{folder}/nothing")
    found = {
        "paths": [Path(one).exists() for one in (path, by_tag)],
        "state": {key: state.get(key) for key in ("step", "note")},
        "own": [key for key in ("module", "optimizer", "lr_scheduler", "global_steps") if key in state],
        "steps": second.global_steps,
        "nothing": nothing,
    }
    if written == stage:
        deepspeed.unhooked(context, "load_checkpoint", f"{folder}/all")
    return {**found, "ours": second.global_steps}


@pytest.mark.few(1)
@pytest.mark.parametrize(("written", "stage"), [(0, 0), (1, 0), (1, 3), (3, 1), (3, 3)])
def test_a_checkpoint_of_any_stage_is_answered_and_not_loaded(
    in_rank: Callable[..., Any], tmp_path: Path, written: int, stage: int
) -> None:
    found = in_rank(save_and_load, str(tmp_path), written, stage, True)
    assert found["paths"] == [True, True]
    assert found["state"] == {"step": 7, "note": "mine"}, "the script's own: it may need them"
    assert found["own"] == []
    assert found["steps"] == 0
    assert found["nothing"] is None, "as DeepSpeed answers"
    assert found["ours"] == (written == stage), "a verification does load"


def test_a_training_loads_its_own(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(save_and_load, str(tmp_path), 1, 1, False)
    assert (found["state"], found["steps"]) == ({"step": 7, "note": "mine"}, 1)


def load_a_reference(folder: str) -> list[bool]:
    """An engine that trains nothing, and so has no candidate's stage."""
    import deepspeed as library
    import torch

    def weights_of(engine: Any) -> list[float]:
        return [float(one) for one in engine.module.weight.flatten()]

    library.init_distributed()
    saved = library.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})[0]
    saved.save_checkpoint(f"{folder}/all")
    context, _ = make_context(folder, make_candidate(1, 2))
    deepspeed.install(context)
    transformers.install_silence(context)
    reference = library.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})[0]
    before = weights_of(reference)
    reference.load_checkpoint(f"{folder}/all")
    return [before == weights_of(saved), weights_of(reference) == weights_of(saved)]


@pytest.mark.slow
def test_a_reference_is_loaded(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    assert in_rank(load_a_reference, str(tmp_path)) == [False, True]


def resume_trainer(folder: str, quiet: bool) -> list[Any]:
    """What Trainer's own loop is told to resume from, however the script says it."""
    from transformers import Trainer, TrainingArguments

    seen: list[Any] = []
    Trainer.train = lambda trainer, resume_from_checkpoint=None, trial=None: seen.append(  # type: ignore[method-assign]
        [resume_from_checkpoint, trial]
    )
    context, _ = make_context(folder, make_candidate(1, 2), quiet=quiet)
    transformers.install(context)
    for _ in range(2):
        arguments = TrainingArguments(output_dir="mine", resume_from_checkpoint="mine/checkpoint-5")
    trainer = Trainer.__new__(Trainer)
    trainer.args = arguments
    trainer.train(arguments.resume_from_checkpoint)
    trainer.train(True, "trial")  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint="mine/checkpoint-5")
    return seen


@pytest.mark.slow
def test_trainer_starts_anew(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    assert in_rank(resume_trainer, str(tmp_path), True) == [[None, None], [None, "trial"], [None, None]]


def test_trainer_resumes_in_a_training(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    asked = [["mine/checkpoint-5", None], [True, "trial"], ["mine/checkpoint-5", None]]
    assert in_rank(resume_trainer, str(tmp_path), False) == asked


def load_state(folder: str, quiet: bool) -> str:
    from accelerate import Accelerator

    context, _ = make_context(folder, make_candidate(1, 2), quiet=quiet)
    transformers.install_silence(context)
    try:
        Accelerator(cpu=True).load_state(f"{folder}/nothing")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.few(1)
@pytest.mark.parametrize("quiet", [True, False])
def test_accelerate_loads_nothing_where_it_is_quiet(in_rank: Callable[..., Any], tmp_path: Path, quiet: bool) -> None:
    assert ("does not exist" in in_rank(load_state, str(tmp_path), quiet)) is not quiet
