"""The tuner inside each framework's own environment, with that framework's versions: a rank, the framework's command, its
export. `make test-frameworks` makes the environments; where one is not there, its tests are skipped with the reason."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.trials.framework_commands import COMMANDS, Command, write_files
from benchmarks.trials.framework_environments import FRAMEWORKS, PINS, environment, python_of

SECONDS = 1800  # DeepSpeed's ops may be built first
INPUTS = Path(__file__).parent.parent.parent / "benchmarks" / "trials" / "framework_inputs.py"
SHORT = ["--device", "cpu", "--budget", "10m", "--study", "study"]


def python(name: str) -> Path:
    folder = os.environ.get("AUTOTUNE_ENVIRONMENTS")
    found = python_of(name, Path(folder)) if folder else None
    if found is None:
        pytest.skip(f"no environment of {name}: `make test-frameworks` makes it and runs this")
    return found


def autotune(name: str, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [str(python(name)), "-m", "autotune", *words],
        cwd=folder,
        env=environment(python(name)),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(params=FRAMEWORKS)
def name(request: pytest.FixtureRequest) -> str:
    python(request.param)
    return str(request.param)


@pytest.mark.frameworks
@pytest.mark.timeout(SECONDS)
def test_a_named_model_is_measured_by_their_versions(name: str, tmp_path: Path) -> None:
    said = autotune(name, tmp_path, "run", "--model", "tiny-llama", "--gpus", "1", "--max-trials", "1", *SHORT)
    assert "winner: " in said
    assert "zero_optimization" in json.loads((tmp_path / "runs" / "study" / "study.json").read_text())


def first_command(name: str) -> Command:
    return next(one for one in COMMANDS if one.environment == name)


@pytest.mark.frameworks
@pytest.mark.timeout(SECONDS)
def test_their_command_is_tuned_at_its_batch_and_exported(name: str, tmp_path: Path) -> None:
    command = first_command(name)
    made = subprocess.run(
        [str(python(name)), str(INPUTS), str(tmp_path)], env=environment(python(name)), capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-3000:]
    write_files(command, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    limits = ["--gpus", "2", "--max-trials", "2", "--space", "space.yaml"]
    said = autotune(name, tmp_path, "run", *SHORT, *limits, "--", *shlex.split(command.words))
    assert "train with: " in said
    assert {path: path.read_bytes() for path in before} == before  # theirs are copied, never changed
    assert not (tmp_path / "out").exists()  # nothing that a trial writes leaves its folder
    config = json.loads((tmp_path / "runs" / "study" / "study.json").read_text())
    assert batch(config) == 16
    autotune(name, tmp_path, "export", "study", "--format", "hf")
    autotune(name, tmp_path, "export", "study", "--format", "accelerate")


def batch(config: dict[str, Any]) -> int:
    return int(config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2)


# -- without any environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_pin_is_exact_and_torch_has_one(name: str) -> None:
    lines = [line for line in (PINS / f"{name}.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert "torch==2.13.0" in lines


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words[:60])
def test_every_file_that_a_command_names_is_written_and_says_the_batch(command: Command, tmp_path: Path) -> None:
    write_files(command, tmp_path)
    named = [word for word in shlex.split(command.words) if word.endswith((".yaml", ".yml"))]
    for word in named:
        data = yaml.safe_load((tmp_path / word).read_text())
        assert (tmp_path / data["deepspeed"]).is_file()
        assert {"per_device_train_batch_size", "micro_batch_size"} & set(data)


def test_an_environment_whose_pins_have_changed_is_none(tmp_path: Path) -> None:
    home = tmp_path / "trl"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").touch()
    assert python_of("trl", tmp_path) is None
    (home / ".pins").write_text("of other pins")
    assert python_of("trl", tmp_path) is None
