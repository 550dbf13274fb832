"""A study is held by one process, also where the file system has no locks."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.search import storage
from autotune.search.storage import lock_study

WITHOUT_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(descriptor: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


def holder(folder: Path, told: Connection) -> None:
    """A process that holds the study until it is killed."""
    held = lock_study(folder, "s")
    told.send("held")
    signal.pause()
    held.release()


@pytest.fixture(params=[None, *WITHOUT_LOCKS])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a file system with locks, and on some that answer with an error."""
    monkeypatch.setattr(storage, "_PATIENCE_SECONDS", 0.5)
    if request.param is not None:
        refuse(monkeypatch, request.param)
    return tmp_path


@pytest.mark.few(2)
def test_one_holds_it_and_the_next_once_it_is_let_go(folder: Path) -> None:
    held = lock_study(folder, "s")
    with pytest.raises(UserError, match="another autotune run holds study 's'"):
        lock_study(folder, "s")
    held.release()
    lock_study(folder, "s").release()


@pytest.mark.few(2)
def test_a_holder_that_was_killed_holds_it_no_longer(folder: Path) -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=holder, args=(folder, theirs))
    process.start()
    try:
        assert ours.recv() == "held"
        with pytest.raises(UserError, match="another autotune run"):
            lock_study(folder, "s")
    finally:
        process.kill()
        process.join()
    lock_study(folder, "s").release()


def test_a_holder_of_another_machine_that_says_nothing_any_more_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.ENOSYS)
    monkeypatch.setattr(storage, "_LEASE_SECONDS", 0.4)
    held = lock_study(tmp_path, "s")
    lease = tmp_path / "lock.lease"
    text = lease.read_text()
    held.release()
    assert not lease.exists()
    lease.write_text(text.replace(socket.gethostname(), "another-node"))
    assert "another-node" in lease.read_text(), "the lease names its machine"
    lock_study(tmp_path, "s").release()


def test_a_folder_that_cannot_be_written_is_no_other_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        lock_study(tmp_path / "file", "s")
