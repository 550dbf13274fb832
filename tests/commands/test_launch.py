"""From a study or a plan to the ladder that a training starts under; trainings themselves are in tests/test_scripts.py."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.commands import launch
from autotune.commands.launch import about_variables
from autotune.executors.local import P2P_OFF
from autotune.problem.candidate import ALLOCATOR_VARIABLES
from autotune.problem.hardware import detect
from autotune.recovery.supervisor import Attempt, LaunchSummary
from autotune.search.fingerprint import fingerprint
from autotune.util.units import GIB
from tests.cli_call import call
from tests.conftest import make_candidate, make_job
from tests.studies import study_of_every_kind


class NoTraining:
    """A supervisor that remembers what it was given, and whose training is done."""

    given: dict[str, Any]

    def __init__(self, job: Any, hardware: Any, ladder: Any, folder: Path, **options: Any) -> None:
        NoTraining.given = {"job": job, "hardware": hardware, "ladder": ladder, "folder": folder, **options}

    def run(self, cluster: object) -> LaunchSummary:
        assert cluster is None
        return LaunchSummary(0, [Attempt(0, "it", steps=3, ended="done")])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "Supervisor", NoTraining)
    (tmp_path / "train.py").write_text("print('trains')\n")
    return "train.py"


def test_a_studys_winner_and_what_is_below_it(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = study_of_every_kind(tmp_path / "runs")
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--max-restarts", "3", "--", script, "--epochs", "2")
    assert code == 0, err
    assert "measured tiny-llama with synthetic batches, not a script" in err
    assert "training ended with exit code 0 after 3 DeepSpeed steps" in err
    given = NoTraining.given
    assert given["job"].script.argv == (script, "--epochs", "2")
    assert given["max_restarts"] == 3
    assert given["silent_seconds"] == 1800
    top = given["ladder"][0]
    assert top.candidate == store.winner.candidate == make_candidate(0, 1)
    assert top.measured
    written = json.loads((tmp_path / "runs/s/s.ladder.json").read_text())
    assert [one["candidate"] for one in written] == [rung.candidate.as_dict for rung in given["ladder"]]
    written[0]["peak_bytes"] = 7  # the next launch takes the ladder as it stands there
    (tmp_path / "runs/s/s.ladder.json").write_text(json.dumps(written))
    assert call(monkeypatch, capsys, "launch", "s", "--", script)[0] == 0
    assert NoTraining.given["ladder"][0].peak_bytes == 7


@pytest.mark.slow
def test_variables_that_are_others_than_the_studys_are_said(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_PROTO", "LL")
    store = study_of_every_kind(tmp_path / "runs")
    command = ("launch", "s", "--", script)
    said = "trained under this shell's variables"
    code, _, err = call(monkeypatch, capsys, *command)
    assert (code, said in err) == (0, False)
    monkeypatch.setenv("NCCL_ALGO", "Tree\nand more")
    monkeypatch.delenv("NCCL_PROTO")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "a:b")
    code, _, err = call(monkeypatch, capsys, *command)
    assert code == 0
    (line,) = [line for line in err.splitlines() if said in line]
    assert line == (
        f"autotune: {said}, not those that study s was measured under: NCCL_ALGO 'Tree and more' here, Ring there; NCCL_PROTO not set "
        "here, LL there; PYTORCH_ALLOC_CONF a:b here, not set there"
    )
    assert os.environ["NCCL_ALGO"] == "Tree\nand more", "the user's"
    known = {name: value for name, value in store.fingerprint.items() if name != "environment"}
    store._set("fingerprint", known)
    assert said not in call(monkeypatch, capsys, *command)[2]


def test_a_training_keeps_memory_reserved_and_p2p_off_as_its_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    tuned = detect("cpu", 2).reserving(GIB)
    found = launch._machines(dataclasses.replace(tuned, environment=P2P_OFF), None, None)
    assert found.limit_bytes == found.memory_bytes - GIB
    assert os.environ["NCCL_P2P_DISABLE"] == "1"


def test_the_winners_own_variable_that_was_exported_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    measured = fingerprint(make_job(), detect("cpu", 2))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert about_variables("s", measured, make_candidate(expandable_segments=True)) == ""
    assert "PYTORCH_CUDA_ALLOC_CONF expandable_segments:True here, not set there" in about_variables(
        "s", measured, make_candidate()
    )


def test_the_best_of_a_plan(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("launch", "--model", "tiny-llama", "--device", "cpu", "--gpus", "2", "--seq-len", "32")
    code, out, err = call(monkeypatch, capsys, *words, "--global-batch-size", "8", "--json", "--", script)
    assert code == 0, err
    assert json.loads(out)["attempts"][0]["steps"] == 3
    ladder = NoTraining.given["ladder"]
    assert not ladder[0].measured
    for rung in ladder:
        assert rung.candidate.micro_batch * rung.candidate.accumulation * 2 == 8
    peaks = [rung.peak_bytes for rung in ladder]
    assert peaks == sorted(peaks, reverse=True)
    assert NoTraining.given["folder"] == Path("runs/launch-train")
    assert NoTraining.given["folder"].is_dir()
    too_small = (*words, "--global-batch-size", "8", "--memory-cap", "50MiB", "--", script)
    code, _, err = call(monkeypatch, capsys, *too_small)
    assert (code, "is predicted to fit" in err) == (3, True)


def test_a_study_in_a_folder_that_cannot_be_written_is_refused(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study_of_every_kind(tmp_path / "runs")

    def refuse(**options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("autotune.search.storage.tempfile.NamedTemporaryFile", refuse)
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--", script)
    assert code == 2
    assert "runs/s cannot be written (Read-only file system)" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("launch", "--model", "tiny-llama", "--", "train.py"), "needs --global-batch-size"),
        (("launch", "none", "--", "train.py"), "no study 'none'"),
        (("launch", "s", "--max-restarts", "-1", "--", "train.py"), "--max-restarts: expected at least 0, found -1"),
        (("launch", "s", "--gpus", "4", "--", "train.py"), "--gpus cannot differ from the study's. Remove --gpus."),
        (("launch", "s"), "needs the script to train"),
        (("launch", "s", "--", "missing.py"), "no script missing.py"),
    ],
)
def test_bad_input_is_one_line(
    script: str, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
