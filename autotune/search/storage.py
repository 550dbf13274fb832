"""Storage of a study: its URL, checks before it is opened, and error messages.

The default is `study.db` (SQLite) in the study's folder, or `study.journal` on a network file system. `--storage` names
another one.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import optuna
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError

from autotune.errors import MachineTrouble, UserError
from autotune.file_systems import file_system_of
from autotune.files import cannot_write, disk_fails
from autotune.masking import hide_password, without_secrets
from autotune.search.journal import JournalFile
from autotune.search.servers import ServerStorage, is_server, what_it_says
from autotune.search.trial_rows import RowStorage

_SQLITE, _JOURNAL = "sqlite:///", "journal:"  # URL prefixes
DATABASES = ("study.db", "study.journal")  # files in a study's folder, by precedence
BUSY_SECONDS = 60.0  # seconds; SQLite waits for another process's write, then the call ends
_DISK_FAILS = re.compile("disk I/O error|is full")  # SQLite's messages
_JOURNAL_MAGIC = bytes.fromhex(
    "d9d505f920a163d7"
)  # first bytes of a rollback journal, and also its last bytes if it names a super-journal
_FOUNDERS = 4  # tuners that may create the tables of a new database at once


def stored_in(folder: Path) -> str | None:
    """Return the URL of the study in a folder, or None."""
    return next((url_of(folder / file) for file in DATABASES if os.path.exists(folder / file)), None)


def url_of(path: Path) -> str:
    """Return the URL of a study's file. `?`, `#` and `%` in the path are escaped."""
    if path.suffix == ".journal":
        return f"{_JOURNAL}{path}"
    return URL.create("sqlite", database=str(path)).render_as_string()


def default_storage(folder: Path) -> str:
    """Return the URL of a study's own file: the existing one, or the type that its file system supports."""
    file = "study.journal" if file_system_of(folder).on_network else "study.db"
    return stored_in(folder) or url_of(folder / file)


