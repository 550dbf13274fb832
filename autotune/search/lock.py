"""Lock that lets one process hold a study: a kernel lock, or a lease on file systems without locks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, SoftFileLease, Timeout, UnixFileLock

from autotune.errors import UserError

# On a file system without locks, a holder on another machine counts as dead after this many seconds without renewal.
# Holders renew three times per period. A dead holder on this machine is detected at once.
_LEASE_SECONDS = 20.0
_PATIENCE_SECONDS = 1.2 * _LEASE_SECONDS  # seconds; wait for a holder that may be dead

_MALFORMED_SECONDS = 2.0  # seconds after which filelock takes over a malformed marker
_MOST_PLACES = 64


def hold(folder: Path, study: str) -> BaseFileLock:
    """Hold the study in a folder until this process ends or the lock is released.

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
        if error.filename is not None:  # the file cannot be created; a refused lock names no file
            raise
        # No locks: ENOSYS on Lustre without `-o flock`, ENOLCK on NFS without a lock daemon, EOPNOTSUPP, EINVAL.
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
    """Return inode and change time of an empty file, or None if it is not empty."""
    return None if about.st_size else (about.st_ino, about.st_ctime_ns)


def _condemned(marker: Path, nobodys: tuple[int, int]) -> bool:
    """Write to the empty marker if it is unchanged, and return whether it was.

    Its creator was killed before it wrote its identity, or a power failure lost the text. filelock waits forever for an
    empty marker but takes over a malformed one. Writing through the open file cannot reach a newer file of that name.
    """
    with suppress(OSError), marker.open("r+", encoding="utf-8") as file:
        if _empty(os.fstat(file.fileno())) == nobodys:
            file.write("nobody\n")
            return True
    return False


def hold_a_place(folder: Path, study: str) -> tuple[Path, BaseFileLock]:
    """Hold a folder for one of several tuners that write below the same study folder.

    Returns:
        The study's folder, or a subfolder if another tuner holds it, and the lock.

    Raises:
        UserError: all of the allowed folders are held.
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
