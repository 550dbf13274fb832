"""A script's command line: what is taken, and how a candidate gets into it."""

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.script import (
    FLAGS,
    candidate_of_config,
    carried,
    command,
    is_ds_config,
    make_script,
    starter,
    with_flag,
)
from tests.conftest import make_candidate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}))
    (tmp_path / "data.json").write_text(json.dumps([1, 2]))
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    return tmp_path


def test_a_script_is_its_command(folder: Path) -> None:
    script = make_script(["python", "train.py", "--lr", "1"], ["train_micro_batch_size_per_gpu=--bs"])
    assert script.argv == ("train.py", "--lr", "1")
    assert script.name == "train"
    assert script.path == folder / "train.py"
    assert script.flags == (("train_micro_batch_size_per_gpu", "--bs"),)
    assert make_script(["-m", "trl.scripts.sft"], []).name == "sft"


@pytest.mark.parametrize(
    ("words", "maps", "text"),
    [
        ([], [], "no script"),
        (["train.p"], [], "no script train.p"),
        (["torchrun", "train.py"], [], "the script itself"),
        (["binary"], [], "no Python script"),
        (["ls", "-l"], [], "a command, no script"),
        (["-m"], [], "module"),
        (["train.py"], ["bs"], "KNOB=--FLAG"),
        (["train.py"], ["zero_stag=--stage"], "zero_stage"),
    ],
)
def test_what_is_no_script(folder: Path, words: list[str], maps: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        make_script(words, maps)


def test_another_text_is_another_script(folder: Path) -> None:
    before = make_script(["train.py"], []).key
    assert make_script(["train.py", "--lr", "2"], []).key != before
    (folder / "train.py").write_text("print(2)\n")
    assert make_script(["train.py"], []).key != before


def test_the_command_of_a_candidate(folder: Path) -> None:
    script = make_script(
        ["train.py", "--deepspeed", "ds.json", "--per_device_train_batch_size=8", "--data", "data.json"],
        ["gradient_accumulation_steps=--accumulate"],
    )
    words = command(script, make_candidate(2, 4, 2, activation_checkpointing=True), "best.json")
    assert words == [
        "train.py",
        "--deepspeed",
        "best.json",
        "--per_device_train_batch_size=4",
        "--data",
        "data.json",
        "--accumulate",
        "2",
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a.py"], ["a.py", "--bs", "4"]),
        (["a.py", "--bs", "8", "x"], ["a.py", "--bs", "4", "x"]),
        (["a.py", "--bs=8"], ["a.py", "--bs=4"]),
        (["a.py", "--bs", "--other"], ["a.py", "--bs=4", "--other"]),
    ],
)
def test_a_flag_is_set_where_it_stands(argv: list[str], expected: list[str]) -> None:
    assert with_flag(argv, "--bs", 4) == expected


def test_a_name_without_dashes_is_an_argument_of_its_own(folder: Path) -> None:
    script = make_script(["train.py", "model=big", "++data.bs=8"], ["train_micro_batch_size_per_gpu=data.bs"])
    assert command(script, make_candidate(2, 4), "best.json") == ["train.py", "model=big", "++data.bs=4"]
    assert with_flag(["train.py"], "data.bs", 4) == ["train.py", "data.bs=4"]


@pytest.mark.parametrize(
    ("argv", "profile", "expected"),
    [
        (["train.py", "--deepspeed", "ds.json"], {}, True),
        (["train.py"], {}, False),
        (["train.py", "args.yaml"], {"through_arguments": True}, False),
        (["train.py", "--deepspeed", "ds.json"], {"through_arguments": True}, False),
        (["train.py"], {"through_arguments": True, "flags": sorted(FLAGS)}, True),
    ],
)
def test_what_a_command_can_carry(folder: Path, argv: list[str], profile: dict, expected: bool) -> None:
    script = dataclasses.replace(make_script(argv, []), profile=profile)
    assert carried(script) == expected
    words = command(script, make_candidate(1, 4, 2), "best.json")
    assert ("best.json" in words) == (expected or "ds.json" in argv)


def test_a_script_that_wants_its_rank_is_started_by_deepspeed(folder: Path) -> None:
    script = make_script(["train.py", "--deepspeed", "ds.json"], [])
    assert starter(script, 2, "best.json")[0] == "torchrun"
    wants = dataclasses.replace(script, profile={"flags": ["--local_rank"]})
    assert starter(wants, 2, "best.json") == ["deepspeed", "--num_gpus", "2"]


def test_what_is_a_deepspeed_config(folder: Path) -> None:
    assert is_ds_config(folder / "ds.json")
    assert not is_ds_config(folder / "data.json")
    (folder / "args.json").write_text('{"output_dir": "out", "gradient_accumulation_steps": 2}')
    assert not is_ds_config(folder / "args.json"), "TrainingArguments"
    assert not is_ds_config(folder / "train.py")
    assert not is_ds_config(folder / "nothing.json")


def test_a_config_as_a_candidate() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
    }
    found = candidate_of_config(config)
    assert found == Candidate.of(
        {
            "gradient_accumulation_steps": 4,
            "zero_stage": 2,
            "reduce_bucket_size": 500_000_000,
            "offload_optimizer": "cpu",
        }
    )
