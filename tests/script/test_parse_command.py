"""What is typed after `--`: programs, launchers and their files, as one Script; and the command that carries a winner."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.job import Script, ScriptProfile
from autotune.script.argument_files import with_copies
from autotune.script.argument_writer import winners_files, write_trial_files
from autotune.script.command_line import framework_of
from autotune.script.parse_command import read_command
from autotune.script.script import command_sets_all, config_path, training_command, typed_words, variables_for
from tests.conftest import make_candidate, make_job

DS = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
ARGUMENTS = """\
# mine
model_name_or_path: tiny
deepspeed: ds.json   # stage 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
output_dir: out
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED   # on one machine
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 2
  zero3_init_flag: false
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


def make_script(*given: Any) -> Script:
    return read_command(*given).script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    for name in ("NPROC_PER_NODE", "NNODES", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("train.py", "mine.py"):
        (tmp_path / name).write_text("print(1)\n")
    (tmp_path / "ds.json").write_text(f"{json.dumps(DS)}  # as DeepSpeed reads it")
    (tmp_path / "x.yaml").write_text(ARGUMENTS)
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    return tmp_path


@pytest.fixture
def programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with installed commands; its Python."""
    bin_folder = folder / "env" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("llamafactory-cli", "swift", "axolotl", "trl", "mine"):
        program = bin_folder / name
        program.write_text(f"#!{bin_folder}/python3.11\nfrom {name.replace('-', '_')} import main\nmain()\n")
        program.chmod(0o755)
    python = bin_folder / "python3.11"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))  # ranks run there
    return python


# -- programs ------------------------------------------------------------------------------------------------------------


def test_an_installed_command_is_a_script(programs: Path) -> None:
    script = make_script(["llamafactory-cli", "train", "x.yaml"], [])
    assert script.program == str(programs.parent / "llamafactory-cli")
    assert (script.name, script.path) == ("llamafactory-cli", programs.parent / "llamafactory-cli")
    assert script.arguments == ("train", "x.yaml")
    assert [file.at for file in script.files] == [2]
    assert config_path(script) == Path.cwd() / "ds.json"
    assert Script.from_json(json.loads(json.dumps(dataclasses.asdict(script)))) == script
    assert make_job(script=script) == type(make_job()).from_json(
        json.loads(json.dumps(make_job(script=script).to_json()))
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["lmf", "train"],
            "no script lmf: expected a Python file, `-m` and a module, or a command that is installed in ",
        ),
        (["torchrun", "-m", "nothing.train"], "`-- -m nothing.train …`: no module nothing here, nor in "),
        (["torchrun", "mine"], "no script mine: expected a Python file, or `-m` and a module"),
    ],
)
def test_what_is_no_program(programs: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_script(words, [])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# -- ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        ("train.py", None, ""),
        ("torchrun --nproc-per-node 3 train.py", 3, "torchrun --nproc-per-node 3"),
        ("accelerate launch --config_file acc.yaml train.py", 2, "acc.yaml: num_processes: 2"),
        ("accelerate launch --config_file acc.yaml --num_processes 3 train.py", 3, "--num_processes 3"),
        ("NPROC_PER_NODE=4 swift sft x.yaml", 4, "NPROC_PER_NODE=4"),
        ("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", None, ""),
        ("NPROC_PER_NODE=4 trl sft --config x.yaml", None, ""),
        ("trl sft --config x.yaml --num_processes 2", 2, "--num_processes 2"),
        ("axolotl train x.yaml --num-processes=2", 2, "--num-processes 2"),
        ("axolotl train x.yaml --launcher torchrun -- --nproc_per_node 2", 2, "--nproc_per_node 2"),
    ],
)
def test_how_many_ranks(programs: Path, words: str, ranks: int | None, said: str) -> None:
    found = read_command(words.split(), [])
    assert found.ranks == ranks
    assert found.ranks_source.endswith(said)


def test_accelerates_default_file(folder: Path) -> None:
    (folder / "cache/accelerate").mkdir(parents=True)
    (folder / "cache/accelerate/default_config.yaml").write_text(ACCELERATE)
    found = read_command(["accelerate", "launch", "train.py"], [])
    assert found.ranks == 2
    assert [file.launcher for file in found.script.files] == [True]


def test_variables_of_the_command(folder: Path) -> None:
    found = read_command(["CUDA_VISIBLE_DEVICES=5", "A=1", "deepspeed", "--include", "localhost:2,3", "train.py"], [])
    assert found.variables == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert found.script.environment == (("CUDA_VISIBLE_DEVICES", "5"), ("A", "1"))


def test_variables_that_the_scripts_code_sets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over those in front of it, as when it runs."""
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    (folder / "train.py").write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nos.environ.setdefault('HF_HOME', '/own')\n"
        "os.environ.setdefault('HF_ENDPOINT', 'https://a')\nos.environ.setdefault('NCCL_ALGO', 'Ring')\n"
    )
    found = read_command(["NCCL_ALGO=Tree", "deepspeed", "--include", "localhost:2,3", "train.py"], [])
    assert found.own == {"CUDA_VISIBLE_DEVICES": "1", "HF_ENDPOINT": "https://a"}
    assert found.variables == {"NCCL_ALGO": "Tree", **found.own}
    assert found.script.environment == (("NCCL_ALGO", "Tree"),), (
        "the printed command needs no other: the script sets them"
    )
    assert read_command(["-m", "json.tool"], []).own == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "accelerate launch --config_file two.yaml train.py",
            "two.yaml: num_machines: 2: trainings over several nodes",
        ),
        ("accelerate launch --config_file gone.yaml train.py", "accelerate --config_file gone.yaml: no such file"),
        ("NNODES=2 swift sft x.yaml", "NNODES=2: trainings over several nodes"),
        ("train.py broken.yaml", "broken.yaml:2: not YAML ("),
        ("train.py --config broken.json", "broken.json:2: not JSON ("),
        ("accelerate launch --config_file broken.yaml train.py", "broken.yaml:2: not YAML ("),
    ],
)
def test_bad_input(programs: Path, words: str, message: str) -> None:
    Path("two.yaml").write_text("num_machines: 2\n")
    Path("broken.yaml").write_text("a: 1\nb: [\n")
    Path("broken.json").write_text('{"a": 1,\n"b": }')
    with pytest.raises(UserError) as caught:
        read_command(words.split(), [])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_files_that_hold_data(folder: Path) -> None:
    (folder / "rows.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    (folder / "broken.json").write_text('{"a": 1,\n"b": }')
    (folder / "other.yaml").write_text("names: [a, b]\n")
    script = make_script(["train.py", "rows.json", "--data", "broken.json", "other.yaml", "--deepspeed", "ds.json"], [])
    assert script.files == ()


def test_another_text_of_a_file_is_another_script(folder: Path) -> None:
    before = make_script(["train.py", "x.yaml"], []).key
    (folder / "x.yaml").write_text(ARGUMENTS + "seed: 1\n")
    assert make_script(["train.py", "x.yaml"], []).key != before


# -- candidates in files -------------------------------------------------------------------------------------------------

WINNER = make_candidate(2, 8, 1, activation_checkpointing=True)


def trained(words: str, **profile: object) -> tuple[Script, list[str], dict[str, dict]]:
    """The script, the command that trains with WINNER, and the files beside its config."""
    made = make_script(words.split(), [])
    script = dataclasses.replace(made, profile=ScriptProfile.from_json(profile))
    files = {path.name: yaml.safe_load(text) for path, text in winners_files(script, WINNER, Path("best.json")).items()}
    return script, training_command(script, WINNER, 2, "best.json"), files


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python train.py x.yaml", "torchrun --nproc-per-node 2 train.py COPY"),
        ("train.py --config=x.yaml", "torchrun --nproc-per-node 2 train.py --config=COPY"),
        (
            "torchrun --standalone train.py --config x.yaml",
            "torchrun --standalone --nproc-per-node 2 train.py --config COPY",
        ),
        ("torchrun --nproc_per_node=2 -m mine x.yaml", "torchrun --nproc_per_node=2 -m mine COPY"),
        ("deepspeed --include localhost:0,1 train.py x.yaml", "deepspeed --include localhost:0,1 train.py COPY"),
        ("deepspeed --module mine x.yaml", "deepspeed --num_gpus 2 --module mine COPY"),
        (
            "accelerate launch -m axolotl.cli.train x.yaml",
            "accelerate launch --num_processes 2 -m axolotl.cli.train COPY",
        ),
        ("mine x.yaml", "torchrun --no-python --nproc-per-node 2 mine COPY"),
        ("llamafactory-cli train x.yaml", "llamafactory-cli train COPY"),
        ("swift sft x.yaml", "swift sft COPY"),
        ("axolotl train x.yaml", "axolotl train COPY -- --use_deepspeed --num_processes 2"),
        ("axolotl train x.yaml --num-processes 2", "axolotl train COPY --num-processes 2 -- --use_deepspeed"),
        (
            "axolotl train x.yaml --launcher torchrun -- --nproc_per_node 2",
            "axolotl train COPY --launcher torchrun -- --nproc_per_node 2",
        ),
        ("trl sft --config x.yaml", "trl sft --config COPY --use_deepspeed --num_processes 2"),
        (
            "trl sft --config x.yaml --accelerate_config zero2 --num_processes 2",
            "trl sft --config COPY --num_processes 2 --use_deepspeed",
        ),
    ],
)
def test_the_winner_in_the_same_form(programs: Path, words: str, expected: str) -> None:
    Path("axolotl").mkdir()  # a module that can be found
    script, command, files = trained(words, through_arguments=True)
    copy = files["best.argument.x.yaml"]
    assert command == expected.replace("COPY", str(Path.cwd() / "best.argument.x.yaml")).split()
    assert copy["deepspeed"] == str(Path.cwd() / "best.json")
    assert (copy["per_device_train_batch_size"], copy["gradient_accumulation_steps"]) == (8, 1)
    assert copy["model_name_or_path"] == "tiny"
    assert command_sets_all(script)
    assert typed_words(script) == [word for word in words.split() if word != "python"]


