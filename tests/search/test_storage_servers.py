"""Database servers: URLs, passwords that nobody sees, and a server that is away for a while."""

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from sqlalchemy.exc import PendingRollbackError

from autotune.errors import MachineError, UserError
from autotune.masking import hide_password, without_secrets
from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search import storage
from autotune.search.storage import failures_in_one_line, is_server, open_storage
from autotune.search.study import StudyStore
from autotune.util.units import MIB
from tests.conftest import make_candidate, make_job
from tests.postgres import Postgres

SPACE = load_space("cpu_demo")
OK = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.1, 3, 8.0, 256.0, 100 * MIB))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://joe:s3cr3t@host/db", "postgresql://joe:***@host/db"),
        ("postgresql://:s3cr3t@host/db", "postgresql://:***@host/db"),
        ("postgresql+psycopg://joe:s3/cr:3t@host/db", "postgresql+psycopg://joe:***@host/db"),
        ("mysql://joe:s3@cr3t@host/db", "mysql://joe:***@host/db"),
        ("postgresql://host/db?user=joe&password=s3cr3t", "postgresql://host/db?user=joe&password=***"),
        ("postgresql://host/db?sslpassword=s3cr3t&a=b", "postgresql://host/db?sslpassword=***&a=b"),
        ("postgresql://joe:s3cr3t/db", "postgresql://joe:***/db"),
        ("postgresql://joe:s3 cr3t@host/db", "postgresql://joe:***@host/db"),
        ("--storage=mysql+pymysql://joe:s 3@c r3t@host/db", "--storage=mysql+pymysql://joe:***@host/db"),
        ("--storage=postgres://joe:s3cr3t@host/db", "--storage=postgres://joe:***@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://joe@host:5432/db", "postgresql://joe@host:5432/db"),
        ("sqlite:///runs/a/study.db", "sqlite:///runs/a/study.db"),
        ("train.py", "train.py"),
    ],
)
def test_passwords_are_hidden_wherever_they_stand(url: str, shown: str) -> None:
    assert hide_password(url) == shown


