"""A study's winner, or another of its trials, as files."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.results.export import deepspeed_config, export_record, export_study, training_arguments
from autotune.search.records import VERIFY
from autotune.search.study import StudyStore
from tests.studies import study_of_every_kind


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study `s`: making one takes longer than all these tests."""
    runs = tmp_path_factory.mktemp("export") / "runs"
    study_of_every_kind(runs)
    return runs.parent


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test, with a copy of `runs/s`."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("style", "names"),
    [
        ("deepspeed", ["s.json", "s.meta.json"]),
        ("hf", ["s.training_arguments.json", "s.training_arguments.meta.json"]),
        ("accelerate", ["s.accelerate.yaml", "s.accelerate.deepspeed.json", "s.accelerate.meta.json"]),
    ],
)
def test_the_winner_goes_into_the_studys_folder(folder: Path, style: str, names: list[str]) -> None:
    assert export_study("s", None, style, None, None) == [Path("runs/s") / name for name in names]
    store = StudyStore.load("s")
    winner = store.winner
    assert winner is not None
    told = json.loads((folder / "runs/s" / names[-1]).read_text())
    assert (told["study"], told["trial"], told["verified"]) == ("s", winner.number, True)
    assert told["candidate"] == winner.candidate.as_dict
    assert told["fingerprint"] == store.study.user_attrs["fingerprint"]
    assert told["headroom"] == store.hardware.headroom
    if style == "deepspeed":
        assert json.loads((folder / "runs/s/s.json").read_text()) == deepspeed_config(winner.candidate, store.job)
    if style == "hf":
        arguments = json.loads((folder / "runs/s" / names[0]).read_text())
        assert arguments == training_arguments(winner.candidate, store.job, "cpu"), "the study's device"


def test_a_trial_by_its_number_and_a_file_by_its_name(folder: Path) -> None:
    store = StudyStore.load("s")
    other = next(one for one in store.records() if one.outcome and one.outcome.ok and one.role != VERIFY)
    assert export_study("s", None, "deepspeed", Path("here.json"), other.number) == [
        Path("here.json"),
        Path("here.meta.json"),
    ]
    told = json.loads((folder / "here.meta.json").read_text())
    assert (told["trial"], told["verified"]) == (other.number, False)


def test_a_study_in_another_storage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    storage = f"sqlite:///{folder}/runs/s/study.db"
    assert export_study("s", storage, "deepspeed", Path("here.json"), None)[0] == Path("here.json")


def test_what_cannot_be_exported(folder: Path) -> None:
    failed = next(one for one in StudyStore.load("s").records() if one.outcome and not one.outcome.ok)
    for style, trial, message in (
        ("yaml", None, "--format yaml: expected one of deepspeed, accelerate, hf, sbatch"),
        ("hf", 99, "--trial 99: no measured trial of that number in s (`autotune show s`)"),
        ("hf", failed.number, f"--trial {failed.number}: no measured trial of that number in s (`autotune show s`)"),
    ):
        with pytest.raises(UserError) as caught:
            export_study("s", None, style, None, trial)
        assert str(caught.value) == message


def test_a_study_without_a_winner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StudyStore, "winner", None)
    with pytest.raises(UserError) as caught:
        export_study("s", None, "hf", None, None)
    assert str(caught.value) == "study s has no winner yet: `autotune run --study s …` goes on"


def test_a_place_that_cannot_be_written(folder: Path) -> None:
    store = StudyStore.load("s")
    assert store.winner is not None
    (folder / "file").write_text("")
    with pytest.raises(UserError) as caught:
        export_record(store, store.winner, Path("file/x.json"), "deepspeed", False)
    reason = "file/x.json cannot be written (File exists); the study keeps the winner: `autotune export`"
    assert str(caught.value) == reason


def test_only_what_was_measured_has_a_config_to_export(folder: Path) -> None:
    store = StudyStore.load("s")
    assert store.winner is not None
    unmeasured = dataclasses.replace(store.winner, outcome=None)
    with pytest.raises(AssertionError):
        export_record(store, unmeasured, Path("x.json"), "deepspeed", False)
