import errno
import os
import sqlite3
from pathlib import Path

import optuna
import pytest
from sqlalchemy.exc import OperationalError

from autotune.errors import UserError
from autotune.search.servers import hide_password
from autotune.search.storage import failures_in_one_line, make_study_folder, open_storage


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
    with pytest.raises(UserError) as caught, failures_in_one_line():
        raise error
    assert said in str(caught.value)
    assert "what was measured is kept" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(PermissionError), failures_in_one_line():
        raise PermissionError(errno.EPERM, "no")
    with pytest.raises(ValueError), failures_in_one_line():
        raise ValueError
