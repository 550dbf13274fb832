"""Shipped traces against fresh ones, and plans without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.predict import trace_cache
from autotune.predict.trace import trace_job
from autotune.predict.trace_cache import RUNS_IT, known_trace, shipped_key
from autotune.problem.job import Job
from autotune.problem.models import shipped_models
from autotune.util.interpreter import OWN
from benchmarks.predict import shipped_traces

MADE_BY = {name: OWN.version(name) for name in RUNS_IT}


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(trace_cache, "cache_root", lambda: tmp_path)
    return tmp_path


def planned_jobs(*names: str) -> list[Job]:
    return list(shipped_traces.jobs(names))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("smollm2-135m", marks=pytest.mark.slow)])
def test_a_shipped_trace_is_that_of_a_fresh_trace(
    model: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by, traces = trace_cache._shipped()
    if made_by != MADE_BY:
        pytest.skip("other versions of torch or transformers than those that made the shipped traces")
    for job in planned_jobs(model):
        there = traces[shipped_key(job, "own", "cuda", made_by)]
        monkeypatch.setattr(trace_cache, "_shipped", lambda: (made_by, {}))
        fresh = trace_job(job)
        assert shipped_traces.compact(job, fresh) == there


def test_every_shipped_model_has_traces_of_the_present_tracer_and_of_the_constrained_versions() -> None:
    data = json.loads(shipped_traces.SHIPPED.read_text())
    assert data["version"] == trace_cache.VERSION
    keys = {shipped_key(job, "own", "cuda", data["versions"]) for job in planned_jobs(*shipped_models())}
    assert data["traces"].keys() == keys, "python benchmarks/predict/shipped_traces.py writes them"
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"transformers=={data['versions']['transformers']}" in constraints


def test_other_versions_do_not_use_shipped_traces(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, *_ = planned_jobs("tiny-llama")
    made_by, _ = trace_cache._shipped()
    build = made_by["torch"].partition("+")[0] + "+cu130"  # which does not count
    for torch, is_known in ((made_by["torch"], True), ("1.0", False), (build, True)):
        installed = {**made_by, "torch": torch}
        monkeypatch.setattr(trace_cache, "_versions_of_runner", lambda job, installed=installed: installed)
        assert (known_trace(job) is not None) == is_known


def test_a_plan_needs_no_torch_for_a_shipped_model(tmp_path: Path) -> None:
    code = """
import sys
from importlib import metadata
from autotune.util import interpreter
version = interpreter.Interpreter.version
interpreter.Interpreter.version = lambda self, name: None if name in ("torch", "transformers") else version(self, name)
sys.modules["torch"] = sys.modules["transformers"] = None
from autotune.commands import plan as command
from autotune.commands.request import Request
cards = command.gpu_table()
command.gpu_table = lambda: {"h100": cards["h100"]}  # others take time
(plan,) = command.plans(Request(model="llama-3.1-8b", gpus=8), ["h100"])
print(plan.best[0].exact, *plan.notes)
"""
    environment = {**os.environ, "AUTOTUNE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
