"""Ranks, the fork server and the tracer get by without any third-party package of the tuner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.executors.base import MeasureSpec
from autotune.executors.local import LocalExecutor
from autotune.predict.trace import trace_job
from autotune.problem.hardware import detect
from tests.conftest import make_candidate, make_job

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
    executor = LocalExecutor(make_job(1), hardware, tmp_path / "study", [candidate], isolation=isolation)
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
