"""A study is held by one process: with the kernel's lock, or where the file system has none, with a lease."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, SoftFileLease, Timeout, UnixFileLock

from autotune.errors import UserError

# Of a file system without locks. How long a holder on another machine may say nothing until it counts as dead: it says
# something every third of that. A dead holder on this machine is noticed at once.
_LEASE_SECONDS = 20.0
_PATIENCE_SECONDS = 1.2 * _LEASE_SECONDS  # with a holder that may be dead

_MALFORMED_SECONDS = 2.0  # after which filelock takes over a marker that says nonsense
_MOST_PLACES = 64


def hold(folder: Path, study: str) -> BaseFileLock:
    """Holds the study in a folder until this process ends or the lock is released.

    Raises:
        UserError: another run holds it.
        OSError: the folder cannot be written.
    """
    kernels = UnixFileLock(folder / "lock", fallback_to_soft=False)
    try:
        kernels.acquire(timeout=0)
        return kernels
    except Timeout:
        raise _held(study) from None
    except OSError as error:
        if error.filename is not None:  # the file cannot be made; a lock that is refused names no file
            raise
        # ENOSYS of Lustre without `-o flock`, ENOLCK of NFS without a lock daemon, EOPNOTSUPP, EINVAL: there are no locks
    marker = folder / "lock.lease"
    lease = SoftFileLease(marker, lease_duration=_LEASE_SECONDS, thread_local=False)
    nobodys = None
    with suppress(OSError):
        nobodys = _empty(marker.stat())
    try:
        lease.acquire(timeout=_PATIENCE_SECONDS)
    except Timeout:
        if nobodys is None or not _condemned(marker, nobodys):
            raise _held(study) from None
        try:
            lease.acquire(timeout=2 * _MALFORMED_SECONDS)
        except Timeout:
            raise _held(study) from None
    return lease


def _empty(about: os.stat_result) -> tuple[int, int] | None:
    """Which file it is, and of when, if it is empty."""
    return None if about.st_size else (about.st_ino, about.st_ctime_ns)


def _condemned(marker: Path, nobodys: tuple[int, int]) -> bool:
    """Whether the empty marker is still the same: of a process that was killed before it had said who it is, or whose words a
    power cut took. filelock waits for an empty one for ever, and takes one over that says nonsense; what is written through an
    open file can reach no other that has its name by now."""
    with suppress(OSError), marker.open("r+", encoding="utf-8") as file:
        if _empty(os.fstat(file.fileno())) == nobodys:
            file.write("nobody\n")
            return True
    return False


def hold_a_place(folder: Path, study: str) -> tuple[Path, BaseFileLock]:
    """For one of several tuners of a study that write below the same folder: the study's folder, or where another works there,
    a folder in it that nobody else has; and what holds it.

    Raises:
        UserError: very many do.
        OSError: the folder cannot be written.
    """
    for number in range(1, _MOST_PLACES + 1):
        place = folder if number == 1 else folder / f"tuner-{number}"
        place.mkdir(parents=True, exist_ok=True)
        try:
            return place, hold(place, study)
        except UserError:
            continue
    raise _held(study)


def _held(study: str) -> UserError:
    return UserError(
        f"another autotune run holds study {study!r}: wait for it, choose another --study, or give all of them one --storage to "
        "share it"
    )
