"""Files that a reader never sees half of, and a folder for sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from autotune.errors import MachineTrouble, UserError
from autotune.masking import masked_values

# A Unix socket's path has 108 bytes, the last of them zero (`man 7 unix`); of these a folder of `SocketFolder` and a
# socket's name in it take at most 40.
_LONGEST_BASE_BYTES = 107 - 40
# Errors of a disk or a file system that fails, whatever is written: never those of a name or a right.
_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
_HELD = "held"  # the file that is locked in a folder of sockets


def cache_root() -> Path:
    """Where what can be made again is kept, made or not."""
    root = os.environ.get("AUTOTUNE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "autotune"


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file of which a reader never sees half, after a power cut neither. A link goes on pointing to its file; a pipe,
    a terminal or a device is written to as it is. The umask decides who may read a new file; one that is replaced keeps its
    mode. Text is UTF-8, and known secrets in it are masked.

    Args:
        private: secrets are kept, since a later call starts the same command with them; nobody but the user may read the file.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    text = content if private or isinstance(content, bytes) else masked_values(content)
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.write(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else the new name may reach the disk before the content does
        os.chmod(name, 0o600 if private else _mode(path))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _mode(path: Path) -> int:
    """Return the mode of a file that is replaced, or the one that the umask gives a new file."""
    with suppress(OSError):
        return path.stat().st_mode & 0o777
    with suppress(OSError):  # os.umask() sets it for all threads in order to read it
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("Umask:"):
                return 0o666 & ~int(line.split()[1], 8)
    return 0o600


def disk_fails(error: OSError) -> bool:
    """Return whether the disk refuses, full or broken, as opposed to a file that cannot be had."""
    return error.errno in _FAILS


def cannot_write(path: Path, error: OSError, remedy: str) -> UserError | MachineTrouble:
    """Return the error of a file that was not written: the machine's where the disk refuses, else the user's."""
    why = error.strerror or errno.errorcode.get(error.errno or 0, "unknown")
    if disk_fails(error):
        return MachineTrouble(f"{path} cannot be written ({why}): make room, or {remedy}")
    return UserError(f"{path} cannot be written ({why}): {remedy}")


def remove_file(path: Path) -> None:
    """Removes the file that a path leads to, where there is one: a link stays, for the next to be written to its place, and so
    does a pipe, a terminal or a device.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_file():
        Path(os.path.realpath(path)).unlink()


def _sync_folder(folder: Path) -> None:
    """Has the names in a folder reach the disk; some file systems cannot be asked for that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class SocketFolder:
    """A new temporary folder in which a Unix socket can be bound and a file locked: not under a TMPDIR whose path is too long
    for that, as batch systems like to give, nor on a file system that refuses either (some FUSE, Lustre without `flock`).
    Whoever makes the next one also removes those whose process was killed.

    Args:
        prefix: of its name; folders of one prefix have one sort of owner.

    Raises:
        OSError: no temporary folder can be written to.
    """

    def __init__(self, prefix: str) -> None:
        usual = tempfile.gettempdir()
        bases = [base for base in (usual, "/tmp", "/var/tmp") if len(os.fsencode(base)) <= _LONGEST_BASE_BYTES]
        for base in bases:
            with suppress(OSError):
                self._make(prefix, base)
                return
        self._make(prefix, usual, strict=False)  # what is missing is met, and said, where it is needed

    def _make(self, prefix: str, base: str, strict: bool = True) -> None:
        """Makes it in a temporary folder; `strict`: or leaves nothing where no socket or no lock can be had."""
        for left in Path(base).glob(f"{prefix}*/{_HELD}"):
            with suppress(OSError):
                _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._held = os.open(self.path / "new", os.O_CREAT | os.O_RDWR)  # locked as long as this process lives
        # systemd-tmpfiles removes what is ten days old from /tmp, but for folders that are locked themselves: tmpfiles.d(5)
        self._kept = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(self._kept, fcntl.LOCK_SH)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX)
            os.rename(self.path / "new", self.path / _HELD)  # whoever finds it by this name finds it locked
            _try_socket(self.path / "try")
        except OSError:
            if strict:
                self.close()
                raise

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)
        os.close(self._kept)


def _try_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as tried:
        tried.bind(str(path))
    path.unlink()


def _remove_if_left(held: Path) -> None:
    """Removes the folder of a process that is gone."""
    descriptor = os.open(held, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(held.parent, ignore_errors=True)
    finally:
        os.close(descriptor)
