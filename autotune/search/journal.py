"""A study in a journal: a file of lines that is only appended to, for file systems on which SQLite cannot lock.

The file and its lock are Optuna's, made for NFS (the lock is a file that only one process can make). What is added here:
the line of a process that was killed, or found the disk full, in the middle of it is cut off before the next is appended,
which would otherwise run into it and end the journal for good; and a journal that is gone is noticed instead of begun anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

_BLOCK_BYTES = 4096  # read at a time from the end; a line has hundreds of bytes


class _Lock(JournalFileOpenLock):
    """Whoever holds it finds whole lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        super().acquire()
        try:
            cut_torn_line(self._path)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        with suppress(RuntimeError):  # another process has taken it from one that was stopped for half a minute
            super().release()


class JournalFile(JournalFileBackend):
    """The file behind an `optuna.storages.JournalStorage`.

    Its methods raise StorageInternalError where the file cannot be read or written, as databases do.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Lock(path))
        self._path = path

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        with _failures():
            self._note_size()
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with _failures():
            self._note_size()
            super().append_logs(logs)

    def _note_size(self) -> None:
        """Raises OSError where the file is gone or is another one: to go on would begin a journal without its study."""
        whole = next(reversed(self._log_number_offset.values()))  # bytes of the lines that this process has read
        if os.stat(self._path).st_size < whole:
            raise OSError(f"{self._path.name} is shorter than it was")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageInternalError(error.strerror or str(error)) from error


def cut_torn_line(path: Path) -> None:
    """Cuts off what follows the last end of a line: nobody was ever told that it was written."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
