"""Study storage in SQLite, a journal or a database server, and the lock of a study."""

from __future__ import annotations

import errno
import functools
import importlib.util
import io
import itertools
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import optuna
from filelock import BaseFileLock, SoftFileLease, Timeout, UnixFileLock
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages._rdb import models
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
)
from sqlalchemy.schema import CreateTable

from autotune.errors import MachineError, UserError
from autotune.masking import hide_password, password_in, without_secrets
from autotune.util.bounds import MOST_BYTES, bounded_bytes
from autotune.util.file_systems import file_system_of
from autotune.util.files import cannot_write, disk_fails

# -- storage -----------------------------------------------------------------------------------------------------------
#
# Storage of a study: its URL, checks before it is opened, and error messages.
#
# The default is `study.db` (SQLite) in the study's folder, or `study.journal` on a network file system. `--storage`
# names another one.

_SQLITE, _JOURNAL = "sqlite:///", "journal:"  # URL prefixes
DATABASES = ("study.db", "study.journal")  # files in a study's folder, by precedence
_DISK_FAILS = re.compile("disk I/O error|is full")  # SQLite's messages
# first bytes of a rollback journal, and also its last bytes if it names a super-journal
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_TRIES = 4  # attempts at an operation that the network or another process interrupts
AWAY_SECONDS = 60.0  # seconds; wait for a server that was reachable before, or for the write of another process
HEARTBEAT_SECONDS = 10  # seconds between heartbeats of a running trial
# A trial without a heartbeat is closed after the time that its tuner may wait for the database.
_HEARTBEAT: dict[str, Any] = {"heartbeat_interval": HEARTBEAT_SECONDS, "grace_period": int(AWAY_SECONDS)}


def record_heartbeat(trial: optuna.Trial) -> None:
    """Store a heartbeat of a running trial, without which peer tuners close it."""
    storage = trial.study._storage
    assert isinstance(storage, BaseHeartbeat)
    storage.record_heartbeat(trial._trial_id)


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
    """Check that nothing directly in a study's folder is a link. autotune creates none, and would write through it.

    Raises:
        UserError: a file or a folder is a link.
    """
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_symlink():
            raise UserError(f"{entry} is a link, and files are written there: remove it, or name a file with --out")


def open_storage(url: str, *, reading: bool = False) -> optuna.storages.BaseStorage:
    """Return the database behind a URL.

    Args:
        reading: the caller stores nothing. A file must exist but need not be writable.

    Raises:
        UserError: the database cannot be opened; the message never contains the password.
        MachineError: the disk fails or is full.
    """
    try:
        if url.startswith(_JOURNAL):
            return _open_journal(Path(url.removeprefix(_JOURNAL)), reading)
        if url.startswith(_SQLITE):
            _check_sqlite(Path(make_url(url).database or ""), reading)
        return _database(url)
    except (UserError, MachineError):
        raise
    except Exception as error:  # any error of SQLAlchemy or a driver
        if (isinstance(error, OSError) and disk_fails(error)) or _DISK_FAILS.search(str(error)):
            raise MachineError(
                f"the study cannot be stored ({driver_message(error)}): make room and run again"
            ) from None
        raise UserError(
            f"--storage {hide_password(url)} cannot be opened: {without_secrets(driver_message(error), url)}; expected "
            "something like sqlite:///runs/NAME/study.db, journal:runs/NAME/study.journal or "
            "postgresql://USER:PASSWORD@HOST/DB"
        ) from None


def _database(url: str) -> optuna.storages.RDBStorage:
    for left in reversed(range(_TRIES)):
        try:
            if is_server(url):
                return ServerStorage(url)
            connecting = {"timeout": AWAY_SECONDS, "factory": _BoundedConnection}
            engine = {"connect_args": connecting} if "sqlite" in url else None
            return optuna.storages.RDBStorage(_as_template(url), engine_kwargs=engine, **_HEARTBEAT)
        except (IntegrityError, ProgrammingError, OperationalError) as error:
            # Another tuner creates the tables of a new database at the same time. PostgreSQL raises the first error.
            if not left or not re.search("(?i)already exists|duplicate|UNIQUE constraint", str(error)):
                raise
            time.sleep(0.5)
    raise AssertionError("the last try returns or raises")


