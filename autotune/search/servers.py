"""Study in a database server, PostgreSQL or MySQL: URL handling and reconnection.

Trials run for minutes without the database, and during that time the server may restart or a connection may break.
Connections are therefore tested before use. The storage waits for an unavailable server and repeats interrupted
operations.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NoReturn

import optuna
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, PendingRollbackError

from autotune.errors import UserError
from autotune.masking import hide_password, password_in, without_secrets
from autotune.search.trial_rows import RowStorage

AWAY_SECONDS = 60.0  # seconds; wait for a server that was reachable before
_TRIES = 4  # attempts at an interrupted operation
_CONNECT_SECONDS = 10  # seconds until a host without an answer counts as unavailable
_SILENT_MS = 20_000  # milliseconds without acknowledgement after which a connection is closed

_NAMES = {"postgres": "postgresql", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
# SQLAlchemy's driver names and their modules; the first installed one is used.
_DRIVERS = {
    "postgresql": {"psycopg": "psycopg", "psycopg2": "psycopg2", "pg8000": "pg8000"},
    "mysql": {"pymysql": "pymysql", "mysqldb": "MySQLdb", "mysqlconnector": "mysql.connector"},
}
_LIBPQ = {
    "connect_timeout": _CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": _SILENT_MS,
    "application_name": "autotune",
}
_SILENT_SECONDS = _SILENT_MS // 1000
_CONNECTING: dict[str, dict[str, Any]] = {
    "psycopg": _LIBPQ,
    "psycopg2": _LIBPQ,
    "pg8000": {"timeout": _SILENT_SECONDS, "tcp_keepalive": True},
    "pymysql": {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _SILENT_SECONDS, "write_timeout": _SILENT_SECONDS},
    "mysqldb": {"connect_timeout": _CONNECT_SECONDS},
    "mysqlconnector": {"connection_timeout": _CONNECT_SECONDS},
}
INSTALL = {"postgresql": "pip install 'psycopg[binary]'", "mysql": "pip install pymysql"}


def is_server(url: str) -> bool:
    """Return True if the URL names a supported database server."""
    return url.partition("://")[0].partition("+")[0].lower() in _NAMES and "://" in url


def what_it_says(error: BaseException) -> str:
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


class ServerStorage(RowStorage):
    """Optuna's storage in a server that may become unavailable after the first connection.

    Args:
        url: as typed by the user.

    Raises:
        UserError: the URL names no server, or no driver is installed.
        Exception: any error of SQLAlchemy or the driver.
    """

    def __init__(self, url: str) -> None:
        full, driver = _with_driver(url)
        self.say: Callable[[str], None] = lambda text: None
        self._patience_seconds = 0.0
        connecting = {key: value for key, value in _CONNECTING[driver].items() if f"{key}=" not in url}
        super().__init__(
            full.replace("{", "{{").replace("}", "}}"),  # Optuna treats a URL as a template
            engine_kwargs={"pool_pre_ping": True, "connect_args": connecting},
        )
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
                    self.say(
                        f"the study's database is away ({without_secrets(what_it_says(error), self.url)}); "
                        f"waiting for up to {AWAY_SECONDS:.0f} s"
                    )
                    said = True
                time.sleep(1.0)
            else:
                self._patience_seconds = AWAY_SECONDS  # the next outage gets the full wait again
                if said:
                    self.say("the study's database is back")
                return connection

    # Methods that Optuna and its cache call. Creating a study or a trial is not idempotent, and Optuna itself repeats
    # the latter.
    set_study_user_attr = _again(optuna.storages.RDBStorage.set_study_user_attr)
    set_study_system_attr = _again(optuna.storages.RDBStorage.set_study_system_attr)
    get_study_id_from_name = _again(optuna.storages.RDBStorage.get_study_id_from_name)
    get_study_name_from_id = _again(optuna.storages.RDBStorage.get_study_name_from_id)
    get_study_directions = _again(optuna.storages.RDBStorage.get_study_directions)
    get_study_user_attrs = _again(optuna.storages.RDBStorage.get_study_user_attrs)
    get_study_system_attrs = _again(optuna.storages.RDBStorage.get_study_system_attrs)
    get_all_studies = _again(optuna.storages.RDBStorage.get_all_studies)
    set_trial_user_attr = _again(optuna.storages.RDBStorage.set_trial_user_attr)
    set_trial_system_attr = _again(optuna.storages.RDBStorage.set_trial_system_attr)
    set_trial_intermediate_value = _again(optuna.storages.RDBStorage.set_trial_intermediate_value)
    set_trial_state_values = _again(optuna.storages.RDBStorage.set_trial_state_values)
    get_trial = _again(optuna.storages.RDBStorage.get_trial)
    _get_trials = _again(RowStorage._get_trials)
    _get_best_trial_id = _again(optuna.storages.RDBStorage._get_best_trial_id)


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
    drivers = _DRIVERS[server]
    if driver and driver not in drivers:
        _refuse(url, f"expected one of the drivers {', '.join(drivers)}, or {server}:// alone")
    for one in [driver] if driver else drivers:
        if _installed(drivers[one]):
            return f"{server}+{one}://{rest}", one
    _refuse(url, f"no driver for {driver or server} is installed: {INSTALL[server]}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module's package is not installed
        return False


def _refuse(url: str, why: str) -> NoReturn:
    raise UserError(f"--storage {hide_password(url)}: {why}")
