"""A disk that is full and a database that is gone in the middle of a run: exit code 4, and no word that is not true."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.search.study import StudyStore
from tests.cli_call import call, replay
from tests.studies import study_of_every_kind

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def limit_files(folder: Path) -> None:
    """Refuse every file of this process that grows beyond what the study's database has now."""
    limit_files_to((folder / "study.db").stat().st_size)


def limit_files_to(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def remove(folder: Path) -> None:
    (folder / "study.db").unlink()


def make_folder(folder: Path) -> None:
    remove(folder)
    (folder / "study.db").mkdir()


def overwrite(folder: Path) -> None:
    (folder / "study.db").write_bytes(b"no database" * 1000)


@contextmanager
def limits_restored() -> Iterator[None]:
    """Lift the limit before pytest writes its report."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [limit_files, remove, make_folder, overwrite])
def test_a_run_whose_storage_fails_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    finish, count = StudyStore.finish, 0

    def failing(store: StudyStore, number: int, outcome: object) -> None:
        nonlocal count
        count += 1
        if count == 4:
            assert store.folder is not None
            fault(store.folder)
        finish(store, number, outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(StudyStore, "finish", failing)
    words = ("--study", "s", "--budget", "1h")
    with limits_restored():
        code, out, err = replay(monkeypatch, capsys, TABLE, *words)
    assert code == 4, out + err
    assert "Traceback" not in out + err
    last = err.strip().splitlines()[-1]
    kept = 0
    try:
        kept = sum(1 for one in StudyStore.load("s").records() if one.outcome and one.outcome.ok)
    except Exception:
        assert "cannot be read back" in last, last
    in_files = len(list(Path("runs/s").glob("unsaved-*.json")))
    if "what was measured is kept" in last:
        assert kept + in_files >= 3, last


@pytest.mark.parametrize("words", [("export",), ("report",)])
def test_a_full_disk_is_the_machines_trouble_for_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs")
    with limits_restored():
        limit_files_to(10)
        code, out, err = call(monkeypatch, capsys, *words, "s")
    assert "Traceback" not in out + err
    assert code == 4, err
    assert len(err.strip().splitlines()) == 1