def _as_template(url: str) -> str:
    """Return a URL with doubled braces, because Optuna formats it."""
    return url.replace("{", "{{").replace("}", "}}")


class _BoundedConnection(sqlite3.Connection):
    """Connection to SQLite with values of bounded length, and a schema that calls nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        self.execute("PRAGMA trusted_schema = OFF")


def _open_journal(path: Path, reading: bool) -> optuna.storages.JournalStorage:
    _check_file(path, f"--storage {_JOURNAL}{path}", reading)
    if path.exists():
        with path.open("rb") as file:
            first = file.readline(MOST_BYTES)
        if first[:1] not in (b"", b"{") or len(first) == MOST_BYTES:
            raise _unreadable(path, "journal", ValueError("its first line is no log"))
    try:
        return Journal(JournalFile(path))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, "journal", error) from None


def _check_file(path: Path, shown: str, reading: bool) -> None:
    """Raise a UserError if a file cannot be opened, or cannot be created there and is needed for writing."""
    if not path.parent.is_dir():
        raise UserError(f"{shown}: there is no folder {path.parent}; make it, or choose another")
    if path.exists() and not path.is_file():
        raise UserError(f"{shown} is a folder, a device or a pipe; expected a file")
    if path.exists() and not path.stat().st_size:
        _check_empty(path)
    if reading:
        if not path.exists():
            raise UserError(f"{shown}: there is no such file")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: give this user the right to")
    elif not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        raise UserError(f"{path} cannot be written: give this user the right to, or choose another --storage")


def _check_empty(path: Path) -> None:
    """Raise a UserError if a file of size 0 is one of the kernel's, such as /proc/self/mem, and no new study."""
    try:
        # another process may have begun a study in it
        new = not bounded_bytes(path, 1) or path.stat().st_size
    except OSError as error:
        new = isinstance(error, PermissionError)  # reported by the caller
    if not new:
        raise UserError(f"{path} is a file of the kernel: name a file on a disk with --storage, or remove the link")


def _unreadable(path: Path, what: str, error: Exception) -> UserError:
    return UserError(
        f"{path} is no {what} that can be read ({error}); it is kept as it is: move it away or restore a copy, "
        "or choose another --study"
    )


def _check_sqlite(path: Path, reading: bool) -> None:
    """Raise a UserError that explains a faulty SQLite file, before Optuna creates one or fails with its own message."""
    _check_file(path, f"--storage {_SQLITE}{path}", reading)
    _check_rollback_journal(path)
    for beside in (Path(f"{os.path.realpath(path)}{end}") for end in ("-wal", "-shm", "-journal")):
        if beside.is_symlink():  # SQLite opens none
            raise UserError(f"{beside} is a link, and no study has one there: remove it")
    if path.exists() and path.stat().st_size:
        try:
            # `mode=ro` would fail: the next process that opens the file rolls back a killed process's transaction,
            # which needs writing
            address = f"{path.absolute().as_uri()}?mode=rw"
            connecting: dict[str, Any] = {"timeout": AWAY_SECONDS, "factory": _BoundedConnection}
            with closing(sqlite3.connect(address, uri=True, **connecting)) as connection:
                schema = connection.execute("select type, name, tbl_name, sql from sqlite_master").fetchall()
            _check_schema(path, schema)
        except sqlite3.DatabaseError as error:
            if _DISK_FAILS.search(str(error)):
                raise MachineError(
                    f"{path} cannot be read ({error}): make room or repair the disk, and run again"
                ) from None
            if not re.search("locked|readonly|unable to open", str(error)):
                raise _unreadable(path, "SQLite database", error) from None
            raise UserError(
                f"{path} cannot be read now ({error}): another process holds it, or one was killed while it wrote; "
                "end that process, or open the study once as a user who may write its folder"
            ) from None


