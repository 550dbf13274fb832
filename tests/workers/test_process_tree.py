"""Who bears a mark: processes of this machine, some of them in the middle of `exec`, some of the kernel."""

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from autotune.workers import process_tree
from autotune.workers.process_tree import end_ranks, processes_with_variable
from tests.conftest import wait_until


class Told:
    """A process that says what a test has it say: an environment per question, the last one for ever."""

    def __init__(self, *environments: dict[str, str], exe: str = "/bin/x", age_seconds: float = 0.0) -> None:
        self._environments, self._exe, self._age = list(environments), exe, age_seconds

    def environ(self) -> dict[str, str]:
        return self._environments.pop(0) if len(self._environments) > 1 else self._environments[0]

    def exe(self) -> str:
        return self._exe

    def create_time(self) -> float:
        return time.time() - self._age


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited; nothing really is."""
    found: list[float] = []
    monkeypatch.setattr(process_tree.time, "monotonic", lambda: sum(found))
    monkeypatch.setattr(process_tree.time, "sleep", found.append)
    return found


def among(monkeypatch: pytest.MonkeyPatch, *processes: Any) -> list[Any]:
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(processes))
    return list(processes_with_variable("MARK", "1"))


def test_one_that_is_starting_is_asked_again(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    mine, other = Told({}, {}, {"MARK": "1"}), Told({}, {"MARK": "2"})
    assert among(monkeypatch, other, mine) == [mine]
    assert len(waits) == 2


def test_threads_of_the_kernel_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """Each was half a second at a trial's end: a busy machine has many that are young."""
    assert among(monkeypatch, *[Told({}, exe="") for _ in range(50)], Told({}, age_seconds=60.0)) == []
    assert waits == []


def test_many_that_have_no_environment_are_waited_for_together(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    assert among(monkeypatch, *[Told({}) for _ in range(50)]) == []
    assert sum(waits) == pytest.approx(process_tree.EXEC_SECONDS, rel=0.1)


_LIKE_PID_1 = """
import ctypes, os, subprocess, sys
import psutil
from autotune.workers import process_tree as ending
ending.KILL_GRACE_SECONDS = ending.KILL_SECONDS = ending.REAP_SECONDS = 3600.0
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans below it become its children
worker = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid, flush=True); input()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
rank = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True, **pipes)
orphan = int(rank.stdout.readline())
left = ending.end_ranks([rank.pid], lambda pid: rank.poll(), list)
print(left, psutil.pid_exists(orphan))
"""


def test_a_zombie_in_a_ranks_process_group_does_not_keep_its_end_waiting() -> None:
    """PID 1 of a container is the parent of what a rank leaves, and nobody else waits for that."""
    done = subprocess.run([sys.executable, "-c", _LIKE_PID_1], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] False", done.stderr


def test_a_zombie_that_is_anothers_to_wait_for_is_no_process_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KILL_GRACE_SECONDS", "KILL_SECONDS", "REAP_SECONDS"):
        monkeypatch.setattr(process_tree, name, 0.1)
    careless = "import subprocess, time; one = subprocess.Popen(['true']); print(one.pid, flush=True); time.sleep(3600)"
    parent = subprocess.Popen([sys.executable, "-c", careless], stdout=subprocess.PIPE, text=True)
    try:
        zombie = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: zombie.status() == psutil.STATUS_ZOMBIE, "the end of its child")
        assert end_ranks([], lambda pid: 0, lambda: [zombie]) == []
        assert zombie.status() == psutil.STATUS_ZOMBIE, "and it is there all the same"
    finally:
        parent.kill()
        parent.communicate()
