"""Another Python than the tuner's: what it is asked, and how one that is of no use is refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.job import Job
from autotune.util import interpreter
from autotune.util.interpreter import (
    OWN,
    bound_command,
    console_script,
    interpreter_at,
    launch_command,
    module_command,
    other_python,
)
from tests.conftest import make_job, pid_lives, wait_until

FACTS = {
    "executable": None,
    "prefix": "/elsewhere",
    "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    "cuda": "12.8",
    "nccl": "2.27.5",
}


def program(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def stand_in(path: Path, version: str = "3.12.1", **facts: object) -> Path:
    """A Python that answers with these facts; it has and finds no module."""
    said = json.dumps({**FACTS, **facts})
    answers = f"case \"$4\" in facts) echo '{said}';; has) echo false;; *) echo null;; esac"
    return program(path, f"echo PYTHON {version}\n{answers}")


# -- what an interpreter says ---------------------------------------------------------------------------------------------


def test_the_tuners_own_is_no_other(tmp_path: Path) -> None:
    assert other_python(OWN) is None
    assert interpreter_at(sys.executable, "--python") is OWN
    assert interpreter_at(str(Path(sys.prefix)), "--python") is OWN, "the folder of its environment"
    assert OWN.environment()["PYTHONPATH"].split(os.pathsep)[0] == str(Path(interpreter.__file__).parents[2])


def test_where_it_is_installed_nothing_is_put_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    monkeypatch.setattr(interpreter, "_PACKAGE", Path("/env/lib/python3.12/site-packages/autotune"))
    assert OWN.environment()["PYTHONPATH"] == "/users/own"


def test_a_virtual_environment_is_another_though_its_python_is_the_same_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=120)
    for typed in (tmp_path / "env", tmp_path / "env/bin/python"):
        found = interpreter_at(str(typed), "--python")
        assert found.is_other
        assert Path(found.path).parent == tmp_path / "env/bin"
        assert found.python == OWN.python
        assert (found.version("torch"), found.cuda, found.has("torch"), found.has("json")) == (None, None, False, True)
        assert found.origin("torch") is None
    assert Path(found.origin("json.decoder") or "").name == "decoder.py"


def test_a_module_of_the_current_folder_is_found_and_stands_in_for_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "mine.py").write_text("raise RuntimeError('nothing is imported')\n")
    version, facts = interpreter._query(sys.executable, "facts")
    assert version == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["torch"] == OWN.version("torch")
    assert facts["cuda"] == OWN.cuda
    assert interpreter._query(sys.executable, "origin", "mine")[1] == str(tmp_path / "mine.py")
    assert OWN.origin("mine") == str(tmp_path / "mine.py")
    assert OWN.origin("mine.nothing") is None
    (tmp_path / "ours" / "deep").mkdir(parents=True)
    for name in ("ours/__init__.py", "ours/deep/inner.py"):
        (tmp_path / name).write_text("raise RuntimeError('a package of the user runs in no tuner')\n")
    assert OWN.origin("ours.deep.inner") == str(tmp_path / "ours/deep/inner.py")
    assert OWN.origin("ours.nothing.inner") is None


def test_a_module_of_ours_is_run_apart_from_the_folder_it_is_called_from(tmp_path: Path) -> None:
    """A `random.py` at the root of somebody's repository is no reason for a rank to fail."""
    for name in ("random", "argparse", "datasets", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')")
    command = module_command(sys.executable, "json.tool", "--compact", "given.json")
    (tmp_path / "given.json").write_text('{"a": 1}')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('{"a":1}\n', "")
    told = subprocess.run([*command[:-1], "--none"], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 2
    assert "--none" in told.stderr


def test_a_process_whose_parent_is_killed_while_it_begins_imports_nothing(tmp_path: Path) -> None:
    """The kernel tells of a parent's death only whoever has asked before it."""
    (tmp_path / "slow.py").write_text("raise SystemExit(f'{__name__} was run')")
    lives = bound_command(sys.executable, "slow")
    with subprocess.Popen("true") as dead:
        pass
    late = [str(dead.pid) if word == str(os.getpid()) else word for word in lives]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    for words, ended in ((lives, 1), (late, -signal.SIGKILL)):
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert (done.returncode, "__main__ was run" in done.stderr) == (ended, ended == 1)
    behind_a_script = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))", *lives]
    assert subprocess.run(behind_a_script, env=env, capture_output=True).returncode == 1, "its parent's parent lives"


def test_a_job_carries_its_interpreter_and_does_not_store_it(tmp_path: Path) -> None:
    found = interpreter_at(str(stand_in(tmp_path / "bin/python")), "--python")
    assert other_python(found) == str(tmp_path / "bin/python")
    there = make_job(interpreter=found)
    assert there.to_json() == make_job().to_json()
    recorded = {**there.to_json(), "interpreter": {"path": "/tmp/evil"}}
    assert Job.from_json(recorded).interpreter is OWN, "a stored job names no program to run"
    assert dataclasses.replace(there, seq_len=8).interpreter is found


