"""Ranks in a PID namespace: nothing that they have started outlives them, and their own executable cannot be changed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from autotune.util import linux
from autotune.workers.launchers import ForkLauncher, trial_environment
from tests.conftest import wait_until

RANK = "tests.workers.harmful_rank"
COLD = pytest.mark.parametrize(
    "cold", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cold start", "fork of a server"]
)
TUNER = """
import sys, time
from pathlib import Path
from autotune.workers.launchers import ForkLauncher, trial_environment
folder, rank, seconds, cold = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
server = ForkLauncher(trial_environment("cpu", 1), folder / "server.log", cold=cold, model_type=None, modules=[])
server.open()
server.launch(rank, str(folder / "said"), seconds)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def _packages_of_tests_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def sleepers(seconds: int) -> list[psutil.Process]:
    """Return the processes that a rank with this number has left."""
    word = f"time.sleep({seconds})"
    return [one for one in psutil.process_iter() if any(word in part for part in command_line(one))]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@COLD
def test_a_daemon_ends_with_the_ranks_of_a_trial(tmp_path: Path, cold: bool) -> None:
    seconds = 10**6 + os.getpid()
    launcher = ForkLauncher(
        trial_environment("cpu", 1), tmp_path / "server.log", cold=cold, model_type=None, modules=[]
    )
    launcher.begin()
    with closing(launcher):
        launcher.open()
        pid = launcher.launch(RANK, str(tmp_path / "said"), seconds)
        wait_until(lambda: (tmp_path / "said").exists(), "the rank has started its daemon")
        said = json.loads((tmp_path / "said").read_text())
        assert said["pid"] != pid, "the rank has a PID namespace"
        assert psutil.Process(pid).is_running()
        assert said["refused"] == [errno.EROFS] * 4
        assert len(sleepers(seconds)) == 1
        assert launcher.end([pid], strays=True) == []
        assert sleepers(seconds) == []
        assert launcher.status(pid) == -signal.SIGTERM
        assert launcher.alive, "the server forks the next trial's ranks"


@COLD
def test_a_daemon_ends_with_a_killed_tuner(tmp_path: Path, cold: bool) -> None:
    seconds = 2 * 10**6 + os.getpid()
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(tmp_path), RANK, str(seconds), str(cold)])
    try:
        wait_until(lambda: (tmp_path / "said").exists(), "the rank has started its daemon")
        below = psutil.Process(tuner.pid).children(recursive=True)
        assert len(sleepers(seconds)) == 1
    finally:
        tuner.kill()
        tuner.wait()
    wait_until(lambda: not sleepers(seconds), "the daemon's end")
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_a_command_without_namespaces_runs_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flags: int) -> int:
        raise PermissionError(errno.EPERM, "not in this container")

    monkeypatch.setattr(linux, "_clone", refuse)
    monkeypatch.setattr(linux, "die_with_parent", lambda parent: None)
    linux.contain(os.getppid())
    assert linux.pid_outside(os.getpid()) == os.getpid()


@pytest.mark.parametrize("code", [0, 7, -signal.SIGKILL])
def test_a_contained_command_ends_as_its_program_does(code: int) -> None:
    end = f"os._exit({code})" if code >= 0 else "os.fork() or os._exit(0); os.abort()"
    words = f"import os, sys; from autotune.util.linux import contain; contain(int(sys.argv.pop(1))); print(os.getpid()); sys.stdout.flush(); {end}"
    done = subprocess.run([sys.executable, "-c", words, str(os.getpid())], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1"]
    if code >= 0:
        assert done.returncode == code


def test_mounts_that_do_not_answer_are_named_in_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: str) -> os.stat_result:
        if "dead" in path:
            signal.pause()
        return real(path)

    points = ["/", "/dead/a", "/nonexistent", "/tmp", "/dead/b"]
    monkeypatch.setattr(linux, "mount_points", lambda: points)
    monkeypatch.setattr(linux, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(linux.os, "stat", stat)
    assert linux.silent_mounts() == ["/dead/a", "/dead/b"]
    del points[1:]
    assert linux.silent_mounts() == []
