"""Every command finds a study whose folder lies on a network's file system, and so is kept in a journal."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.commands.launch import ladder_of
from autotune.problem.outcome import OutcomeKind
from autotune.recovery.trainer_callback import WARMUP_STEPS, StudyCallback
from autotune.search.study import StudyStore
from autotune.search.trials import TRAINING
from tests.cli_call import call
from tests.network import mount
from tests.studies import study_of_every_kind


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on Lustre, with `runs/s`."""
    monkeypatch.chdir(tmp_path)
    mount(monkeypatch, ("lustre", tmp_path))
    study_of_every_kind(Path("runs"))
    return tmp_path


def test_show_export_record_and_launch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("s", "runs/s"):
        code, out, err = call(monkeypatch, capsys, "show", name, "--json")
        assert code == 0, err
        assert len(json.loads(out)["trials"]) == len(OutcomeKind) + 2
    assert call(monkeypatch, capsys, "show", "x")[2].count("there are s") == 1
    assert call(monkeypatch, capsys, "export", "s")[0] == call(monkeypatch, capsys, "record", "s")[0] == 0
    store = StudyStore.load("s")
    assert store.winner is not None
    assert ladder_of(store, store.job, store.winner.candidate, False)[0].candidate == store.winner.candidate
    assert {path.name for path in Path("runs/s").iterdir()} == {
        *("study.journal", "s.json", "s.meta.json", "s.table.csv.gz", "s.table.json", "s.ladder.json")
    }, "no database beside it, and no lock is left"


def test_run_resumes_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch, capsys, "record", "s", "--out", "t.csv.gz")
    replay = ("run", "--executor", "replay:t.csv.gz", "--budget", "5m", "--yes", "--study")
    assert call(monkeypatch, capsys, *replay, "again")[0] == 0
    code, out, err = call(monkeypatch, capsys, *replay, "again")
    assert code == 0, err
    assert "study again goes on" in out + err
    code, out, err = call(monkeypatch, capsys, *replay, "elsewhere", "--storage", "journal:own.journal")
    assert code == 0, err
    assert "winner: " in call(monkeypatch, capsys, "show", "elsewhere", "--storage", "journal:own.journal")[1]
    assert not list(Path("runs").glob("*/study.db"))


def test_a_training_is_recorded_into_it(folder: Path) -> None:
    config = SimpleNamespace(config={"zero_optimization": {"stage": 2}})
    args = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        hf_deepspeed_config=config,
    )
    callback = StudyCallback("s")
    for _ in range(WARMUP_STEPS + 4):
        callback.on_step_begin(args, None, None)
        callback.on_step_end(args, None, None)
    callback.on_train_end(args, SimpleNamespace(is_world_process_zero=True), None)
    assert StudyStore.load("s").records()[-1].role == TRAINING