# -- what its processes see ------------------------------------------------------------------------------------------------


def test_another_is_given_this_package_and_nothing_that_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    interpreter._package_alone.cache_clear()
    env = interpreter_at(str(stand_in(tmp_path / "bin/python")), "--python").environment()
    interpreter._package_alone.cache_clear()
    folder, users = env["PYTHONPATH"].split(os.pathsep)
    assert users == "/users/own"
    assert os.listdir(folder) == ["autotune"]
    assert Path(folder, "autotune").resolve() == Path(interpreter.__file__).parents[1].resolve()
    assert "VIRTUAL_ENV" not in env, "the tuner's is none of theirs"
    code = "import sys, autotune.rank.script_rank, autotune.workers.fork_server; print(sys.modules.keys() & {'optuna', 'rich'})"
    env["PYTHONPATH"] = folder
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file"))
    interpreter._package_alone.cache_clear()
    folder = interpreter._package_alone()
    interpreter._package_alone.cache_clear()
    assert os.listdir(folder) == ["autotune"]


def test_a_link_of_a_tuner_that_has_moved_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "autotune").symlink_to("/nowhere")
    interpreter._link(tmp_path)
    interpreter._link(tmp_path)
    assert (tmp_path / "autotune" / "util" / "interpreter.py").is_file()
    assert os.listdir(tmp_path) == ["autotune"]


# -- its console scripts ---------------------------------------------------------------------------------------------------


def test_a_launcher_is_printed_as_a_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["torchrun", "--nproc-per-node", "2"]
    assert launch_command(words, None) == words, "in the tuner's own environment by its name"
    python = stand_in(tmp_path / "bin/python")
    assert launch_command(words, str(python)) == [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = program(tmp_path / "bin/torchrun", "")
    assert launch_command(words, str(python))[0] == str(script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert launch_command(words, str(python)) == words, "its environment is active"
    assert launch_command(["mine"], str(python)) == ["mine"]


def test_a_command_is_looked_for_beside_the_interpreter_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    first = program(tmp_path / "path/trl", "")
    found = interpreter_at(str(stand_in(tmp_path / "bin/python")), "--python")
    assert console_script("trl", found) == str(first)
    beside = program(tmp_path / "bin/trl", "")
    assert console_script("trl", found) == str(beside)
    assert console_script("nothing-of-that-name", found) is None


# -- what is refused -------------------------------------------------------------------------------------------------------


def refusal(typed: object) -> str:
    with pytest.raises(UserError) as caught:
        interpreter_at(str(typed), "--python")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--python {typed}")
    return str(caught.value)


def test_what_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("print(1)")
    (tmp_path / "empty").mkdir()
    assert "no such executable" in refusal("./ls"), "the one in PATH is another"
    assert "no such executable" in refusal("no-python-of-that-name")
    assert "no such executable" in refusal(tmp_path / "empty")
    assert "no such executable" in refusal(tmp_path / "text")
    (tmp_path / "text").chmod(0o755)
    assert "cannot be run" in refusal(tmp_path / "text"), "neither a program nor a script"
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    assert "no such executable" in refusal(tmp_path / "broken")
    for other in ("true", "cat", "sh", "ls"):
        assert "it is no Python" in refusal(other)
    assert "it fails (sh: broken)" in refusal(
        program(tmp_path / "dies", "echo PYTHON 3.12.0; echo 'sh: broken' >&2; exit 1")
    )
    assert "it fails (exit status 3)" in refusal(program(tmp_path / "mute", "echo PYTHON 3.12.0; exit 3"))


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18"])
def test_a_python_that_is_too_old(tmp_path: Path, version: str) -> None:
    assert f"is Python {version}: expected 3.11 or newer" in refusal(
        program(tmp_path / "old", f"echo PYTHON {version}")
    )


def test_every_python_can_be_asked() -> None:
    """What is asked first has to be understood by the oldest."""
    compile(interpreter._ASK, "ask", "exec", dont_inherit=True)
    assert "f'" not in interpreter._ASK
    assert "\n" not in interpreter._ASK


def test_one_that_hangs_is_not_waited_for_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "ANSWER_SECONDS", 0.5)
    communicate, pid = subprocess.Popen.communicate, tmp_path / "pid"

    def once_it_hangs(process: subprocess.Popen[str], *args: Any, **options: Any) -> tuple[str, str]:
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "its child")
        return communicate(process, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_hangs)
    assert "no answer within 0 s" in refusal(program(tmp_path / "hangs", f"sleep 600 & echo $! > {pid}; wait"))
    child = int(pid.read_text())
    wait_until(lambda: not pid_lives(child), "its child's end")
