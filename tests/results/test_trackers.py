"""Experiment trackers: each records trials through its own package, offline, and none can end or delay a study."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.results import trackers
from autotune.results.trackers import TRACKERS, Tracking, check_trackers
from tests.conftest import make_candidate

OK = Outcome(OutcomeKind.OK, measurement=Measurement(2.0, 0.01, 5, 8.0, 160.0, 3 << 30), seconds=9.0)
OOM = Outcome(OutcomeKind.OOM_DEVICE, reason="CUDA out of memory; HF_TOKEN=hf_abcdefghijklmnopqrstuv", seconds=4.0)
PREDICTED = {"samples_per_second": 7.0, "peak_gib": 2.5}


def tracked(name: str, folder: Path) -> list[str]:
    """Lines that a call's tracker prints while it records two trials and a winner."""
    said: list[str] = []
    tracking = Tracking((name,), said.append)
    tracking.finished(0, make_candidate(), "search", OOM)  # before the study is open
    tracking.begin("mine", folder, {"job": "tiny", "api_key": "abcdefgh1234"}, lambda candidate: PREDICTED)
    tracking.started(1, make_candidate(3))
    tracking.finished(1, make_candidate(3), "search", OK)
    tracking.end(lambda: {"winner": "z3", "samples_per_second": 8.0})
    return said


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "the-users-own")
    monkeypatch.setenv("MLFLOW_RUN_ID", "the-users-own")


def test_tensorboard_has_measured_beside_predicted(tmp_path: Path, offline: None) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    before = dict(os.environ)
    assert tracked("tensorboard", tmp_path) == []
    assert dict(os.environ) == before
    found: dict[str, Any] = {}
    for file in tmp_path.rglob("events.out*"):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[f"{event.step} {value.tag}"] = value
    (speed,) = found["1 samples_per_second"].tensor.float_val
    (predicted,) = found["1 predicted_samples_per_second"].tensor.float_val
    assert (speed, predicted) == (8.0, 7.0)
    assert "0 trial_seconds" in found
    assert "hf_abc" not in "".join(map(str, found.values()))
    assert "zero_stage" in str(found["0 _hparams_/session_start_info"])


def test_mlflow_has_a_run_per_trial_below_that_of_the_call(tmp_path: Path, offline: None) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    assert tracked("mlflow", tmp_path) == []
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as opened:
        runs = dict(opened.execute("SELECT name, run_uuid FROM runs").fetchall())
        assert runs.keys() == {"mine", "trial 0", "trial 1"}
        metrics = dict(opened.execute("SELECT key, value FROM metrics WHERE run_uuid = ?", (runs["trial 1"],)))
        tags = dict(opened.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (runs["trial 1"],)))
    assert (metrics["samples_per_second"], metrics["predicted_samples_per_second"]) == (8.0, 7.0)
    assert (tags["mlflow.parentRunId"], tags["outcome"]) == (runs["mine"], "ok")


@pytest.mark.parametrize("mode", ["offline", None])
def test_wandb_has_a_run_per_trial_offline_also_without_credentials(
    mode: str | None, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    if mode is None:
        monkeypatch.delenv("WANDB_MODE")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert tracked("wandb", tmp_path) == []
    runs = [path for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run")]
    assert len(runs) == 3, "two trials and the winner, none of them the run that the shell names"
    assert not any("the-users-own" in path.name for path in runs)


PROGRAM = """
import json, sys, time
from autotune.results import trackers

class Broken:
    def __init__(self, study, folder, about):
        (folder / "got.json").write_text(json.dumps(about))

    def record(self, entry):
        if entry.number:
            raise ConnectionError("no route to api.example\\nsecond line")

    def close(self, winner):
        time.sleep(600)

trackers.TRACKERS["broken"] = Broken
trackers.main(*sys.argv[1:])
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("hangs", [False, True])
def test_a_tracker_that_fails_or_hangs_costs_one_line(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(python: str, module: str, *words: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM, *words]

    monkeypatch.setattr(trackers, "module_command", command)
    monkeypatch.setattr(trackers, "PATIENCE_SECONDS", 5.0 if hangs else 30.0)
    if hangs:
        monkeypatch.setattr(trackers, "entry_of", lambda *given: trackers.TrialEntry(0, {}, {}, {}))
    said = tracked("broken", tmp_path)
    assert len(said) == 1
    assert said[0].startswith("--track broken failed and records no more: ")
    assert hangs or "second line" in said[0]
    assert json.loads((tmp_path / "got.json").read_text()) == {"job": "tiny", "api_key": "***"}


def test_trackers_that_cannot_be_used_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--track wandbb: expected wandb, mlflow, tensorboard; did you mean wandb"):
        check_trackers(["wandbb"])
    monkeypatch.setitem(TRACKERS, "no_such_package", TRACKERS["wandb"])
    with pytest.raises(UserError, match="--track no_such_package needs the package no_such_package"):
        check_trackers(["no_such_package"])


def test_a_trials_own_tracker_is_off_and_knows_no_run_of_the_user() -> None:
    code = (
        "import os; from autotune.rank.script_rank import quiet_trackers; quiet_trackers('/trial');"
        "print({name for name in os.environ if 'RUN_ID' in name or 'EXPERIMENT_ID' in name}, os.environ['WANDB_MODE'],"
        "os.environ['MLFLOW_TRACKING_URI'])"
    )
    env = {**os.environ, "WANDB_RUN_ID": "a", "MLFLOW_RUN_ID": "b", "MLFLOW_EXPERIMENT_ID": "7"}
    env["MLFLOW_TRACKING_URI"] = "http://server"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() disabled file:///trial/mlruns"
