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
from benchmarks.search.record import record
from tests.cli_call import call, replay
from tests.network import mount
from tests.studies import study_of_every_kind


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on Lustre, with `runs/s`."""
    monkeypatch.chdir(tmp_path)
    mount(monkeypatch, ("lustre", tmp_path))
    study_of_every_kind(Path("runs"))
    return tmp_path


def test_show_export_and_launch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("s", "runs/s"):
        code, out, err = call(monkeypatch, capsys, "show", name, "--json")
        assert code == 0, err
        assert len(json.loads(out)["trials"]) == len(OutcomeKind) + 2
    assert call(monkeypatch, capsys, "show", "x")[2].count("there are s") == 1
    assert call(monkeypatch, capsys, "export", "s")[0] == 0
    store = StudyStore.load("s")
    assert ladder_of(store, store.winner.candidate, False)[0].candidate == store.winner.candidate
    assert {path.name for path in Path("runs/s").iterdir()} == {
        *("study.journal", "s.json", "s.meta.json", "s.ladder.json")
    }, "no database beside it, and no lock is left"


def test_run_resumes_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = Path("t.csv.gz")
    record(StudyStore.load("s"), table)
    words = ("--budget", "5m", "--study")
    assert replay(monkeypatch, capsys, table, *words, "again")[0] == 0
    code, out, err = replay(monkeypatch, capsys, table, *words, "again")
    assert code == 0, err
    assert "study again goes on" in out + err
    code, out, err = replay(monkeypatch, capsys, table, *words, "elsewhere", "--storage", "journal:own.journal")
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
