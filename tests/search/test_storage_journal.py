"""Studies in a journal: on file systems where SQLite cannot lock, or by `--storage journal:FILE`."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError

from autotune.errors import MachineError, UserError
from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search.storage import cut_torn_line, failures_in_one_line, open_storage
from autotune.search.study import StudyStore
from tests.conftest import make_candidate, make_job

SPACE = load_space("cpu_demo")
OK = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.1, 3, 8.0, 256.0, 100))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"journal:{tmp_path / 'study.journal'}"


def opened(url: str, folder: Path) -> StudyStore:
    return StudyStore.create_or_resume("s", url, folder, make_job(), detect("cpu", 2), SPACE)[0]


def measure(store: StudyStore, stage: int) -> int:
    number = store.start(make_candidate(stage), SPACE)
    store.finish(number, OK)
    return number


def test_a_process_killed_in_the_middle_of_a_line_loses_nothing_that_was_finished(url: str, tmp_path: Path) -> None:
    store = opened(url, tmp_path)
    done = [measure(store, stage) for stage in (0, 1)]
    flying = store.start(make_candidate(2), SPACE)
    journal = tmp_path / "study.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":8,"worker_id":"x-1","trial_id":2,"user_attr":{"outc')
    again = opened(url, tmp_path)
    assert again.close_interrupted() == 1
    later = measure(again, 3)
    records = opened(url, tmp_path).records()
    assert [record.number for record in records] == [*done, flying, later]
    assert [record.outcome.kind for record in records if record.outcome] == [
        OutcomeKind.OK,
        OutcomeKind.OK,
        OutcomeKind.INTERRUPTED,
        OutcomeKind.OK,
    ]


def test_a_disk_that_is_full_in_the_middle_of_a_line(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(url, tmp_path)
    done = measure(store, 0)
    sync = os.fsync

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device"), failures_in_one_line():
        store.start(make_candidate(1), SPACE)
    monkeypatch.setattr(os, "fsync", sync)
    again = opened(url, tmp_path)
    again.close_interrupted()
    later = measure(again, 2)
    records = opened(url, tmp_path).records()
    assert [record.number for record in records if record.outcome and record.outcome.ok] == [done, later]


@pytest.mark.parametrize("size", [0, 1, 100, 4095, 4096, 4097, 20_000])
def test_only_what_follows_the_last_line_is_cut(size: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"one\ntwo\n" + b"x" * size)
    cut_torn_line(path)
    assert path.read_bytes() == b"one\ntwo\n"
    path.write_bytes(b"x" * size)
    cut_torn_line(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("what", ["gone", "replaced"])
def test_a_journal_that_is_gone_is_not_begun_anew(what: str, url: str, tmp_path: Path) -> None:
    store, journal = opened(url, tmp_path), tmp_path / "study.journal"
    measure(store, 0)
    journal.unlink()
    if what == "replaced":
        journal.write_text("")
    with pytest.raises(StorageInternalError):
        store.start(make_candidate(1), SPACE)
    with pytest.raises(MachineError, match="the study's database fails"), failures_in_one_line():
        store.records()
    assert not journal.exists() or not journal.stat().st_size


def test_a_journal_that_is_none(url: str, tmp_path: Path) -> None:
    (tmp_path / "study.journal").write_bytes(b"\x00\x01no journal\n" * 3)
    with pytest.raises(UserError, match=r"no journal that can be read.*kept as it is") as caught:
        open_storage(url)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "study.journal").read_bytes() == b"\x00\x01no journal\n" * 3
    with pytest.raises(UserError, match="no folder"):
        open_storage(f"journal:{tmp_path}/nowhere/study.journal")
    with pytest.raises(UserError, match="is a folder"):
        open_storage(f"journal:{tmp_path}")
    for url in ("journal:/dev/zero", "sqlite:////dev/zero"):  # it has no end
        with pytest.raises(UserError, match="a device or a pipe; expected a file"):
            open_storage(url)


def test_a_lock_that_a_killed_process_left_is_taken_over(url: str, tmp_path: Path) -> None:
    from autotune.search.storage import _Lock

    opened(url, tmp_path)
    path = tmp_path / "study.journal"
    left = _Lock(path)
    left.acquire()
    other = _Lock(path)
    other.grace_period = 0.2  # type: ignore[assignment]
    other.acquire()
    left.release()  # of a process that was only stopped: not an error, and not the other's lock
    other.release()
    assert not Path(f"{path}.lock").exists()


def test_processes_beside_each_other(url: str, tmp_path: Path) -> None:
    opened(url, tmp_path)
    writer = (
        "import sys\nfrom autotune.search.study import StudyStore\nfrom tests.search.test_storage_journal import measure\n"
        "store = StudyStore.load('s', sys.argv[1])\nfor _ in range(5):\n    measure(store, 1)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", writer, url]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    records = opened(url, tmp_path).records()
    assert [record.number for record in records] == list(range(10))
    assert all(record.outcome == OK for record in records)


def test_the_journal_opens_in_plain_optuna(url: str, tmp_path: Path) -> None:
    measure(opened(url, tmp_path), 1)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    study = optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend))
    assert study.best_value == 8.0
    assert study.best_params["zero_stage"] == 1
