"""Ranks of models, scripts and trainings, the fork server and the tracer run without the tuner's third-party packages."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autotune.executors.base import MeasureSpec
from autotune.executors.local import LocalExecutor
from autotune.predict.trace import trace_job
from autotune.problem.hardware import detect
from tests.conftest import SCRIPTS, Scripts, make_candidate, make_job
from tests.test_scripts import AUTO, TRAINER, launch

GUARD = Path(__file__).parent / "guard"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(GUARD), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("AUTOTUNE_GUARDED", str(tmp_path / "guarded"))
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))  # no trace is there yet
    return tmp_path / "guarded"


def test_the_guard_refuses(log: Path) -> None:
    for module, refused in (("autotune.search.study", "optuna"), ("autotune.workers.gpu_memory", "psutil")):
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=120)
        assert f"{refused} is refused to autotune" in done.stderr
    assert "-c" in log.read_text()


@pytest.mark.slow
def test_a_trace(log: Path, tracer_process: None) -> None:
    assert trace_job(make_job(1)).exact
    assert "autotune.predict.tracer" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["fork", "spawn"])
def test_a_measurement(log: Path, tmp_path: Path, isolation: str) -> None:
    candidate, hardware = make_candidate(), detect("cpu", 1)
    executor = LocalExecutor(make_job(1), hardware, tmp_path / "study", [candidate])
    executor.isolation = isolation
    try:
        executor.open(print)
        executor.check(print)
        session = executor.session(candidate, "0")
        outcome = session.measure(candidate, MeasureSpec(min_steps=2, max_steps=2, min_seconds=0.0), 300.0)
        session.close()
    finally:
        executor.close()
    assert outcome.ok, outcome.reason
    assert ("autotune.workers.fork_server" if isolation == "fork" else "autotune.rank.model_rank") in log.read_text()


@pytest.fixture
def trainer(tmp_path: Path) -> list[str]:
    """Words of a script with Trainer, accelerate and DeepSpeed, which all hooks serve."""
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    return [str(SCRIPTS / "trainer.py"), *TRAINER, "--report_to", "none"]


@pytest.mark.slow
def test_a_probe_run_and_a_trial_of_a_script(
    log: Path, trainer: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scripts = Scripts(tmp_path_factory.mktemp("server"))
    with closing(scripts.executor):
        outcome = scripts.measure(scripts.probe(trainer, tmp_path), make_candidate(1, 4, 1))
    assert outcome.ok, outcome.reason
    assert "autotune.workers.fork_server" in log.read_text()


@pytest.mark.slow
def test_a_training(log: Path, trainer: list[str], tmp_path: Path) -> None:
    says: list[str] = []
    summary = launch(tmp_path, [*trainer, "--max_steps", "2"], [make_candidate(1, 2, 2)], says=says)
    assert summary.code == 0, says
    assert "autotune.rank.train_rank" in log.read_text()