def _check_schema(path: Path, schema: list[tuple[str, str, str, str | None]]) -> None:
    """Check that a database has no programs: views, triggers, and in Optuna's tables words that are not Optuna's.

    Such words are generated columns, checks, defaults and indexes of expressions. SQLite evaluates them at each read or write.

    Args:
        schema: (type, name, table, SQL) of everything in it.

    Raises:
        UserError: it has one.
    """
    own = {
        name: _schema_words(str(CreateTable(table).compile(dialect=sqlite_dialect())))
        for name, table in models.BaseModel.metadata.tables.items()
    }
    index = {"create", "unique", "index", "on"}
    for kind, name, table, text in schema:
        known = own.get(table, _schema_words(text or ""))
        more = index | {name.lower()} if kind == "index" else set()
        if kind not in ("table", "index") or not _schema_words(text or "") <= known | more:
            raise UserError(f"{path} has a {kind} {name} that no study has: name the database of a study")


def _schema_words(text: str) -> set[str]:
    """Return the words and signs of SQL, without quotes and numbers."""
    return set(re.findall(r"[^\W\d]\w*|[^\s\w\"]", text.lower()))


class StorageFailures:
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
def failures_in_one_line() -> Iterator[StorageFailures]:
    """Turn a failing disk or database of a running study into MachineError.

    The message reports which measurements are kept.
    """
    failing = StorageFailures()
    try:
        yield failing
    except OSError as error:
        if not disk_fails(error) and error.errno != errno.EROFS:
            raise
        said = f"the disk refuses to be written ({os.strerror(error.errno or 0)})"
        raise MachineError(failing.line(said, "make room and run again")) from None
    except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        said = f"the study's database fails ({hide_password(driver_message(error))})"
        on_server = isinstance(cause, DBAPIError) and not isinstance(cause.orig, sqlite3.Error)
        remedy = "the same command goes on once it is back" if on_server else "make room or repair it and run again"
        raise MachineError(failing.line(said, remedy)) from None


# -- journal -----------------------------------------------------------------------------------------------------------
#
# Study in a journal, a file of appended lines, for file systems on which SQLite cannot lock.
#
# Optuna provides the file and its lock, which work on NFS (the lock is a file that only one process can create). This
# module adds two repairs:
#
# - A killed process or a full disk may leave a partial last line. The next line would be appended to it and make the
#   journal unreadable, so the partial line is removed first.
# - A deleted journal raises an error instead of being created again.


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
        """Yield the logs from a number on.

        Raises:
            StorageInternalError: The disk failed.
        """
        with _failures():
            self._note_size()
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append logs.

        Raises:
            StorageInternalError: The disk failed.
        """
        with _failures():
            self._note_size()
            super().append_logs(logs)

    def _note_size(self) -> None:
        """Raise OSError if the file is missing or was replaced. Appending would start a journal without its study."""
        whole = next(reversed(self._log_number_offset.values()))  # bytes of complete lines that this process has read
        if os.stat(self._path).st_size < whole:
            raise OSError(f"{self._path.name} is shorter than it was")


class Journal(optuna.storages.JournalStorage, BaseHeartbeat):
    """Journal with the heartbeat of Optuna's databases. It compares the clocks of the machines."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Store the time of a heartbeat."""
        with suppress(UpdateFinishedTrialError):
            self.set_trial_system_attr(trial_id, "heartbeat", time.time())

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        running = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        least = time.time() - _HEARTBEAT["grace_period"]
        return [one._trial_id for one in running if one.system_attrs.get("heartbeat", least) < least]

    def get_heartbeat_interval(self) -> int:
        """Return the seconds between two heartbeats."""
        return HEARTBEAT_SECONDS

    def get_heartbeat_stale_trial_callback(self) -> None:
        """Return no callback: a candidate without an outcome is proposed again."""


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
            start = max(0, end - io.DEFAULT_BUFFER_SIZE)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


