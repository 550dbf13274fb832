"""A model that cannot be traced: its sizes are known all the same, and a trace that does not come costs its wait once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.predict import trace as tracing
from autotune.predict import trace_cache, tracer
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job
from autotune.problem.models import ModelSpec
from tests.conftest import make_candidate, make_job

SMALL = {"hidden_size": 32, "vocab_size": 128, "intermediate_size": 64}
MAMBA = {"num_hidden_layers": 1, "state_size": 8, "time_step_rank": 4}


def job_of(kind: str, seq_len: int = 16) -> Job:
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(kind, **{**SMALL, **MAMBA}).to_dict()
    except ValueError:
        pytest.skip(f"this transformers has no {kind}")
    config["model_type"] = kind
    return Job(ModelSpec(kind, config, "test"), 1, seq_len=seq_len, precision="bf16")


def test_a_recurrence_without_its_kernel_is_not_traced_and_its_sizes_are_counted() -> None:
    answer = tracer.answer_to(job_of("mamba"), ["own", "cuda"], lambda sizes: None)
    assert answer["untraceable"] == "without its kernel the model's recurrence runs token by token"
    sizes, frozen = answer["sizes"]
    assert sum(sizes) > 128 * 32
    assert frozen == 0


def late(asked: list[float], sizes: object) -> Any:
    def run(options: list[str], job: str, timeout_seconds: float, *_: object) -> tuple[str, str]:
        asked.append(timeout_seconds)
        if "--sizes" in options:
            return json.dumps({"untraceable": "none"}), ""
        return json.dumps({"sizes": sizes}) if sizes else "printing\n", "no trace within 300 s"

    return run


def test_what_takes_too_long_is_estimated_by_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(tracing, "_run_tracer", late([], [[1000, 5000], 0]))
    found = trace_job(job_of("mamba", 256), timeout_seconds=300)
    assert (found.parameters, found.exact) == ([1000, 5000], False)
    assert "no trace within 300 s" in found.note


def test_sizes_are_asked_for_where_no_answer_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(tracing, "_run_tracer", late([], None))
    with pytest.raises(UserError, match="names no shape to estimate it by"):
        trace_job(job_of("mamba"))

    def dies(options: list[str], job: str, timeout_seconds: float, *_: object) -> tuple[str, str]:
        return ('{"sizes": [[7, 9], 0]}', "") if "--sizes" in options else ("", "Killed")

    monkeypatch.setattr(tracing, "_run_tracer", dies)
    monkeypatch.setattr(trace_cache, "cache_key", lambda *arguments: "other")
    assert trace_job(job_of("mamba")).parameters == [7, 9]


def test_an_estimated_model_is_predicted_far_less_surely_than_a_traced_one() -> None:
    job = make_job(ranks=4, precision="bf16", model="llama-3.1-8b", seq_len=2048)
    estimated = trace_cache.closed_form_trace(job, "a test")
    traced = dataclasses.replace(estimated, exact=True)
    hardware, candidate = named_hardware("h100", 4), make_candidate(stage=3, micro_batch=4)
    found = [Predictor(job, hardware, one).predict(candidate) for one in (traced, estimated)]
    sure, unsure = ((one.step_interval, one.peak_interval) for one in found)
    for narrow, wide in zip(sure, unsure, strict=True):
        assert wide[1] / wide[0] > 1.5 * narrow[1] / narrow[0]