def test_the_user_s_own_lines_stay(folder: Path) -> None:
    script, _, _ = trained("train.py x.yaml", through_arguments=True)
    (text,) = winners_files(script, WINNER, Path("best.json")).values()
    changed = ARGUMENTS.replace("size: 2", "size: 8").replace("steps: 4", "steps: 1")
    best = Path.cwd() / "best.json"
    expected = changed.replace("deepspeed: ds.json ", f"deepspeed: {best} ") + "gradient_checkpointing: true\n"
    assert re.sub(r" +#", " #", text) == re.sub(r" +#", " #", expected), (
        "ruamel.yaml may move a comment within its line"
    )


def test_a_config_inside_the_file_stays_there(folder: Path) -> None:
    (folder / "x.yaml").write_text(f"output_dir: out\ndeepspeed: {DS}\n")
    (folder / "best.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert trained("train.py x.yaml")[2]["best.argument.x.yaml"]["deepspeed"] == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}),
        ("swift sft x.yaml", {"NPROC_PER_NODE": "2"}),
        ("trl sft --config x.yaml", {}),
        ("A=1 train.py x.yaml", {"A": "1"}),
    ],
)
def test_variables_of_the_printed_command(programs: Path, words: str, environment: dict) -> None:
    assert variables_for(make_script(words.split(), []), WINNER, 2) == environment