def test_a_password_is_hidden_in_what_others_say_of_it() -> None:
    url = "postgresql://joe:s3%40cr@host/db"
    assert "cr" not in without_secrets("invalid password 's3@cr' (or s3%40cr)", url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://joe:se@cret@host/db", "%40"),
        ("postgresql://joe:secret@host", "names no database"),
        ("postgresql://joe:se cret@host", "names no database"),
        ("postgresql://joe:se cret@127.0.0.1:1/db", "cannot be opened"),
        ("postgresql://joe:s e@cret@host/db", "%40"),
        ("postgresql://joe:secret/db", "does not parse"),
        ("postgresql+nodriver://joe:secret@host/db", "expected the driver psycopg"),
        ("postgresql://joe:secret@127.0.0.1:1/db", "cannot be opened"),
        ("postgresql://joe:se{cr}et@127.0.0.1:1/db", "cannot be opened"),
        ("mysql://joe:secret@127.0.0.1:1/db", "(?i)cannot be opened|no driver"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line_without_its_password(url: str, words: str) -> None:
    assert is_server(url)
    with pytest.raises(UserError, match=words) as caught:
        open_storage(url)
    assert "cret" not in str(caught.value)
    assert "se{" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[[str], object] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psycopg" else found(name))
    with pytest.raises(UserError, match=r"pip install 'psycopg\[binary\]'"):
        open_storage("postgres://joe:secret@host/db")


def opened(server: Postgres, folder: Path) -> StudyStore:
    return StudyStore.create_or_resume("s", server.url, folder, make_job(), detect("cpu", 2), SPACE)[0]


def test_a_wrong_password_is_one_line(postgres: Postgres) -> None:
    wrong = postgres.url.replace(postgres.password, "wr0ng")
    with pytest.raises(UserError, match=r"joe:\*\*\*@.*password authentication failed") as caught:
        open_storage(wrong)
    assert "wr0ng" not in str(caught.value)


def test_braces_in_a_password_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = list[str]()

    def fill(self: object, template: str, **_: object) -> None:
        filled.append(template.format())  # by Optuna
        raise ValueError("connection refused")

    url = "postgresql://joe:s{3}@host/db"
    monkeypatch.setattr(storage.optuna.storages.RDBStorage, "__init__", fill)
    monkeypatch.setattr(storage, "_with_driver", lambda url: (url, "psycopg"))
    with pytest.raises(UserError):
        open_storage(url)
    assert filled == [url]


def test_connections_that_are_cut_lose_nothing(postgres: Postgres, tmp_path: Path) -> None:
    store = opened(postgres, tmp_path)
    number = store.start(make_candidate(0), SPACE)
    assert postgres.cut() > 0
    store.finish(number, OK)
    assert postgres.cut() > 0
    assert [record.outcome for record in store.records()] == [OK]


def test_what_is_cut_off_in_the_middle_is_done_again(postgres: Postgres, tmp_path: Path) -> None:
    store = opened(postgres, tmp_path)
    database = store.study._storage._backend  # type: ignore[attr-defined]
    cuts = [True, True]

    def cut_off(*_: object) -> None:
        if cuts:  # after it was tried, before its statement
            cuts.pop()
            postgres.cut()

    storage.event.listen(database.engine, "before_cursor_execute", cut_off)
    store.note_command("autotune run")
    assert not cuts
    assert store.commands == ("autotune run",)
    cuts.append(True)
    database._get_stale_trial_ids(0)


@pytest.mark.slow
def test_a_server_that_comes_back_is_waited_for(postgres: Postgres, tmp_path: Path) -> None:
    store, lines = opened(postgres, tmp_path), list[str]()
    store.share(lines.append)
    try:
        number = store.start(make_candidate(0), SPACE)
        postgres.stop()
        starting = threading.Timer(1.5, postgres.start)
        starting.start()
        store.finish(number, OK)
        starting.join()
    finally:
        store.leave()
    assert [record.outcome for record in store.records()] == [OK]
    assert lines[0].startswith("the study's database is away")
    assert lines[-1] == "the study's database is back"


def test_a_connection_that_was_lost_a_statement_earlier_is_cut_off() -> None:
    error = optuna.exceptions.StorageInternalError("An exception is raised during the commit.")
    error.__cause__ = PendingRollbackError("Can't reconnect until invalid transaction is rolled back.")
    tries = [error, error]

    def method() -> str:
        if tries:
            raise tries.pop()
        return "done"

    assert storage._again(method)() == "done"


def test_every_outage_is_waited_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody waited out, the lease's thread least of all, leaves no impatience behind."""
    monkeypatch.setattr(storage, "AWAY_SECONDS", 0.0)
    database = storage.ServerStorage.__new__(storage.ServerStorage)
    database.url, database.print_line, database._patience_seconds = "postgresql://host/db", print, 0.0

    class Dialect:
        class loaded_dbapi:
            Error = OSError

        def __init__(self, away: int) -> None:
            self.away = away

        def connect(self) -> str:
            self.away -= 1
            if self.away >= 0:
                raise OSError("refused")
            return "connection"

    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="refused"):
        database._connect(Dialect(10**9), None, (), {})
    monkeypatch.setattr(storage, "AWAY_SECONDS", 60.0)
    assert database._connect(Dialect(0), None, (), {}) == "connection"
    assert database._connect(Dialect(3), None, (), {}) == "connection", "it is waited for again"


@pytest.mark.slow
def test_a_server_that_does_not_is_the_machines_trouble(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AWAY_SECONDS", 1.0)
    store = opened(postgres, tmp_path)
    postgres.stop()
    with pytest.raises(MachineError, match="the study's database fails") as caught, failures_in_one_line():
        store.start(make_candidate(0), SPACE)
    assert postgres.password not in str(caught.value)
    assert "\n" not in str(caught.value)
