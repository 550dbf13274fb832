"""Builds of DeepSpeed's ops: one at a time, for each environment its own, gone on with after a kill."""

import json
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.compilers import SlowCompiler, load
from tests.conftest import wait_until

OP = "CPUAdamBuilder"  # of two objects: cpu_adam.o and cpu_adam_impl.o


@pytest.fixture
def compiler(tmp_path: Path) -> SlowCompiler:
    return SlowCompiler(tmp_path / "compiler", sysconfig.get_path("include"))


def told(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What it printed until its end."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def first_state(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("{"))
    return str(json.loads(line)["state"])


def states(lines: list[dict[str, Any]]) -> list[str]:
    return [line["state"] for line in lines]


@pytest.mark.slow
def test_two_at_once_build_once(tmp_path: Path, compiler: SlowCompiler) -> None:
    compiler.slow.touch()
    env = compiler.environment(tmp_path / "home")
    both = [load(env, OP), load(env, OP)]
    wait_until(lambda: compiler.at_work, "a compiler works")
    # the other one sits behind the first one's lock: it says so, and the first is let go on only then
    assert sorted(first_state(process) for process in both) == ["building", "waiting"]
    compiler.slow.unlink()
    lines = [told(process) for process in both]
    assert all(found[-1] == {"state": "over", "failed": {}} for found in lines)
    assert sorted(compiler.started) == ["cpu_adam.o", "cpu_adam_impl.o"], "each once"
    assert sorted(states(found)[0] for found in lines) == ["done", "loading"], "the second finds it built"


@pytest.mark.main_path
@pytest.mark.slow
def test_a_killed_build_is_gone_on_with_at_once(tmp_path: Path, compiler: SlowCompiler) -> None:
    env = compiler.environment(tmp_path / "home")
    compiler.slow.touch()
    first = load(env, OP)
    wait_until(lambda: len(compiler.at_work) == 2, "both compilers work")
    begun = set(compiler.at_work)
    first.kill()
    first.wait()
    assert set(compiler.at_work) == begun, "nobody told them"
    second = load(env, OP)
    wait_until(lambda: compiler.at_work and not begun & set(compiler.at_work), "others work in their place")
    compiler.slow.unlink()
    again = told(second)
    assert states(again) == ["building", "done", "over"]
    assert not again[-1]["failed"]
    assert not compiler.at_work
    assert states(told(load(env, OP))) == ["loading", "done", "over"]


@pytest.mark.slow
def test_what_was_compiled_is_kept(tmp_path: Path, compiler: SlowCompiler) -> None:
    env = compiler.environment(tmp_path / "home")
    assert states(told(load(env, OP)))[-1] == "over"
    [place] = (tmp_path / "home").glob("torch_extensions/autotune-*/cpu_adam")
    (place / "cpu_adam_impl.o").unlink()  # as if it had been killed before this one
    (place / "cpu_adam.so").unlink()
    (place / "lock").touch()
    (place.parent / ".building").touch()
    before = len(compiler.started)
    assert states(told(load(env, OP))) == ["building", "done", "over"]
    assert compiler.started[before:] == ["cpu_adam_impl.o"]


@pytest.mark.slow
def test_two_environments_used_in_turn_build_once_each(tmp_path: Path, compiler: SlowCompiler) -> None:
    env = compiler.environment(tmp_path / "home")
    venv.create(tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    site = next((tmp_path / "other").glob("lib/python*/site-packages"))
    (site / "all.pth").write_text("\n".join(path for path in sys.path if path) + "\n")
    pythons = [sys.executable, str(python)]
    for executable in pythons:
        assert states(told(load(env, OP, python=executable))) == ["building", "done", "over"]
    built = len(compiler.started)
    for executable in [*pythons, *pythons]:
        assert states(told(load(env, OP, python=executable))) == ["loading", "done", "over"]
    assert len(compiler.started) == built
    assert len(list((tmp_path / "home" / "torch_extensions").iterdir())) == 2


@pytest.mark.slow
def test_a_server_whose_tuner_is_killed_takes_its_compilers_along(tmp_path: Path, compiler: SlowCompiler) -> None:
    compiler.slow.touch()
    code = f"""
from pathlib import Path
from autotune.executors.machine import Ops
from autotune.workers.launchers import trial_environment
from autotune.workers.launchers import ForkLauncher
env, log = trial_environment("cpu", 1), Path({str(tmp_path / "server.log")!r})
server = ForkLauncher(env, log, model_type=None, modules=[])
server.open()
Ops(print).load(server, [{OP!r}], env, log)
"""
    tuner = subprocess.Popen([sys.executable, "-c", code], env=compiler.environment(tmp_path / "home"))
    wait_until(lambda: compiler.at_work, "a compiler works")
    below = psutil.Process(tuner.pid).children(recursive=True)
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    wait_until(lambda: not compiler.at_work, "no compiler works")
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
