"""The examples, run as a stranger would: real DeepSpeed on CPU ranks, few trials, in a copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, check_values, parsed

EXAMPLES = ROOT / "examples"
SPACE = "knobs:\n  zero_stage: [0, 1]\n  train_micro_batch_size_per_gpu: [1, 2, 4]\n  gradient_accumulation_steps: [1, 2, 4, 8]\n"
SMALL = ("--device", "cpu", "--gpus", "2", "--budget", "5m", "--space", "space.yaml", "--max-trials", "1")
ONE_RANK = ("--gpus", "1", "--no-references")  # the last option counts


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "out"))
    for folder in (tmp_path / "examples").iterdir():
        if folder.is_dir():
            (folder / "space.yaml").write_text(SPACE)
    return tmp_path / "examples"


def run(folder: Path, *command: str, **variables: str) -> str:
    """What an example printed; it must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_there_are_as_many_as_their_readme_says() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.iterdir() if path.is_dir()}


@pytest.mark.slow
def test_a_model_by_its_name(copied: Path) -> None:
    folder = copied / "named_model"
    words = (*SMALL, *ONE_RANK, "--model", "tiny-llama", "--seq-len", "32", "--global-batch-size", "8")
    said = run(folder, "bash", "run.sh", *words)
    assert "winner:" in said
    runs = folder / "runs" / "named-model"
    assert json.loads((runs / "named-model.json").read_text())["train_batch_size"] == 8
    assert (runs / "named-model.training_arguments.json").exists()
    assert "tiny-llama" in (runs / "named-model.html").read_text()


@pytest.mark.main_path
@pytest.mark.slow
def test_a_script_of_ones_own_is_tuned_and_trained(copied: Path) -> None:
    folder = copied / "trainer"
    said = run(folder, "bash", "run.sh", *SMALL, *ONE_RANK, STEPS="6")
    assert "train with:" in said
    assert "training ended with exit code 0 after 6 DeepSpeed steps" in said
    assert (folder / "out" / "model.safetensors").exists()
    assert json.loads((folder / "runs/trainer/trainer.json").read_text())["train_batch_size"] == 16, (
        "as the script has it"
    )


@pytest.mark.slow
def test_adapters_by_trl(copied: Path) -> None:
    folder = copied / "trl_lora"
    said = run(folder, "bash", "run.sh", *SMALL, *ONE_RANK, STEPS="6")
    assert "train with:" in said
    assert not (folder / "out").exists(), "a trial leaves nothing"


@pytest.mark.slow
def test_a_workload(copied: Path) -> None:
    folder = copied / "workload"
    assert "winner:" in run(folder, "bash", "run.sh", *SMALL, *ONE_RANK)
    assert "zero_optimization" in json.loads((folder / "ds.json").read_text())


@pytest.mark.main_path
@pytest.mark.slow
def test_from_python(copied: Path) -> None:
    folder = copied / "python"
    program = folder / "tune.py"
    text = program.read_text()
    program.write_text(text.replace("seed=1,", "seed=1, no_references=True,"))  # the first call has them
    assert program.read_text() != text
    said = run(folder, sys.executable, program.name, *SMALL, "--model", "tiny-llama")
    assert "study from-python is new" in said
    assert "study from-python goes on" in said
    assert len(re.findall(r"^ +\d+ z\d mb.*: ok$", said, re.MULTILINE)) >= 3
    assert said.count("\nwrote ") >= 3


@pytest.mark.slow
def test_a_callback_records_trials_for_tensorboard(copied: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = copied / "python"
    run(folder, sys.executable, "board.py", *SMALL, "--model", "tiny-llama")
    assert list((folder / "runs" / "board").glob("trial-*/events*"))


@pytest.mark.slow
def test_the_sampler_searches_in_a_study_of_ones_own(copied: Path) -> None:
    said = run(copied / "python", sys.executable, "own_study.py")
    assert re.search(r"^80\.0 samples/s after \d+ trials", said, re.MULTILINE)


# -- Slurm: until a cluster is at hand, with a stand-in for srun ---------------------------------------------------------

SBATCH = EXAMPLES / "slurm" / "tune.sbatch"


@pytest.mark.parametrize("script", sorted(SBATCH.parent.iterdir()), ids=lambda path: path.name)
def test_what_slurm_is_asked_for_stands_before_the_first_command(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert lines[0].startswith("#!")
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    assert all(at < first for at, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in asked)
    assert "--ntasks-per-node=1" in asked


def test_what_the_slurm_job_starts(tmp_path: Path) -> None:
    """srun here writes down what it is told to start; each command is one of ours, and both train the same."""
    heard = tmp_path / "heard"
    stand_in = tmp_path / "bin" / "srun"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {heard}\necho ==== >> {heard}\n')
    stand_in.chmod(0o755)
    path = os.pathsep.join([str(stand_in.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "SLURM_SUBMIT_DIR": str(tmp_path), "AUTOTUNE_OPTIONS": "--space zero2"}
    done = subprocess.run(["bash", str(SBATCH)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    started = [text.split("\n")[:-1] for text in heard.read_text().split("====\n") if text]
    assert [words[:3] for words in started] == [["--ntasks=1", "autotune", "run"], ["--ntasks=1", "autotune", "launch"]]
    tuned, trained = (parsed(words[2:]) for words in started)
    check_values(tuned)
    assert (tuned["study"], tuned["space"], tuned["budget"]) == ("on-the-cluster", "zero2", "45m")
    assert trained["script"] == ["on-the-cluster", *tuned["script"]]


def test_outside_of_slurm_the_job_says_so(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(["bash", str(SBATCH)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "submit this with sbatch" in done.stderr


SHOWN = """
import ast, json, sys

for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] != "code":
        continue
    body = ast.parse("".join(cell["source"]).replace("max_trials=4", "max_trials=1, no_references=True")).body
    shown = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), cell["id"], "exec"), globals())
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), cell["id"], "eval"))
        print(cell["id"], value._repr_html_()[:60] if hasattr(value, "_repr_html_") else repr(value))
"""


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Without Jupyter: each cell in one namespace, and the value of its last line as a notebook shows it."""
    pytest.importorskip("pandas")
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code" and cell["outputs"]] == []
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    said = run(tmp_path, sys.executable, "-c", SHOWN, str(EXAMPLES / "notebook.ipynb"))
    assert "GiB a GPU, fits with 9" in said
    assert "winner: ZeRO-" in said
    assert '<iframe title="autotune study"' in said
    assert "notebook.training_arguments.json" in said
