"""Who bears a mark: processes of this machine, some of them in the middle of `exec`, some of the kernel."""

import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from autotune.group import ending
from autotune.group.ending import marked


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
    monkeypatch.setattr(ending.time, "monotonic", lambda: sum(found))
    monkeypatch.setattr(ending.time, "sleep", found.append)
    return found


def among(monkeypatch: pytest.MonkeyPatch, *processes: Any) -> list[Any]:
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(processes))
    return list(marked("MARK", "1"))


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
    assert sum(waits) == pytest.approx(ending.EXEC_SECONDS, rel=0.1)


def test_real_ones() -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "MARK_OF_TESTS": mark}
    )
    try:
        assert [one.pid for one in marked("MARK_OF_TESTS", mark)] == [sleeper.pid]
        assert marked("MARK_OF_TESTS", "another") == []
    finally:
        sleeper.kill()
        sleeper.wait()
    assert marked("MARK_OF_TESTS", mark) == []