def test_llamafactory_switches_checkpointing_off_by_a_name_of_its_own(programs: Path) -> None:
    _, _, files = trained("llamafactory-cli train x.yaml")
    assert files["best.argument.x.yaml"]["disable_gradient_checkpointing"] is False
    assert "gradient_checkpointing" not in files["best.argument.x.yaml"]


def test_axolotls_names(programs: Path) -> None:
    Path("a.yml").write_text(
        "base_model: tiny\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\ndeepspeed: ds.json\n"
    )
    _, _, files = trained("axolotl train a.yml")
    copy = files["best.argument.a.yml"]
    assert (copy["micro_batch_size"], copy["gradient_accumulation_steps"], copy["gradient_checkpointing"]) == (
        8,
        1,
        True,
    )
    assert "per_device_train_batch_size" not in copy


def test_names_below_others_and_declared_ones(folder: Path) -> None:
    (folder / "y.yaml").write_text("train:\n  per_device_train_batch_size: 2\nmine:\n  steps: 3\n  ds: ds.json\n")
    script = make_script(["train.py", "y.yaml"], ["gradient_accumulation_steps=mine.steps"])
    (text,) = winners_files(script, WINNER, Path("best.json")).values()
    assert yaml.safe_load(text) == {
        "train": {"per_device_train_batch_size": 8},
        "mine": {"steps": 1, "ds": str(folder / "best.json")},
    }
    assert training_command(script, WINNER, 2, "best.json")[-1] == str(folder / "best.argument.y.yaml")
    assert command_sets_all(script)


