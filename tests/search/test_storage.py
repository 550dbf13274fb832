import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from sqlalchemy.exc import OperationalError

from autotune.errors import MachineError, UserError
from autotune.masking import hide_password
from autotune.problem.hardware import detect
from autotune.problem.space import load_space
from autotune.search.storage import default_storage, failures_in_one_line, make_study_folder, open_storage
from autotune.search.study import StudyStore
from tests.cli_call import call
from tests.conftest import make_job


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:////nowhere/at/all/study.db", "no folder"),
        ("mysqlx://joe:secret@host/db", "cannot be opened"),
        ("postgresql://joe:secret@127.0.0.1:1/db", "cannot be opened"),
        ("nonsense", "cannot be opened"),
    ],
)
def test_storage_urls_that_do_not_work_never_print_the_password(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name", ["lr#2", "a?b", "x%20y", "100%", "naïve 模型", "q'uote", "{SCHEMA_VERSION}", "a{b", "c&d=e"]
)
def test_a_study_may_be_called_as_anybody_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / name
    make_study_folder(folder)
    made = StudyStore.create_or_resume(
        name, default_storage(folder), folder, make_job(), detect("cpu", 2), load_space("cpu_demo")
    )
    assert [path.name for path in folder.iterdir()] == ["study.db"]
    assert [path.name for path in Path("runs").iterdir()] == [name]
    assert StudyStore.load(name).name == StudyStore.load(str(folder)).name == made[0].name == name
    code, out, err = call(monkeypatch, capsys, "show", name)
    assert (code, "no trial has ended yet" in out, err) == (0, True, "")
    (folder / "study.db").write_text("no database")
    with pytest.raises(UserError, match="is no SQLite database that can be read"):
        StudyStore.load(name)


HALF_WRITTEN = """
import os, sqlite3, sys
writer = sqlite3.connect(sys.argv[1], isolation_level=None)
writer.execute("PRAGMA cache_size = 1")  # so that the file itself is written before the end
writer.execute("BEGIN")
for number in range(2000):
    writer.execute("INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, ?, ?)", (f"k{number}", "1" * 200))
os._exit(9)
"""


@pytest.fixture
def half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a study whose tuner was killed amid a write."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/s")
    make_study_folder(folder)
    StudyStore.create_or_resume(
        "s", default_storage(folder), folder, make_job(), detect("cpu", 2), load_space("cpu_demo")
    )
    whole = (folder / "study.db").read_bytes()
    subprocess.run([sys.executable, "-c", HALF_WRITTEN, str(folder / "study.db")])
    assert (folder / "study.db-journal").stat().st_size
    assert (folder / "study.db").read_bytes() != whole
    return folder


@pytest.mark.parametrize("words", [("show", "s"), ("export", "s")])
def test_what_a_killed_tuner_had_half_written_is_undone(
    half_written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    _, out, err = call(monkeypatch, capsys, *words)
    assert "cannot be read" not in out + err
    assert "no SQLite database" not in out + err
    assert not (half_written / "study.db-journal").exists()
    store, _ = StudyStore.create_or_resume(
        "s", default_storage(half_written), half_written, make_job(), detect("cpu", 2), load_space("cpu_demo")
    )
    assert not [key for key in store.study.user_attrs if key.startswith("k")]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("unsupported file format", "is no SQLite database that can be read"),
        ("attempt to write a readonly database", "cannot be read now"),
        ("database or disk is full", "cannot be read"),
    ],
)
def test_what_sqlite_says_of_a_database(
    half_written: Path, monkeypatch: pytest.MonkeyPatch, error: str, said: str
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError(error)

    monkeypatch.setattr("autotune.search.storage.sqlite3.connect", fails)
    with pytest.raises(MachineError if "full" in error else UserError, match=said):
        StudyStore.load("s")


def test_a_database_that_another_process_holds_is_no_broken_one(
    half_written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.storage.AWAY_SECONDS", 0.2)
    holder = sqlite3.connect(half_written / "study.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match=r"cannot be read now \(database is locked\): another process holds it"):
        StudyStore.load("s")
    holder.close()
    StudyStore.load("s")


def test_passwords_are_hidden() -> None:
    assert hide_password("postgresql://joe:s3cr3t@host/db") == "postgresql://joe:***@host/db"


def test_a_study_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    make_study_folder(tmp_path / "runs" / "s")
    make_study_folder(tmp_path / "runs" / "s")
    assert list((tmp_path / "runs" / "s").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        make_study_folder(tmp_path / "file" / "s")


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_database() -> Exception:
    return OperationalError("insert into trials", {}, sqlite3.OperationalError("database or disk is full"))


def failed_in_optuna() -> Exception:
    error = optuna.exceptions.StorageInternalError("An exception is raised during the commit.")
    error.__cause__ = broken_database()
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (full_disk(), "the disk refuses to be written (No space left on device)"),
        (broken_database(), "database fails (database or disk is full)"),
        (failed_in_optuna(), "database or disk is full"),
    ],
)
def test_a_full_disk_and_a_failing_database_are_one_line(error: Exception, said: str) -> None:
    with pytest.raises(MachineError) as caught, failures_in_one_line():
        raise error
    assert said in str(caught.value)
    assert "is kept" not in str(caught.value), "nobody has looked"
    assert "\n" not in str(caught.value)


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(PermissionError), failures_in_one_line():
        raise PermissionError(errno.EPERM, "no")
    with pytest.raises(ValueError), failures_in_one_line():
        raise ValueError
