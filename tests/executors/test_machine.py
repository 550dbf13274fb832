"""What starts ranks on this machine: begun before it is needed, and never left behind."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from autotune.executors.machine import LocalMachine, Ops, RankRequirements
from autotune.workers.launchers import ForkLauncher, SpawnLauncher
from tests.conftest import lives, pid_lives

NEEDS = RankRequirements("cpu", 1, "fork")


def servers() -> list[int]:
    """Process ids of this process's fork servers."""
    found = []
    for child in psutil.Process().children():
        try:
            while not (words := child.cmdline()) and lives(child):  # in the middle of `exec` it has none yet
                time.sleep(0.01)
            if "autotune.workers.fork_server" in words:
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


@contextmanager
def begun_station(folder: Path) -> Iterator[tuple[LocalMachine, int]]:
    """A machine, and its fork server that was begun."""
    before = set(servers())
    with closing(LocalMachine(folder, Ops(print), lambda: False)) as station:
        station.begin(NEEDS)
        (begun,) = set(servers()) - before
        yield station, begun


@pytest.mark.slow
def test_the_server_that_was_begun_is_the_one_that_is_waited_for(tmp_path: Path) -> None:
    with begun_station(tmp_path / "not-yet") as (station, begun):
        assert station.broken, "nothing can be launched before it is open"
        station.open(NEEDS)
        assert isinstance(station.launcher, ForkLauncher)
        assert psutil.Process(station.launcher.server).ppid() == begun
    assert not pid_lives(begun)


def test_one_that_imports_something_else_is_ended(tmp_path: Path) -> None:
    with begun_station(tmp_path) as (station, begun):
        station.open(dataclasses.replace(NEEDS, training=True))
        assert isinstance(station.launcher, SpawnLauncher)
        assert not pid_lives(begun)


def test_one_that_nobody_waited_for_is_ended(tmp_path: Path) -> None:
    with begun_station(tmp_path) as (_, begun):
        pass
    assert not pid_lives(begun)
