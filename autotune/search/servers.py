"""A study in a database server: PostgreSQL or MySQL. What its URL comes to, and what happens while it cannot be reached.

The server may be restarted, and a connection be cut, while trials run, which need no database for minutes. So a connection
is tried before it is used, one that cannot be had is waited for, and what was cut off in the middle is done again.
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

AWAY_SECONDS = 60.0  # that a server which was there before may be away
_TRIES = 4  # of what was cut off in the middle
_CONNECT_SECONDS = 10  # until a host that does not answer is one that is away
_SILENT_MS = 20_000  # a link on which nothing is acknowledged for so long is cut

_NAMES = {"postgres": "postgresql", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
# SQLAlchemy's names of drivers, and their modules; the first that is installed is used
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
    """Whether it names a database server of a kind that is known here."""
    return url.partition("://")[0].partition("+")[0].lower() in _NAMES and "://" in url


def what_it_says(error: BaseException) -> str:
    """A driver's own reason in one line."""
    while isinstance(error, optuna.exceptions.StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error.orig if isinstance(error, DBAPIError) and error.orig is not None else error)
    lines = [line.strip(" -") for line in text.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "FATAL:" in line or "failed:" in line]
    return " ".join((telling or lines or [type(error).__name__])[0].split())[:200]


def _cut_off(error: BaseException | None) -> bool:
    """Whether the connection was lost, as opposed to a statement that the database refuses."""
    while error is not None:
        if isinstance(error, DBAPIError):
            return error.connection_invalidated
        if isinstance(error, PendingRollbackError):  # it was lost a statement earlier; Optuna has rolled back meanwhile
            return True
        error = error.__cause__
    return False


def _again(method: Any) -> Any:
    """The method, which does it again where its connection was lost meanwhile. For what may be done twice."""

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
    """Optuna's storage in a server that may be away for a while, once it was reached.

    Args:
        url: as it was typed.

    Raises:
        UserError: it is no URL of a server, or there is no driver for it.
        Exception: whatever SQLAlchemy or the driver raise.
    """

    def __init__(self, url: str) -> None:
        full, driver = _with_driver(url)
        self.say: Callable[[str], None] = lambda text: None
        self._patience_seconds = 0.0
        connecting = {key: value for key, value in _CONNECTING[driver].items() if f"{key}=" not in url}
        super().__init__(
            full.replace("{", "{{").replace("}", "}}"),  # Optuna takes a URL for a template
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
                    self._patience_seconds = 0.0  # nobody waits a second time
                    raise
                if not said:
                    self.say(
                        f"the study's database is away ({without_secrets(what_it_says(error), self.url)}); "
                        f"waiting for up to {AWAY_SECONDS:.0f} s"
                    )
                    said = True
                time.sleep(1.0)
            else:
                self._patience_seconds = AWAY_SECONDS  # whoever waited in vain before, the next outage is another
                if said:
                    self.say("the study's database is back")
                return connection

    # what Optuna and its cache call; a new study and a new trial are not things to do twice, and Optuna repeats the latter
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
    """The URL with the driver that is installed, and that driver.

    Raises:
        UserError: it cannot be read, or no driver is installed.
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
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _refuse(url: str, why: str) -> NoReturn:
    raise UserError(f"--storage {hide_password(url)}: {why}")
