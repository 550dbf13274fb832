"""Programs that start their ranks themselves: what they would start runs in this process instead."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from autotune.problem.job import Script
from autotune.rank.hooks import launchers
from autotune.rank.hooks.base import Context
from tests.conftest import make_candidate, make_job
from tests.rank.hooks.conftest import Recorder

INNER = """
import json, os, sys
names = ("MINE", "RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
told = [sys.argv[1:], {name: os.environ.get(name) for name in names}, __name__, sys.path[0]]
with open("told.json", "w") as file:
    json.dump(told, file)
raise SystemExit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["outer"])
    package = tmp_path / "relaunched_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(INNER)
    (tmp_path / "inner.py").write_text(INNER)
    program = tmp_path / "program"
    program.write_text("from relaunched_package import main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = Script(("program",), str(tmp_path), program=str(program))
    made = Context(make_job(script=script), make_candidate(1, 2, 3), Recorder(), "cuda", tmp_path, quiet=True)
    launchers.install_relaunch(made)
    yield made
    made.patches.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    sys.modules.pop("relaunched_package", None)


def told() -> list:
    return json.loads(Path("told.json").read_text())


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["torchrun", "--nproc-per-node", "2", "inner.py", "x.yaml"], ["x.yaml"]),
        ([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "inner.py"], []),
        (["deepspeed", "--num_gpus", "2", "inner.py", "x"], ["--local_rank=1", "x"]),
        (["deepspeed", "--num_gpus", "2", "--no_local_rank", "inner.py", "x"], ["x"]),
        (["torchrun", "--nproc-per-node", "2", "-m", "relaunched_package.inner", "x"], ["x"]),
    ],
)
def test_a_launcher_by_subprocess(context: Context, words: list[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        subprocess.run(words, env={**os.environ, "MINE": "7", "RANK": "5", "CODE": "3"}, check=True)
    assert ended.value.code == 3
    argv, env, name, _ = told()
    assert (argv, name) == (arguments, "__main__")
    assert (env["MINE"], env["RANK"], env["TORCHELASTIC_RUN_ID"]) == ("7", "1", "none")
    assert context.relaunched == 2


WORDS = ["torchrun", "--nproc-per-node", "2", "inner.py", "a b"]
WAYS = {
    "shell": lambda: subprocess.Popen("torchrun --nproc-per-node 2 inner.py 'a b'", shell=True),
    "call": lambda: subprocess.check_call(WORDS),
    "system": lambda: os.system("torchrun --nproc-per-node 2 inner.py 'a b'"),
    "execvp": lambda: os.execvp(WORDS[0], WORDS),
    "execvpe": lambda: os.execvpe(WORDS[0], WORDS, dict(os.environ)),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_other_ways_to_start_one(context: Context, way: str) -> None:
    with pytest.raises(SystemExit):
        WAYS[way]()
    assert told()[0] == ["a b"]


def test_flags_of_a_starter_are_not_the_scripts(context: Context) -> None:
    context.flags.add("--gradient_accumulation_steps")  # accelerate's launcher has it
    with pytest.raises(SystemExit):
        subprocess.run(WORDS)
    assert context.flags == set()


def test_torchs_own_launcher(context: Context) -> None:
    import torch.distributed.run

    context.patches.set_environment("CODE", "3")  # of a SystemExit with 0 it makes a return
    with pytest.raises(SystemExit):
        torch.distributed.run.main(["--nproc-per-node", "2", "inner.py", "x"])
    assert (told()[0], context.relaunched) == (["x"], 2)


@pytest.mark.parametrize("words", [["relaunched_package/inner.py", "x"], ["-m", "relaunched_package.inner", "x"]])
def test_a_command_that_starts_a_file_of_its_own_package(context: Context, words: list[str]) -> None:
    __import__("relaunched_package")
    with pytest.raises(SystemExit):
        subprocess.run([sys.executable, *words])
    assert (told()[0], context.relaunched) == (["x"], 1)


@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "-c", "print(1)"],
        [sys.executable, "other.py"],
        [sys.executable, "-m", "json.tool", "--help"],
        ["true", "torchrun", "inner.py"],
    ],
)
def test_other_programs_run_as_ever(context: Context, words: list[str]) -> None:
    Path("other.py").write_text("print(1)\n")
    assert subprocess.run(words, capture_output=True).returncode == 0
    assert os.system("true") == 0
    assert not Path("told.json").exists()


def test_what_a_training_starts_is_its_own_affair(context: Context, tmp_path: Path) -> None:
    context.engine = object()
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexit 5\n")
    (tmp_path / "torchrun").chmod(0o755)
    assert subprocess.run([str(tmp_path / "torchrun"), "inner.py"]).returncode == 5
    assert not Path("told.json").exists()


def test_what_starts_itself_for_ever_is_stopped(context: Context) -> None:
    Path("again.py").write_text("import subprocess\nsubprocess.run(['torchrun', 'again.py'])\n")
    with pytest.raises(RuntimeError, match=r"starts itself again and again: again\.py"):
        subprocess.run(["torchrun", "again.py"])


def test_accumulation_of_accelerates_launcher_is_the_candidates(context: Context) -> None:
    env = {**os.environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    with pytest.raises(SystemExit):
        subprocess.run(["torchrun", "inner.py"], env=env)
    assert told()[1]["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