def make_study_folder(folder: Path) -> None:
    """Create `runs/NAME` and write to it once.

    Raises:
        UserError: the folder cannot be created or written, or contains links.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".written-") as written:  # several tuners may try at once
            written.write(b"x" * 4096)
            written.flush()
    except OSError as error:
        raise cannot_write(folder, error, "free or unlock it, or change directory") from None
    check_no_links(folder)


def output_folder(folder: Path | None) -> Path:
    """Return the folder for a study's results: the study's folder, or the current one if that is not writable."""
    return folder if folder is not None and os.access(folder, os.W_OK) else Path()


def output_file(folder: Path | None, name: str) -> Path:
    """Return the path of a result file of a study.

    The study may come from another user, and its folder may contain links to the reader's files. Only a file that the
    reader names is written through a link.

    Raises:
        UserError: the folder contains links.
    """
    out = output_folder(folder)
    if out == folder:
        check_no_links(folder)
    return out / name


def check_no_links(folder: Path) -> None:
    """Check that no file directly in a study's folder is a link. autotune creates none, and would write through it.

    Linked folders are accepted by `commands.remembered`: users keep checkpoints on other disks.

    Raises:
        UserError: a file is a link.
    """
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_symlink() and not entry.is_dir():
            raise UserError(f"{entry} is a link, and files are written there: remove it, or name a file with --out")


def open_storage(url: str, *, reading: bool = False) -> optuna.storages.BaseStorage:
    """Return the database behind a URL.

    Args:
        url: the URL.
        reading: the caller stores nothing. A file must exist but need not be writable.

    Raises:
        UserError: the database cannot be opened; the message never contains the password.
        MachineTrouble: the disk fails or is full.
    """
    try:
        if url.startswith(_JOURNAL):
            return _open_journal(Path(url.removeprefix(_JOURNAL)), reading)
        if url.startswith(_SQLITE):
            _check_sqlite(Path(make_url(url).database or ""), reading)
        return _database(url)
    except (UserError, MachineTrouble):
        raise
    except Exception as error:  # any error of SQLAlchemy or a driver
        if (isinstance(error, OSError) and disk_fails(error)) or _DISK_FAILS.search(str(error)):
            raise MachineTrouble(
                f"the study cannot be stored ({what_it_says(error)}): make room and run again"
            ) from None
        raise UserError(
            f"--storage {hide_password(url)} cannot be opened: {without_secrets(what_it_says(error), url)}; expected "
            "something like sqlite:///runs/NAME/study.db, journal:runs/NAME/study.journal or "
            "postgresql://USER:PASSWORD@HOST/DB"
        ) from None


def _database(url: str) -> optuna.storages.RDBStorage:
    url = url.replace("{", "{{").replace("}", "}}")  # Optuna treats a URL as a template
    for left in reversed(range(_FOUNDERS)):
        try:
            if is_server(url):
                return ServerStorage(url)
            connecting = {"connect_args": {"timeout": BUSY_SECONDS}} if "sqlite" in url else None
            return RowStorage(url, engine_kwargs=connecting)
        except (IntegrityError, ProgrammingError, OperationalError) as error:
            # Another tuner creates the tables of a new database at the same time. PostgreSQL raises the first error.
            if not left or not re.search("(?i)already exists|duplicate|UNIQUE constraint", str(error)):
                raise
            time.sleep(0.5)
    raise AssertionError("the last try returns or raises")


def _open_journal(path: Path, reading: bool) -> optuna.storages.JournalStorage:
    _check_file(path, f"--storage {_JOURNAL}{path}", reading)
    try:
        return optuna.storages.JournalStorage(JournalFile(path))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, "journal", error) from None


def _check_file(path: Path, shown: str, reading: bool) -> None:
    """Raise a UserError if a file cannot be opened, or cannot be created there and is needed for writing."""
    if not path.parent.is_dir():
        raise UserError(f"{shown}: there is no folder {path.parent}; make it, or choose another")
    if path.is_dir():
        raise UserError(f"{shown} is a folder; expected a file")
    if reading:
        if not path.exists():
            raise UserError(f"{shown}: there is no such file")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: give this user the right to")
    elif not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        raise UserError(f"{path} cannot be written: give this user the right to, or choose another --storage")


def _unreadable(path: Path, what: str, error: Exception) -> UserError:
    return UserError(
        f"{path} is no {what} that can be read ({error}); it is kept as it is: move it away or restore a copy, "
        "or choose another --study"
    )


def _check_sqlite(path: Path, reading: bool) -> None:
    """Raise a UserError that explains a faulty SQLite file, before Optuna creates one or fails with its own message."""
    _check_file(path, f"--storage {_SQLITE}{path}", reading)
    _check_rollback_journal(path)
    if path.exists() and path.stat().st_size:
        try:
            # `mode=ro` would fail: the next process that opens the file rolls back a killed process's transaction,
            # which needs writing
            address = f"{path.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)) as connection:
                connection.execute("select count(*) from sqlite_master").fetchone()
        except sqlite3.DatabaseError as error:
            if _DISK_FAILS.search(str(error)):
                raise MachineTrouble(
                    f"{path} cannot be read ({error}): make room or repair the disk, and run again"
                ) from None
            if not re.search("locked|readonly|unable to open", str(error)):
                raise _unreadable(path, "SQLite database", error) from None
            raise UserError(
                f"{path} cannot be read now ({error}): another process holds it, or one was killed while it wrote; "
                "end that process, or open the study once as a user who may write its folder"
            ) from None


class Failing:
    """Error lines for a failing storage, with a summary of the measurements that are kept."""

    def __init__(self) -> None:
        self._left: Callable[[], str] = lambda: ""

    def ask(self, left: Callable[[], str]) -> None:
        """Set the function that describes which measurements a later call will find."""
        self._left = left

    def line(self, what: str, remedy: str) -> str:
        """Return one line: the failure, the remedy, and which measurements are kept."""
        return f"{what}: {remedy}{f'; {left}' if (left := self._left()) else ''}"


def _check_rollback_journal(path: Path) -> None:
    """Check that the rollback journal of an SQLite file names no other file.

    SQLite would delete the named file after a rollback ("super-journal", https://www.sqlite.org/fileformat.html). The
    study's own transactions cover one file and name no other.

    Raises:
        UserError: the journal names a file.
    """
    journal = Path(f"{os.path.realpath(path)}-journal")
    with suppress(OSError), journal.open("rb") as file:
        file.seek(-len(_JOURNAL_MAGIC), os.SEEK_END)
        if file.read() == _JOURNAL_MAGIC:
            raise UserError(f"{journal} would have SQLite delete another file, and no autotune wrote it: remove it")


@contextmanager
def failures_in_one_line() -> Iterator[Failing]:
    """Turn a failing disk or database of a running study into MachineTrouble.

    The message reports which measurements are kept.
    """
    failing = Failing()
    try:
        yield failing
    except OSError as error:
        if not disk_fails(error) and error.errno != errno.EROFS:
            raise
        said = f"the disk refuses to be written ({os.strerror(error.errno or 0)})"
        raise MachineTrouble(failing.line(said, "make room and run again")) from None
    except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        said = f"the study's database fails ({hide_password(what_it_says(error))})"
        on_server = isinstance(cause, DBAPIError) and not isinstance(cause.orig, sqlite3.Error)
        remedy = "the same command goes on once it is back" if on_server else "make room or repair it and run again"
        raise MachineTrouble(failing.line(said, remedy)) from None
