"""A script's command line: what is taken, and how a candidate gets into it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.job import Script, ScriptProfile
from autotune.script.argument_files import is_ds_config
from autotune.script.carriers import settings
from autotune.script.parse_command import read_command
from autotune.script.script import (
    FLAGS,
    candidate_of_config,
    command,
    command_sets_all,
    config_path,
    heavy_imports,
    training_command,
    with_configs,
    with_flag,
)
from tests.conftest import make_candidate


def make_script(*given: Any) -> Script:
    return read_command(*given).script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}))
    (tmp_path / "data.json").write_text(json.dumps([1, 2]))
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    return tmp_path


# -- what is typed -------------------------------------------------------------------------------------------------------


def test_a_script_is_its_command(folder: Path) -> None:
    script = make_script(["python3", "train.py", "--lr", "1"], ["train_micro_batch_size_per_gpu=--bs"])
    assert script == Script(("train.py", "--lr", "1"), str(folder), (("train_micro_batch_size_per_gpu", "--bs"),))
    assert make_script(["/usr/bin/python", "train.py"], []).argv == ("train.py",)
    assert make_script(["-m", "trl.scripts.sft"], []).argv == ("-m", "trl.scripts.sft")
    worst = make_script(["train.py"], [], True, Path("ds.json"))
    assert (worst.worst_case, worst.ds_config) == (True, str(folder / "ds.json"))


def test_only_the_start_of_a_file_tells_what_it_is(folder: Path) -> None:
    (folder / "embedded.py").write_bytes(b"#" * 4096 + b"\0")
    assert make_script(["embedded.py"], []).name == "embedded"
    (folder / "embedded.py").write_bytes(b"#" * 4095 + b"\0")
    with pytest.raises(UserError, match="no Python script"):
        make_script(["embedded.py"], [])


MAP_EXPECTED = (
    "expected KNOB=--FLAG, like train_micro_batch_size_per_gpu=--batch_size, or KNOB=NAME where the script is "
    "given NAME=VALUE"
)


@pytest.mark.parametrize(
    ("words", "maps", "message"),
    [
        ([], [], "no script after `--`: expected `autotune run … -- train.py its arguments`"),
        (["python"], [], "no script after `--`: expected `autotune run … -- train.py its arguments`"),
        (
            ["train.p"],
            [],
            "no script train.p: expected a Python file, `-m` and a module, or a command that is installed in ",
        ),
        (["gone.py"], [], "no script gone.py: expected a Python file, or `-m` and a module"),
        *(
            ([launcher, "train.py"], [], f"`-- {launcher} …`: give the script itself; autotune starts the ranks (like")
            for launcher in ("mpirun", "srun")
        ),
        (["binary"], [], "binary is no Python script: give the training's .py file"),
        (
            ["ls", "-l"],
            [],
            "`-- ls …`: a command, no script: give what it starts, like `-- train.py …` or `-- -m trl.scripts.sft …`",
        ),
        (["-m"], [], "`-- -m`: expected a module's name after it"),
        (["train.py"], ["bs"], f"--map bs: {MAP_EXPECTED}"),
        (["train.py"], ["zero_stage="], f"--map zero_stage=: {MAP_EXPECTED}"),
        (["train.py"], ["zero_stage=--z=1"], f"--map zero_stage=--z=1: {MAP_EXPECTED}"),
        (
            ["train.py"],
            ["zero_stag=--stage"],
            "--map zero_stag=--stage: unknown knob 'zero_stag'; did you mean zero_stage",
        ),
    ],
)
def test_what_is_no_script(folder: Path, words: list[str], maps: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_script(words, maps)
    assert str(caught.value).startswith(message)


def test_a_config_that_is_none(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_script(["train.py"], [], False, Path("data.json"))
    assert str(caught.value) == "--ds-config data.json: expected a DeepSpeed config JSON"


def test_another_text_is_another_script(folder: Path) -> None:
    before = make_script(["train.py"], []).key
    assert make_script(["train.py", "--lr", "2"], []).key != before
    (folder / "train.py").write_text("print(2)\n")
    assert make_script(["train.py"], []).key != before


AUTO, OF_TRAINER = "transformers.models.auto.modeling_auto", ("transformers.trainer", "transformers.training_args")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n", []),
        ("from peft import x", ["accelerate", "peft"]),
        ("from transformers import Trainer", ["accelerate", AUTO, *OF_TRAINER]),
        ("import transformers\nclass Mine(transformers.Seq2SeqTrainer): ...", ["accelerate", AUTO, *OF_TRAINER]),
        ("import datasets, trl", ["accelerate", "datasets", "transformers.trainer", "trl"]),
        ("import mytransformers\n", []),
    ],
)
def test_modules_are_imported_beforehand_that_the_script_imports(folder: Path, text: str, expected: list[str]) -> None:
    (folder / "train.py").write_bytes(text.encode() + b"# \xff")
    assert heavy_imports(make_script(["train.py"], [])) == expected
    assert heavy_imports(Script(("gone.py",), str(folder))) == []


def test_a_modules_name_tells_what_it_imports() -> None:
    found = heavy_imports(Script(("-m", "trl.scripts.sft"), "."))
    assert {"accelerate", "transformers.trainer", "trl"} <= set(found)
    assert heavy_imports(Script(("-m", "mine.train"), ".")) == []


# -- a candidate on the command line -------------------------------------------------------------------------------------


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


def test_settings_are_the_knobs_that_a_flag_is_known_for() -> None:
    script = Script(("train.py",), ".", (("zero_stage", "--zero"), ("gradient_accumulation_steps", "acc")))
    assert settings(script, make_candidate(2, 4, 3, activation_checkpointing=True)) == {
        "--per_device_train_batch_size": 4,
        "acc": 3,
        "--gradient_checkpointing": True,
        "--zero": 2,
    }


@pytest.mark.parametrize(
    ("argv", "flag", "expected"),
    [
        (["a.py"], "--bs", ["a.py", "--bs", "4"]),
        (["a.py", "--bs", "8", "x"], "--bs", ["a.py", "--bs", "4", "x"]),
        (["a.py", "--bs=8", "--bs=9"], "--bs", ["a.py", "--bs=4", "--bs=4"]),
        (["a.py", "--bs", "8", "--lr", "1", "--bs=9"], "--bs", ["a.py", "--bs", "4", "--lr", "1", "--bs=4"]),
        (["a.py", "--bs", "--other"], "--bs", ["a.py", "--bs=4", "--other"]),
        (["a.py", "--bs"], "--bs", ["a.py", "--bs=4"]),
        (["a.py", "--bs", "-1"], "--bs", ["a.py", "--bs", "4"]),
        # without dashes: an argument `name=value`, as Hydra and OmegaConf read it
        (["a.py", "data.bs", "bs=8"], "data.bs", ["a.py", "data.bs", "bs=8", "data.bs=4"]),
        (["a.py", "data.bs=8", "x", "+data.bs=9"], "data.bs", ["a.py", "data.bs=4", "x", "+data.bs=4"]),
    ],
)
def test_a_flag_is_set_where_it_stands(argv: list[str], flag: str, expected: list[str]) -> None:
    before = list(argv)
    assert with_flag(argv, flag, 4) == expected
    assert argv == before, "the list given is not changed"


@pytest.mark.parametrize("switch", ["--gradient-checkpointing", "--use_gradient_checkpointing"])
def test_a_switch_that_the_winner_needs_off_is_off(folder: Path, switch: str) -> None:
    script = make_script(["train.py", switch, "--lr", "1"], [])
    words = command(script, make_candidate(2, activation_checkpointing=False), "best.json")
    assert words == ["train.py", "--lr", "1"]


def test_a_name_without_dashes_reaches_the_command(folder: Path) -> None:
    script = make_script(["train.py", "model=big", "++data.bs=8"], ["train_micro_batch_size_per_gpu=data.bs"])
    assert command(script, make_candidate(2, 4), "best.json") == ["train.py", "model=big", "++data.bs=4"]


@pytest.mark.parametrize(
    ("argv", "profile", "expected"),
    [
        (["train.py", "--deepspeed", "ds.json"], {}, True),
        (["train.py"], {}, False),
        (["train.py"], {"flags": sorted(FLAGS)}, False),  # its own parser: not told to read a config
        (["train.py", "args.yaml"], {"through_arguments": True}, False),
        (["train.py", "--deepspeed", "ds.json"], {"through_arguments": True}, False),
        (["train.py"], {"through_arguments": True, "flags": sorted(FLAGS)}, True),
        (["train.py"], {"through_arguments": True, "flags": sorted(FLAGS - {"--deepspeed"})}, False),
    ],
)
def test_what_a_command_can_carry(folder: Path, argv: list[str], profile: dict, expected: bool) -> None:
    script = dataclasses.replace(make_script(argv, []), profile=ScriptProfile.from_json(profile))
    assert command_sets_all(script) == expected
    words = command(script, make_candidate(1, 4, 2), "best.json")
    assert ("best.json" in words) == (expected or "ds.json" in argv)


@pytest.mark.parametrize("missing", ["--per_device_train_batch_size", "--gradient_accumulation_steps"])
def test_trainer_has_its_batch_from_its_own_flags(folder: Path, missing: str) -> None:
    profile = {"through_arguments": True, "flags": sorted(FLAGS - {missing})}
    script = dataclasses.replace(make_script(["train.py"], []), profile=ScriptProfile.from_json(profile))
    assert not command_sets_all(script)
    knob = "train_micro_batch_size_per_gpu" if "batch" in missing else "gradient_accumulation_steps"
    assert command_sets_all(dataclasses.replace(script, flags=((knob, "--mine"),))), "another flag was declared for it"


def test_a_config_given_already_is_not_given_twice(folder: Path) -> None:
    script = make_script(["train.py", "--config=ds.json"], [])
    script = dataclasses.replace(script, profile=ScriptProfile(through_arguments=True, flags=["--deepspeed"]))
    assert command(script, make_candidate(1), "best.json") == ["train.py", "--config=best.json"]


def test_every_config_file_is_named_anew(folder: Path) -> None:
    argv = ("train.py", "--a=ds.json", "ds.json", "data.json", "nothing.json", "--a=b=ds.json")
    seen: list[tuple[Path, int]] = []

    def renamed(path: Path, at: int) -> str:
        seen.append((path, at))
        return f"{at}.json"

    assert with_configs(argv, folder, renamed) == [
        "train.py",
        "--a=1.json",
        "2.json",
        "data.json",
        "nothing.json",
        "--a=b=ds.json",
    ]
    assert seen == [(folder / "ds.json", 1), (folder / "ds.json", 2)]


def test_where_the_config_stands(folder: Path) -> None:
    assert config_path(make_script(["train.py", "--x=ds.json"], [])) == folder / "ds.json"
    assert config_path(make_script(["train.py"], [])) is None
    assert config_path(make_script(["train.py"], [], False, Path("ds.json"))) == folder / "ds.json"


# -- without autotune ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ds_config", "profile", "expected"),
    [
        (None, {}, ["torchrun", "--nproc-per-node", "2"]),
        (None, {"flags": ["--local_rank"]}, ["deepspeed", "--num_gpus", "2"]),  # it wants its rank as an argument
        (None, {"flags": ["--local-rank"]}, ["deepspeed", "--num_gpus", "2"]),
        (None, {"flags": ["--local_rank"], "through_arguments": True}, ["torchrun", "--nproc-per-node", "2"]),
        (
            "own.json",
            {},
            ["accelerate", "launch", "--num_processes", "2", "--deepspeed_config_file", "best.json", "--use_deepspeed"],
        ),
    ],
)
def test_what_starts_its_ranks(ds_config: str | None, profile: dict, expected: list[str]) -> None:
    script = Script(("train.py",), ".", ds_config=ds_config, profile=ScriptProfile.from_json(profile))
    assert training_command(script, make_candidate(), 2, "best.json") == [*expected, "train.py"]


# -- configs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '{"zero_optimization": {}}', True),
        ("a.json", '{"train_micro_batch_size_per_gpu": "auto"}', True),
        ("a.json", '{"output_dir": "out", "gradient_accumulation_steps": 2}', False),  # TrainingArguments
        ("a.json", '["train_batch_size"]', False),
        ("a.json", "{", False),
        ("a.json", '{\n  // ours\n  "train_batch_size": 8, # all ranks\n}', True),
        ("a.hjson", "zero_optimization: {stage: 2}", True),
        ("a.json", '{\n  // arguments\n  "gradient_accumulation_steps": 2,\n}', False),
        ("a.json", '{"train_batch_size": 8}\n{"train_batch_size": 8}', False),  # lines of data
        ("a.yaml", "train_batch_size: 8", False),
        ("a.json", None, False),
    ],
)
def test_what_is_a_deepspeed_config(tmp_path: Path, name: str, text: str | None, expected: bool) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert is_ds_config(tmp_path / name) is expected


def test_a_file_of_data_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look of every rank would parse it."""
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"train_batch_size": 8, "data": "x" * 1000}))
    assert is_ds_config(data)
    data.write_text(json.dumps({"train_batch_size": 8, "data": "x" * (1 << 20)}))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("it was read"))
    assert not is_ds_config(data)


