"""A study that can be read and not written: a colleague's, or one in an archive."""

import os
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.outcome import OutcomeKind
from autotune.search.storage import open_storage
from tests.cli_call import call
from tests.studies import study_of_every_kind


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study's folder, as os.access tells it to somebody else; tests may run as root, whom nothing keeps from writing."""
    folder = study_of_every_kind(tmp_path / "theirs" / "runs", (OutcomeKind.OK, OutcomeKind.OOM_DEVICE)).folder
    assert folder is not None
    real = os.access

    def access(path: str | Path, mode: int) -> bool:
        return not (mode & os.W_OK and Path(path).resolve().is_relative_to(folder)) and real(path, mode)

    monkeypatch.setattr(os, "access", access)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "made"), [(("show",), ()), (("export",), ("s.json", "s.meta.json")), (("report",), ("s.html",))]
)
def test_it_is_read_and_what_is_made_of_it_lies_here(
    theirs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    made: tuple[str, ...],
) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in theirs.iterdir()}
    code, out, err = call(monkeypatch, capsys, *words, str(theirs))
    assert code == 0, f"{out}\n{err}"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in theirs.iterdir()} == before
    found = [path.name for path in Path().iterdir()]
    assert all(any(one.startswith(name) for one in found) for name in made), found


def test_a_run_says_that_it_cannot_be_written(theirs: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        open_storage(f"sqlite:///{theirs}/study.db")


@pytest.mark.parametrize("url", ["sqlite:///{}/none.db", "journal:{}/none.journal"])
def test_reading_makes_no_file(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        open_storage(url.format(tmp_path), reading=True)
    assert list(tmp_path.iterdir()) == []
