"""Study in a journal, a file of appended lines, for file systems on which SQLite cannot lock.

Optuna provides the file and its lock, which work on NFS (the lock is a file that only one process can create). This
module adds two repairs:

- A killed process or a full disk may leave a partial last line. The next line would be appended to it and make the
  journal unreadable, so the partial line is removed first.
- A deleted journal raises an error instead of being created again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

_BLOCK_BYTES = 4096  # bytes per read from the end; a line has hundreds of bytes


class _Lock(JournalFileOpenLock):
    """Lock of the journal, which removes a partial last line when it is acquired."""

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
        # another process took the lock over, because this one was suspended for half a minute
        with suppress(RuntimeError):
            super().release()


class JournalFile(JournalFileBackend):
    """The file behind an `optuna.storages.JournalStorage`.

    Raises:
        StorageInternalError: from all methods, if the file cannot be read or written, as with databases.
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
        """Raise OSError if the file is missing or was replaced. Appending would start a journal without its study."""
        whole = next(reversed(self._log_number_offset.values()))  # bytes of complete lines that this process has read
        if os.stat(self._path).st_size < whole:
            raise OSError(f"{self._path.name} is shorter than it was")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageInternalError(error.strerror or str(error)) from error


def cut_torn_line(path: Path) -> None:
    """Remove the text after the last newline. Its write was never confirmed to a caller."""
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
