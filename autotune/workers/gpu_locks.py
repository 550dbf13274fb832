"""Locks that give a GPU to one study or training at a time.

Two of them on one card would attribute each other's memory and speed to a candidate. Each card has a file in /tmp named
by its UUID, which the holder keeps locked. The place does not depend on TMPDIR, which may differ between two shells.
The kernel releases the lock whenever the holder ends. The file remains, because removing it would race with the next
holder.

Any user can create that name in /tmp: as a link, a FIFO or a file of other content. Only a regular file with one link and
with a holder's line in it is locked and written.

`filelock` is not used: it truncates the file when it tries the lock, and the file names the holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.hardware import Hardware

FOLDER = Path("/tmp")
_PATIENCE_SECONDS = 0.2  # `lock_holder` takes the lock for a moment to test it
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block the open
_HOLDER = re.compile(r".+, pid \d+, since [-\d]+ [:\d]+", re.DOTALL)
_MOST_BYTES = 400  # of a holder's line


@contextmanager
def lock_gpus(hardware: Hardware, who: str, print_line: Callable[[str], None]) -> Iterator[None]:
    """Hold the GPUs of `hardware` for this process. CPU ranks have none, and neither have GPUs that are only named.

    Args:
        who: name of the holder in messages of other processes: `study NAME`.

    Raises:
        UserError: another autotune process holds one of the GPUs.
    """
    descriptors: list[int] = []
    try:
        for uuid in hardware.gpus:
            try:
                descriptors.append(_open(uuid))
                held = _lock(descriptors[-1], _PATIENCE_SECONDS)
            except OSError as error:
                print_line(f"{lock_file(uuid)} cannot be held ({error.strerror}): another study may take the same GPU")
                continue
            if not held:
                raise UserError(
                    f"{uuid} is in use by autotune ({_holder(descriptors[-1])}): wait for it, "
                    "or choose other GPUs with CUDA_VISIBLE_DEVICES"
                )
            os.ftruncate(descriptors[-1], 0)
            since = f", pid {os.getpid()}, since {time.strftime('%F %T')}".encode()
            os.pwrite(descriptors[-1], who.encode()[: _MOST_BYTES - len(since)] + since, 0)
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def lock_holder(uuid: str) -> str:
    """Return the holder of a GPU, or an empty string if it is free."""
    with suppress(OSError):
        descriptor = _open_existing(lock_file(uuid))
        try:
            return "" if _lock(descriptor) else _holder(descriptor)
        finally:
            os.close(descriptor)
    return ""


def lock_file(uuid: str) -> Path:
    """Return the lock file of a GPU."""
    return FOLDER / f"autotune-{uuid}.lock"


def _open(uuid: str) -> int:
    """Open the lock file, which any user of the machine may open.

    In a folder like /tmp, the kernel refuses O_CREAT on another user's file (fs.protected_regular). An existing file is
    therefore opened without it.
    """
    path = lock_file(uuid)
    with suppress(FileNotFoundError):
        return _open_existing(path)
    with suppress(FileExistsError):
        descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            os.fchmod(descriptor, 0o666)  # independent of the umask
        return descriptor
    return _open_existing(path)  # created in between


def _open_existing(path: Path) -> int:
    """Open a lock file.

    Raises:
        OSError: it cannot be opened, or is no lock file of autotune.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket, a folder
            raise _not_ours(path) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= _MOST_BYTES:
        text = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")
        if not text or _HOLDER.fullmatch(text):
            return descriptor
    os.close(descriptor)
    raise _not_ours(path)


def _not_ours(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no lock file of autotune: remove it", str(path))


def _lock(descriptor: int, patience_seconds: float = 0.0) -> bool:
    until = time.monotonic() + patience_seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").strip() or "another process"