def test_a_config_as_a_candidate() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
    }
    assert candidate_of_config(config) == Candidate.of(
        {
            "gradient_accumulation_steps": 4,
            "zero_stage": 2,
            "reduce_bucket_size": 500_000_000,
            "offload_optimizer": "cpu",
        }
    )
    assert candidate_of_config({}).as_dict == {"zero_stage": 0}


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        (["--gc", "--lr", "1"], True, ["--gc", "--lr", "1"]),
        (["--gc", "False", "x"], True, ["--gc", "True", "x"]),
        (["--gc=False"], True, ["--gc=True"]),
        (["--gc", "--lr", "1", "--gc"], False, ["--lr", "1"]),
        (["--gc", "on", "x"], False, ["--gc", "off", "x"]),
        (["--gc", "0"], True, ["--gc", "1"]),
        (["--gc", "yes"], True, ["--gc", "yes"]),
        (["--gc=2"], True, ["--gc=True"]),
    ],
)
def test_a_switch_takes_no_value(words: list[str], value: bool, expected: list[str]) -> None:
    assert with_flag(words, "--gc", value) == expected


def test_deepspeeds_launcher_is_told_the_gpus_that_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --num_gpus it would take the first of the machine's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    script = make_script(["deepspeed", "train.py"], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert training_command(script, make_candidate(), 2, "best.json")[:3] == ["deepspeed", "--include", "localhost:2,3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert training_command(script, make_candidate(), 2, "best.json")[:3] == ["deepspeed", "--num_gpus", "2"]
