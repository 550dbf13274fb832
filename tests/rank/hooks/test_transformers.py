import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.rank.hooks import transformers
from autotune.rank.sandbox import Protection, Sandbox
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context

NOTED = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "torch_compile",
    "dataloader_num_workers",
    "use_cpu",
    "auto_find_batch_size",
    "output_dir",
    "report_to",
    "save_strategy",
    "eval_strategy",
    "load_best_model_at_end",
    "push_to_hub",
    "resume_from_checkpoint",
)


def fill(folder: str, candidate: dict[str, Any] | None, quiet: bool) -> dict[str, Any]:
    """TrainingArguments of a script, with a field of TRL's, as they come out of the hook."""
    from transformers import TrainingArguments, integrations

    @dataclass
    class Arguments(TrainingArguments):
        max_length: int | None = 48

    context, watcher = make_context(folder, Candidate.of(candidate) if candidate else None, quiet=quiet)
    transformers.install(context)
    integrations.is_kubeflow_available = lambda: True  # as in one of its jobs, since transformers 5
    made = Arguments(
        output_dir="mine",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=5,
        auto_find_batch_size=True,
        save_strategy="steps",
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        load_best_model_at_end=True,
        resume_from_checkpoint="mine/checkpoint-5",
    )
    found = {name: value for name, value in asdict(made).items() if name in NOTED}
    context.patches.close()
    plain = Arguments(output_dir="mine", per_device_train_batch_size=2, use_cpu=True)
    return {
        **found,
        "planned": watcher.of("planned"),
        "allowed": context.allowed_tokens,
        "through": context.through_arguments,
        "levers": sorted(context.levers),
        "undone": plain.per_device_train_batch_size,
    }


def test_arguments_carry_the_candidate_and_leave_nothing_behind(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    candidate = make_candidate(1, 8, 4, activation_checkpointing=True, compile=True, dataloader_num_workers=3)
    found = in_rank(fill, str(tmp_path), candidate.as_dict, True)
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (8, 4)
    assert found["gradient_checkpointing"]
    assert (found["torch_compile"], found["dataloader_num_workers"]) == (True, 3)
    assert found["use_cpu"]
    assert found["output_dir"] == "mine"
    assert (found["save_strategy"], found["eval_strategy"]) == ("steps", "steps"), "callbacks ask for them"
    assert found["load_best_model_at_end"]
    assert found["report_to"] == []
    assert found["resume_from_checkpoint"] is None
    assert not found["auto_find_batch_size"], "it would catch the out-of-memory"
    assert found["planned"] == [[8, 4]]
    assert found["allowed"] == [48]
    assert found["through"]
    assert found["undone"] == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("quiet", [True, False])
def test_a_script_as_it_is_keeps_its_batch(in_rank: Callable[..., Any], tmp_path: Path, quiet: bool) -> None:
    found = in_rank(fill, str(tmp_path), None, quiet)
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (2, 5)
    assert not (found["gradient_checkpointing"])
    assert not (found["torch_compile"])
    assert found["levers"] == ["compile", "dataloader_num_workers", "liger_kernel"]
    assert found["planned"] == [[2, 5]]
    assert not found["auto_find_batch_size"]


def test_a_real_training_keeps_what_it_saves(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(fill, str(tmp_path), make_candidate(1, 8, 4).as_dict, False)
    assert found["per_device_train_batch_size"] == 8
    assert (found["output_dir"], found["save_strategy"], found["eval_strategy"]) == ("mine", "steps", "steps")
    assert found["load_best_model_at_end"]
    assert found["resume_from_checkpoint"] == "mine/checkpoint-5"


def resume(folder: str, candidate: dict[str, Any] | None) -> list[int]:
    """The micro-batch of a saved state as Trainer gets it, with the hook and after it is undone."""
    from transformers import TrainerState

    context, _ = make_context(folder, Candidate.of(candidate) if candidate else None)
    transformers.install(context)
    TrainerState(train_batch_size=4).save_to_json(f"{folder}/state.json")
    found = [TrainerState.load_from_json(f"{folder}/state.json").train_batch_size]
    context.patches.close()
    return [*found, TrainerState.load_from_json(f"{folder}/state.json").train_batch_size]


def test_a_checkpoint_does_not_bring_its_micro_batch_along(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    """Trainer before transformers 5.2 trained on with it, at another global batch."""
    assert in_rank(resume, str(tmp_path), make_candidate(1, 2, 4).as_dict) == [2, 4]
    assert in_rank(resume, str(tmp_path), None) == [4, 4]


def write_there(folder: str, output: str, below: str) -> dict[str, Any]:
    """A script that writes into its output folder before there is a Trainer, in a trial's folder that shows the user's."""
    from transformers import TrainingArguments

    cwd = Path(folder, "project")
    sandbox = Sandbox(Path(folder, "trial"), cwd, Protection.LANDLOCK)
    sandbox.create(Path(folder, "study"))
    context, _ = make_context(sandbox.files, make_candidate(1, 2), cwd=str(cwd))
    context.sandbox = sandbox
    transformers.install(context)
    os.makedirs(sandbox.script_cwd / below, exist_ok=True)
    os.chdir(sandbox.script_cwd / below)
    found = TrainingArguments(output_dir=output, use_cpu=True).output_dir
    again = TrainingArguments(output_dir=output, use_cpu=True).output_dir
    assert found is not None
    seen = sorted(os.listdir(found)) if os.path.isdir(found) else None
    if seen is not None:
        Path(found, "vocab.json").write_text("{}")
        assert Path(found, "old.json").read_text() == "old"
    at = os.path.abspath(found).removeprefix(f"{sandbox.script_cwd}/").removeprefix(f"{sandbox.folder}/")
    return {"at": at, "seen": seen, "same": found == again}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("output", "below", "at"),
    [("out", "", "out"), ("../out", "sub", "out"), ("/elsewhere", "", "files/.autotune-output")],
)
def test_the_output_folder_shows_what_it_holds(
    in_rank: Callable[..., Any], tmp_path: Path, output: str, below: str, at: str
) -> None:
    theirs = [tmp_path / "project" / "out", tmp_path / "elsewhere"]
    for one in theirs:
        one.mkdir(parents=True)
        (one / "old.json").write_text("old")
    given = f"{tmp_path}{output}" if output[0] == "/" else output
    assert in_rank(write_there, str(tmp_path), given, below) == {"at": at, "seen": ["old.json"], "same": True}
    assert [sorted(os.listdir(one)) for one in theirs] == [["old.json"], ["old.json"]]


@pytest.mark.slow
def test_an_output_folder_that_is_not_there_is_not_made(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    """A script may ask whether it is."""
    (tmp_path / "project").mkdir()
    assert in_rank(write_there, str(tmp_path), "out", "") == {"at": "out", "seen": None, "same": True}


def train_with_the_first() -> list[Any]:
    """Return the batch that is known of two arguments, of which a Trainer uses the first."""
    import transformers as library

    library.Trainer.train = lambda trainer, *args, **kwargs: None
    context, watcher = make_context(quiet=True)
    transformers.install(context)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    mine = library.TrainingArguments(output_dir="mine", use_cpu=True, **sizes)
    library.TrainingArguments(output_dir="unused", use_cpu=True)
    library.Trainer.train(SimpleNamespace(args=mine))
    return [context.said, watcher.of("planned")[-1]]


def test_only_the_arguments_that_the_trainer_uses_count(in_rank: Callable[..., Any]) -> None:
    said, planned = in_rank(train_with_the_first)
    assert said == {"train_micro_batch_size_per_gpu": [4], "gradient_accumulation_steps": [4]}
    assert planned == [4, 4]