def test_arguments_beside_a_file_win(folder: Path) -> None:
    words = "train.py x.yaml --per_device_train_batch_size 2 trainer.gradient_accumulation_steps=4"
    _, command, files = trained(words, through_arguments=True)
    assert command[-3:] == ["--per_device_train_batch_size", "8", "trainer.gradient_accumulation_steps=1"]
    assert files["best.argument.x.yaml"]["per_device_train_batch_size"] == 2


def test_accelerates_own_file(folder: Path) -> None:
    script, command, files = trained("accelerate launch --config_file acc.yaml train.py")
    copy = folder / "best.launcher.acc.yaml"
    assert command == [
        *("accelerate", "launch", "--config_file", str(copy)),
        *("--mixed_precision", "bf16", "--gradient_accumulation_steps", "1", "train.py"),
    ]
    assert files["best.launcher.acc.yaml"] == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero3_init_flag": False, "deepspeed_config_file": str(folder / "best.json")},
        "num_machines": 1,
        "num_processes": 2,
    }
    assert command_sets_all(script)


def test_trainer_under_accelerates_own_file(folder: Path) -> None:
    (folder / "y.yaml").write_text("per_device_train_batch_size: 2\n")
    words = "accelerate launch --config_file acc.yaml train.py --config y.yaml"
    _, _, files = trained(words, through_arguments=True)
    assert "deepspeed" not in files["best.argument.y.yaml"], "the launcher's file names it"
    assert files["best.launcher.acc.yaml"]["deepspeed_config"]["deepspeed_config_file"] == str(folder / "best.json")


@pytest.mark.parametrize(
    ("words", "relaunched", "expected"),
    [
        ("train.py x.yaml", 2, "python train.py COPY"),
        ("mine x.yaml", 1, "mine COPY"),
        ("-m trl.cli sft --config x.yaml", 1, "python -m trl.cli sft --config COPY --use_deepspeed --num_processes 2"),
        ("-m trl.scripts.sft --config x.yaml", 0, "torchrun --nproc-per-node 2 -m trl.scripts.sft --config COPY"),
    ],
)
def test_what_starts_its_ranks_itself(programs: Path, words: str, relaunched: int, expected: str) -> None:
    _, command, _ = trained(words, through_arguments=True, relaunched=relaunched)
    assert command == expected.replace("COPY", str(Path.cwd() / "best.argument.x.yaml")).split()


