"""Tasks and images on the command line: what is refused, and a study of an encoder from the first trial to its files."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from autotune.commands.request import Request
from autotune.commands.run import run_study
from autotune.commands.setup import plan_setups
from autotune.commands.study_output import record_study
from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.results.export import training_changes
from autotune.search.study import StudyStore
from benchmarks.search.replay import load_replay_table
from tests.conftest import make_job


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"model": "tiny-bert", "task": "seq2seq"},
            "--task seq2seq: transformers has no such head for tiny-bert (bert); it has causal-lm, ",
        ),
        ({"model": "tiny-bert", "task": "x"}, "--task x: expected one of causal-lm, "),
        ({"model": "qwen2.5-vl-7b"}, "the configuration of qwen2.5-vl-7b names no image size: give --image-size"),
        (
            {"model": "tiny-llava", "image_size": 224},
            "--image-size 224: tiny-llava has a fixed image size of 56 pixels",
        ),
        (
            {"model": "tiny-llama", "image_size": 224},
            "--image-size 224: tiny-llama has no image input with --task causal-lm",
        ),
        ({"model": "roberta-base", "seq_len": "514"}, "--seq-len 514: roberta-base takes at most 512 tokens"),
        ({"workload": "json:loads", "task": "causal-lm"}, "--task cannot be combined with --workload"),
    ],
)
def test_what_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_setups(Request(**asked), ["a100-80gb"])  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("tiny-bert", "classification"),
        ("roberta-base", "masked-lm"),
        ("t5-large", "seq2seq"),
        ("tiny-llava", "image-text"),
    ],
)
def test_the_configuration_says_the_task(model: str, task: str) -> None:
    (setup,) = plan_setups(Request(model=model, seq_len="64"), ["a100-80gb"])
    assert setup.job.task == task


@pytest.mark.slow
def test_a_study_of_an_encoder(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(
        "about: two stages\nknobs:\n  zero_stage: [0, 2]\n  train_micro_batch_size_per_gpu: [2]\n"
        "  gradient_accumulation_steps: [1]\n"
    )
    request = Request(
        model="tiny-bert",
        gpus=2,
        device="cpu",
        seq_len="32",
        budget="5m",
        space=str(space),
        runs=tmp_path,
        max_trials=1,
    )
    summary = run_study(request, Console(quiet=True), quiet=True)
    store = StudyStore.load(str(next(path.parent for path in tmp_path.rglob("study.db"))), None)
    assert store.job.task == "classification"
    assert summary.files
    table, about, _ = record_study(str(store.folder), None, None)
    assert json.loads(about.read_text())["task"] == "classification"
    assert load_replay_table(table).job().task == "classification"


def test_what_the_training_must_do() -> None:
    candidate = Candidate.of({"zero_stage": 0})
    assert any(
        "head for seq2seq" in line
        for line in training_changes(candidate, make_job(model="tiny-t5", task="seq2seq"), {})
    )
    assert not any("head for" in line for line in training_changes(candidate, make_job(), {}))
