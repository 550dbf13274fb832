import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from autotune.util.files import SocketFolder, write_atomically


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, "old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_text_is_on_the_disk_before_its_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(found.st_mode) else f"text of {found.st_size}")
        sync(descriptor)

    def rename(old: str, new: Path) -> None:
        done.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    write_atomically(tmp_path / "a.json", "12345")
    assert done == ["text of 5", "name", "folder"]


def test_a_file_system_that_cannot_sync_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "a.json", "x")
    assert (tmp_path / "a.json").read_text() == "x"


def test_a_link_goes_on_pointing_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.html").symlink_to("there/page.html")
    write_atomically(tmp_path / "link.html", "new")
    write_atomically(tmp_path / "link.html", "newer")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "there/page.html").read_text() == "newer"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "a page")
    assert os.read(reader, 100) == b"a page"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("characters", [3, 150])
def test_a_socket_can_be_bound_however_long_the_temporary_folder(
    characters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * characters)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = SocketFolder("test-sockets-")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / "home.sock"))
        assert (folder.path.parent == long) == (len(str(long)) <= 67), "the usual place where that is possible"
    finally:
        folder.close()
    assert not folder.path.exists()


def test_the_folder_is_locked_against_the_removal_of_old_files() -> None:
    """systemd-tmpfiles takes this lock of each folder that it looks into, and leaves those alone of which it has it not."""
    folder = SocketFolder("test-sockets-")
    cleaner = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close()
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)


class NoSockets(socket.socket):
    """As where TMPDIR lies on a file system that has no sockets."""

    def bind(self, address: Any) -> None:
        if str(address).startswith(tempfile.gettempdir() + "/"):
            raise OSError(errno.EPERM, "Operation not permitted")
        super().bind(address)


@pytest.mark.parametrize("lacks", ["sockets", "locks", "rights"])
def test_a_temporary_folder_that_lacks_what_ranks_need_is_passed_over(
    lacks: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path_factory.mktemp("base")
    flock, make = fcntl.flock, tempfile.mkdtemp

    def no_locks(descriptor: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{base}/"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(descriptor, operation)

    def no_rights(prefix: str, dir: str) -> str:
        if dir == str(base):
            raise PermissionError(dir)
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "tempdir", str(base))
    if lacks == "sockets":
        monkeypatch.setattr(socket, "socket", NoSockets)
    elif lacks == "locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    else:
        monkeypatch.setattr(tempfile, "mkdtemp", no_rights)
    folder = SocketFolder("test-sockets-")
    try:
        assert str(folder.path.parent) in ("/tmp", "/var/tmp")
        assert not list(base.iterdir()), "nothing is left in the other"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / "home.sock"))
    finally:
        folder.close()


def test_what_a_killed_process_left_goes_with_the_next(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = tmp_path_factory.mktemp("short")  # for a socket's path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = "import sys, time\nfrom autotune.util.files import SocketFolder\n"
    make += "made = SocketFolder('test-')\nprint(made.path, flush=True)\ntime.sleep(600)\n"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", make], env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "home.sock").write_text("")
        SocketFolder("test-").close()
        assert theirs.exists(), "its owner lives"
        other.kill()
    ours = SocketFolder("test-")
    assert list(tmp_path.iterdir()) == [ours.path]
    ours.close()