def test_accelerates_flags(folder: Path) -> None:
    words = (
        "accelerate launch --use_deepspeed --zero_stage 2 --gradient_accumulation_steps 4 --num_processes 2 train.py"
    )
    _, command, files = trained(words)
    assert files == {}
    assert command == [
        *("accelerate", "launch", "--use_deepspeed", "--zero_stage", "2", "--gradient_accumulation_steps", "1"),
        *("--num_processes", "2", "--deepspeed_config_file", "best.json", "train.py"),
    ]
    script = make_script(words.split(), [])
    script = dataclasses.replace(script, profile=ScriptProfile(loop_accumulates=True))
    command = training_command(script, make_candidate(2, 2, 4), 2, "best.json")
    assert command[command.index("--gradient_accumulation_steps") + 1] == "1", "the loop sums, and the engine must not"
    named = make_script(["accelerate", "launch", "--deepspeed_config_file", "ds.json", "train.py"], [])
    assert config_path(named) == folder / "ds.json"
    _, command, _ = trained("accelerate launch --deepspeed_config_file ds.json train.py --deepspeed")
    assert "best.json" in command, "the script's own flag is a switch"


def test_what_accelerates_command_says_is_not_said_again(folder: Path) -> None:
    words = "accelerate launch --config_file acc.yaml --mixed_precision fp16 --num_processes 2 train.py"
    _, command, _ = trained(words)
    assert command[:4] == ["accelerate", "launch", "--config_file", str(folder / "best.launcher.acc.yaml")]
    assert command[4:] == [
        *("--mixed_precision", "fp16", "--num_processes", "2"),
        *("--gradient_accumulation_steps", "1", "train.py"),
    ]
    (folder / "acc.yaml").write_text(ACCELERATE.replace("bf16", "'no'"))
    assert "--mixed_precision" not in trained("accelerate launch --config_file acc.yaml train.py")[1]
    (folder / "acc.yaml").write_text(ACCELERATE.replace("mixed_precision: bf16\n", ""))
    assert "--mixed_precision" not in trained("accelerate launch --config_file acc.yaml train.py")[1]


def test_a_launcher_that_says_no_ranks_or_others_is_told_them(folder: Path) -> None:
    use = ["--deepspeed_config_file", "best.json", "--use_deepspeed"]
    _, command, _ = trained("accelerate launch train.py")
    assert sorted(command) == sorted(["accelerate", "launch", "--num_processes", "2", *use, "train.py"])
    assert trained("torchrun train.py")[1][:3] == ["torchrun", "--nproc-per-node", "2"]
    assert trained("torchrun --nproc_per_node=4 train.py")[1][:2] == ["torchrun", "--nproc_per_node=2"]
    named = "deepspeed --include localhost:2,3 train.py --deepspeed ds.json"
    assert trained(named)[1][:3] == ["deepspeed", "--include", "localhost:2,3"]


# -- a trial's copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidate", [Candidate(()), WINNER])
def test_a_trial_reads_a_copy(folder: Path, candidate: Candidate) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/x.yaml").write_text(ARGUMENTS)
    (folder / "sub/beside.txt").write_text("here")
    script = make_script(["train.py", "--config", "sub/x.yaml"], [])
    scratch = folder / "scratch"
    scratch.mkdir()
    write_trial_files(make_job(script=script), candidate, scratch, quiet=True)
    (copy,) = scratch.rglob("x.yaml")
    data = yaml.safe_load(copy.read_text())
    assert (copy.parent / "beside.txt").read_text() == "here"
    assert Path(data["output_dir"]).parent == scratch
    assert data["per_device_train_batch_size"] == (8 if candidate.knobs else 2)
    if candidate.knobs:
        merged = json.loads(Path(data["deepspeed"]).read_text())
        assert (merged["zero_optimization"]["stage"], merged["train_micro_batch_size_per_gpu"]) == (2, 8)
        assert Path(data["deepspeed"]).is_relative_to(scratch)
    else:
        assert data["deepspeed"] == "ds.json"


