"""Atomic file writes, files of the package, and a folder for sockets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.errors import MachineError, UserError
from autotune.masking import masked_values

# A Unix socket's path has 108 bytes, the last of them zero (`man 7 unix`). A folder of `SocketFolder` and a socket's name in it
# take at most 40 of these.
_LONGEST_BASE_BYTES = 107 - 40
# Errors of a disk or a file system that fails for any file, not errors of a name or a permission.
_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)


def shipped_json(name: str) -> Any:
    """Return the content of a JSON file in `autotune/data`."""
    return json.loads((resources.files("autotune") / "data" / name).read_text(encoding="utf-8"))


def cache_root() -> Path:
    """Return the folder of the cache, which need not exist."""
    root = os.environ.get("AUTOTUNE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "autotune"


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file atomically, so that a reader never sees half of it, even after a power cut.

    A link keeps pointing to its file; a pipe, a terminal or a device is written to directly. The umask sets the mode of a new
    file; a replaced file keeps its mode. Text is UTF-8, and known secrets in it are masked.

    Args:
        private: keep secrets, since a later call starts the same command with them; only the user may read the file.

    Raises:
        OSError: the file cannot be written; the previous contents are still there.
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
            os.fsync(file.fileno())  # otherwise the new name may reach the disk before the contents
        os.chmod(name, 0o600 if private else _mode(path))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _mode(path: Path) -> int:
    """Return the mode of the file to replace, or the umask's mode for a new file."""
    with suppress(OSError):
        return path.stat().st_mode & 0o777
    with suppress(OSError):  # os.umask() must change the mask for all threads to read it
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("Umask:"):
                return 0o666 & ~int(line.split()[1], 8)
    return 0o600


def disk_fails(error: OSError) -> bool:
    """Check that the disk fails (full or broken), as opposed to a single file that is not available."""
    return error.errno in _FAILS


def cannot_write(path: Path, error: OSError, remedy: str) -> UserError | MachineError:
    """Return the error of a file that was not written: the machine's if the disk fails, else the user's."""
    why = error.strerror or errno.errorcode.get(error.errno or 0, "unknown")
    if disk_fails(error):
        return MachineError(f"{path} cannot be written ({why}): make room, or {remedy}")
    return UserError(f"{path} cannot be written ({why}): {remedy}")


def remove_file(path: Path) -> None:
    """Remove the file that a path leads to, if it exists.

    A link stays, so that the next file is written to its target. A pipe, a terminal or a device stays, too.

    Raises:
        OSError: the file cannot be removed.
    """
    if path.is_file():
        Path(os.path.realpath(path)).unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; some file systems do not support that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class SocketFolder:
    """New temporary folder in which a Unix socket can be bound, locked as long as this process lives.

    A TMPDIR whose path is too long, as on many batch systems, is skipped. So are file systems that refuse sockets or locks (some
    FUSE, Lustre without `flock`). Creating a folder also removes those of killed processes. The lock also keeps
    systemd-tmpfiles from removing old entries: tmpfiles.d(5).

    Args:
        prefix: start of its name, which no other folder has.

    Raises:
        OSError: no temporary folder takes sockets and locks.
    """

    def __init__(self, prefix: str) -> None:
        for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
            if len(os.fsencode(base)) <= _LONGEST_BASE_BYTES:
                with suppress(OSError):
                    self._make(prefix, base)
                    return
        raise OSError(errno.ENOTSUP, "No temporary folder takes sockets and locks")

    def _make(self, prefix: str, base: str) -> None:
        for left in Path(base).glob(f"{prefix}*"):
            with suppress(OSError):  # its owner lives
                os.close(_lock_folder(left))
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                tried.bind(str(made / "try"))
            (made / "try").unlink()
            self._held = _lock_folder(made)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))  # a folder with this name is locked

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def _lock_folder(folder: Path) -> int:
    """Return a descriptor that locks a folder.

    Raises:
        OSError: it is locked, or cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
