"""A run of a study that another run holds is refused before it has changed anything."""

from pathlib import Path

import pytest

from autotune.search.storage import lock_study
from tests.cli_call import call, replay

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("force", [pytest.param((), marks=pytest.mark.slow), ("--force",)])
def test_a_study_that_is_held_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], force: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ("--budget", "5m", "--max-trials", "1", "--study", "s")
    assert replay(monkeypatch, capsys, TABLE, *run)[0] == 0
    held = lock_study(Path("runs/s"), "s")
    before = files_in(tmp_path)
    # another job and another machine: had it looked at them first, it would complain of them, or take them over
    code, _, err = replay(monkeypatch, capsys, TABLE, *run, "--headroom", "30%", *force)
    assert (code, files_in(tmp_path)) == (2, before)
    assert "another autotune run holds study 's'" in err
    held.release()
    assert replay(monkeypatch, capsys, TABLE, *run)[0] == 0, "and the lock is let go at the end of a call"


def test_no_script_is_run_for_a_study_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import deepspeed\n")
    Path("runs/s").mkdir(parents=True)

    def started(*given: object) -> None:
        raise AssertionError("an executor is made")

    monkeypatch.setattr("autotune.commands.run.make_executor", started)
    held = lock_study(Path("runs/s"), "s")
    before = files_in(tmp_path)
    words = ("run", "--study", "s", "--device", "cpu", "--gpus", "2", "--", "train.py")
    code, _, err = call(monkeypatch, capsys, *words)
    assert (code, files_in(tmp_path)) == (2, before)
    assert "another autotune run holds" in err
    held.release()