def test_a_trial_of_json_arguments_that_starts_again_reads_its_new_copy(folder: Path) -> None:
    (folder / "x.json").write_text(json.dumps({"per_device_train_batch_size": 2, "deepspeed": "ds.json"}))
    script = make_script(["train.py", "--config", "x.json"], [])
    for candidate, size in ((WINNER, 8), (Candidate(()), 2)):
        write_trial_files(make_job(script=script), candidate, folder / "home", quiet=True)
        words = with_copies(script, folder / "home")
        assert words[:2] == ["train.py", "--config"]
        assert Path(words[2]).is_relative_to(folder / "home")
        assert json.loads(Path(words[2]).read_text())["per_device_train_batch_size"] == size
    assert with_copies(script, folder / "nothing there") == ["train.py", "--config", "x.json"]
    joined = make_script(["train.py", "--config=x.json"], [])
    write_trial_files(make_job(script=joined), WINNER, folder / "joined", quiet=True)
    assert with_copies(joined, folder / "joined")[1].startswith(f"--config={folder / 'joined'}/")


def test_what_was_taken_out_of_a_files_config_stays_out(folder: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "steps_per_print": 9}
    (folder / "x.json").write_text(json.dumps({"per_device_train_batch_size": 2, "deepspeed": config}))
    first = {**config, "scheduler": {"type": "WarmupLR"}, "steps_per_print": 3}
    script = dataclasses.replace(make_script(["train.py", "x.json"], []), profile=ScriptProfile(config=first))
    job = make_job(script=script, base_config={**first, "zero_allow_untested_optimizer": True})
    write_trial_files(job, WINNER, folder / "home", quiet=False)
    (copy,) = (folder / "home").rglob("x.json")
    merged = json.loads(copy.read_text())["deepspeed"]
    assert "scheduler" not in merged
    assert (merged["steps_per_print"], merged["zero_allow_untested_optimizer"]) == (9, True)
    assert merged["zero_optimization"]["stage"] == 2


def test_a_training_writes_where_it_was_told(folder: Path) -> None:
    script = make_script(["train.py", "x.yaml"], [])
    write_trial_files(make_job(script=script), WINNER, folder / "home", quiet=False)
    (copy,) = (folder / "home").rglob("x.yaml")
    assert yaml.safe_load(copy.read_text())["output_dir"] == "out"


def test_a_module_tells_its_framework() -> None:
    known = {name: framework_of(Script(("-m", name), ".")) for name in ("axolotl.cli.train", "trl.scripts.sft", "mine")}
    assert [one.package if one else None for one in known.values()] == ["axolotl", "trl", None]
    assert framework_of(Script(("trl.py",), ".")) is None


def test_gpus_that_accelerates_own_file_names(folder: Path) -> None:
    (folder / "acc.yaml").write_text(ACCELERATE + "gpu_ids: 2,3\n")
    assert read_command(["accelerate", "launch", "--config_file", "acc.yaml", "train.py"], []).variables == {
        "CUDA_VISIBLE_DEVICES": "2,3"
    }
    (folder / "acc.yaml").write_text(ACCELERATE + "gpu_ids: all\n")
    assert read_command(["accelerate", "launch", "--config_file", "acc.yaml", "train.py"], []).variables == {}


@pytest.mark.parametrize("text", ["2024-01-01: 1\n", "start: 2024-31-12\n"])
def test_dates_in_files_end_in_one_line_or_are_left(folder: Path, text: str) -> None:
    (folder / "d.yaml").write_text(text)
    try:
        assert make_script(["train.py", "d.yaml"], []).files == ()
    except UserError as error:
        assert "d.yaml" in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("end", [".json", ".hjson"])
def test_a_word_of_any_length_is_no_file(folder: Path, end: str) -> None:
    """As a prompt is, or a list of data sets; ranks read the words, too."""
    (folder / "train.py").touch()
    (folder / "x.yaml").write_text(yaml.safe_dump({"output_dir": "out", "system": f"{'say ' * 100}x{end}"}))
    long = f"{'a.json,' * 60}b{end}"
    script = make_script(["train.py", "x.yaml", "--data", long, f"--prompt={long}"], [])
    assert [Path(file.path).name for file in script.files] == ["x.yaml"]
    assert config_path(script) is None
    assert {long, f"--prompt={long}"} < set(training_command(script, WINNER, 2, "best.json"))