# -- database servers --------------------------------------------------------------------------------------------------
#
# Study in a database server, PostgreSQL or MySQL: URL handling and reconnection.
#
# Trials run for minutes without the database, and during that time the server may restart or a connection may break.
# Connections are therefore tested before use. The storage waits for an unavailable server and repeats interrupted
# operations.

_SILENT_SECONDS = 20  # seconds without an answer after which a host counts as unavailable

_NAMES = {"postgres": "postgresql", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql"}
_CONNECTING: dict[str, dict[str, Any]] = {
    "psycopg": {
        "connect_timeout": _SILENT_SECONDS,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 2,
        "tcp_user_timeout": 1000 * _SILENT_SECONDS,
        "application_name": "autotune",
    },
    "pymysql": {"connect_timeout": _SILENT_SECONDS, "read_timeout": _SILENT_SECONDS, "write_timeout": _SILENT_SECONDS},
}
INSTALL = {"postgresql": "pip install 'psycopg[binary]'", "mysql": "pip install pymysql"}


def is_server(url: str) -> bool:
    """Return True if the URL names a supported database server."""
    return url.partition("://")[0].partition("+")[0].lower() in _NAMES and "://" in url


def driver_message(error: BaseException) -> str:
    """Return the driver's error message in one line."""
    while isinstance(error, optuna.exceptions.StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error.orig if isinstance(error, DBAPIError) and error.orig is not None else error)
    lines = [line.strip(" -") for line in text.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "FATAL:" in line or "failed:" in line]
    return " ".join((telling or lines or [type(error).__name__])[0].split())[:200]


def _cut_off(error: BaseException | None) -> bool:
    """Return True if the connection was lost, as opposed to a rejected statement."""
    while error is not None:
        if isinstance(error, DBAPIError):
            return error.connection_invalidated
        # an earlier statement lost the connection, and Optuna has rolled back
        if isinstance(error, PendingRollbackError):
            return True
        error = error.__cause__
    return False


def _again(method: Any) -> Any:
    """Wrap an idempotent method so that it is repeated after a lost connection."""

    @functools.wraps(method)
    def patient(*args: Any, **kwargs: Any) -> Any:
        for _ in range(_TRIES - 1):
            try:
                return method(*args, **kwargs)
            except Exception as error:
                if not _cut_off(error):
                    raise
        return method(*args, **kwargs)

    return patient


class ServerStorage(optuna.storages.RDBStorage):
    """Optuna's storage in a server that may become unavailable after the first connection.

    Args:
        url: as typed by the user.

    Raises:
        UserError: the URL names no server, or no driver is installed.
        Exception: any error of SQLAlchemy or the driver.
    """

    def __init__(self, url: str) -> None:
        full, driver = _with_driver(url)
        self.print_line: Callable[[str], None] = lambda text: None
        self._patience_seconds = 0.0
        connecting = {key: value for key, value in _CONNECTING[driver].items() if f"{key}=" not in url}
        engine = {"pool_pre_ping": True, "connect_args": connecting}
        super().__init__(_as_template(full), engine_kwargs=engine, **_HEARTBEAT)
        self._patience_seconds = AWAY_SECONDS
        event.listen(self.engine, "do_connect", self._connect)

    def _connect(self, dialect: Any, record: Any, args: Any, kwargs: Any) -> Any:
        until, said = time.monotonic() + self._patience_seconds, False
        while True:
            try:
                connection = dialect.connect(*args, **kwargs)
            except dialect.loaded_dbapi.Error as error:
                if time.monotonic() > until:
                    self._patience_seconds = 0.0  # later connections fail at once
                    raise
                if not said:
                    self.print_line(
                        f"the study's database is away ({without_secrets(driver_message(error), self.url)}); "
                        f"waiting for up to {AWAY_SECONDS:.0f} s"
                    )
                    said = True
                time.sleep(1.0)
            else:
                self._patience_seconds = AWAY_SECONDS  # the next outage gets the full wait again
                if said:
                    self.print_line("the study's database is back")
                return connection


# Methods that Optuna and its cache call. Creating a study or a trial is not idempotent, and Optuna itself repeats the latter.
for _name in (
    *("set_study_user_attr", "set_study_system_attr", "get_study_id_from_name", "get_study_name_from_id"),
    *("get_study_directions", "get_study_user_attrs", "get_study_system_attrs", "get_all_studies"),
    *("set_trial_user_attr", "set_trial_system_attr", "set_trial_intermediate_value", "set_trial_state_values"),
    *("get_trial", "_get_trials", "_get_best_trial_id", "record_heartbeat", "_get_stale_trial_ids"),
):
    setattr(ServerStorage, _name, _again(getattr(optuna.storages.RDBStorage, _name)))


def _with_driver(url: str) -> tuple[str, str]:
    """Return the URL with an installed driver, and the driver's name.

    Raises:
        UserError: the URL cannot be parsed, or no driver is installed.
    """
    if "@" in password_in(url):
        raise UserError(f"--storage {hide_password(url)}: write the @ in the password as %40")
    scheme, _, rest = url.partition("://")
    name, _, driver = scheme.lower().partition("+")
    server = _NAMES[name]
    try:
        parsed = make_url(f"{server}://{rest}")
    except (ArgumentError, ValueError):
        _refuse(url, f"it does not parse; expected {server}://USER:PASSWORD@HOST/DB")
    if not parsed.database:
        _refuse(url, f"it names no database; expected {server}://USER:PASSWORD@HOST/DB")
    known = _DRIVERS[server]
    if driver not in ("", known):
        _refuse(url, f"expected the driver {known}, or {server}:// alone")
    if importlib.util.find_spec(known) is None:
        _refuse(url, f"no driver for {server} is installed: {INSTALL[server]}")
    return f"{server}+{known}://{rest}", known


def _refuse(url: str, why: str) -> NoReturn:
    raise UserError(f"--storage {hide_password(url)}: {why}")


# -- lock --------------------------------------------------------------------------------------------------------------
#
# Lock that lets one process hold a study: a kernel lock, or a lease on file systems without locks.

# On a file system without locks, a holder on another machine counts as dead after this many seconds without renewal.
# Holders renew three times per period. A dead holder on this machine is detected at once.
_LEASE_SECONDS = 20.0
_PATIENCE_SECONDS = 1.2 * _LEASE_SECONDS  # seconds; wait for a holder that may be dead


def lock_study(folder: Path, study: str) -> BaseFileLock:
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
    lease = SoftFileLease(folder / "lock.lease", lease_duration=_LEASE_SECONDS, thread_local=False)
    try:
        lease.acquire(timeout=_PATIENCE_SECONDS)
    except Timeout:
        raise _held(study) from None
    return lease


def lock_log_dir(folder: Path, study: str) -> tuple[Path, BaseFileLock]:
    """Hold a folder for one of several tuners that write below the same study folder.

    Returns:
        The study's folder, or a subfolder if another tuner holds it, and the lock.

    Raises:
        OSError: the folder cannot be written.
    """
    for number in itertools.count(1):
        place = folder if number == 1 else folder / f"tuner-{number}"
        place.mkdir(parents=True, exist_ok=True)
        try:
            return place, lock_study(place, study)
        except UserError:
            continue
    raise AssertionError("every folder is held")


def _held(study: str) -> UserError:
    return UserError(
        f"another autotune run holds study {study!r}: wait for it, choose another --study, or give all of them one --storage to "
        "share it"
    )
