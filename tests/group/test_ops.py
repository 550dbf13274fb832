"""A build that was killed leaves its lock; nobody may wait for it."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from autotune.group import ops
from autotune.group.ops import wait_for_lock
from autotune.linux import boot_id


def make_lock(folder: Path, age_seconds: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    old = time.time() - age_seconds
    os.utime(lock, (old, old))
    return lock


def test_a_killed_builds_lock_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    wait_for_lock(lock)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().out


def test_no_lock_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(ops.time, "sleep", naps.append)
    wait_for_lock(tmp_path / "lock")
    assert naps == []


def test_a_held_lock_is_waited_for(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    with lock.open():
        waiter = threading.Thread(target=wait_for_lock, args=[lock], daemon=True)
        waiter.start()
        waiter.join(1.0)
        assert waiter.is_alive()
        assert lock.exists()
        lock.unlink()  # as the builder does when it is done
        waiter.join(60.0)
    assert not waiter.is_alive()


def test_a_folder_that_changes_is_another_hosts_build(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    built = tmp_path / "adam.o"
    built.touch()
    waiter = threading.Thread(target=wait_for_lock, args=[lock, 1800.0], daemon=True)
    waiter.start()
    waiter.join(0.7)
    assert lock.exists(), "something in its folder is new"
    os.utime(built, (0, 0))
    waiter.join(60.0)
    assert not lock.exists()


@pytest.mark.parametrize(("mark", "ours"), [("", True), (boot_id(), True), ("elsewhere", False)])
def test_only_this_machines_build_is_known_to_be_dead(tmp_path: Path, mark: str, ours: bool) -> None:
    (tmp_path / "adam").mkdir()
    (tmp_path / ".adam.building").write_text(mark)
    lock, done = make_lock(tmp_path / "adam", age_seconds=0), threading.Event()

    def end() -> None:  # the other machine's build
        done.set()
        lock.unlink()

    if not ours:
        threading.Timer(0.5, end).start()
    with ops.held(tmp_path, "adam") as going_on:
        assert going_on is ours
        assert done.is_set() is not ours, "it is waited for"
        assert not lock.exists()
        assert (tmp_path / ".adam.building").read_text() == (boot_id() if ours else mark)
    assert (tmp_path / ".adam.building").exists() is not ours, "whose mark that is"


def test_a_child_that_is_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    with ops.held(tmp_path, "adam"):
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    waited: list[str] = []
    try:
        with ops.held(tmp_path, "adam", lambda: waited.append("waits")):
            assert waited == []
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
