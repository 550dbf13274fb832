"""Many traces at once for benchmarks: each is made once, and what cannot be traced is left out."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.predict import trace as tracing
from autotune.predict.trace import trace_job
from autotune.problem.job import parse_lora
from autotune.problem.models import ModelSpec
from benchmarks.predict import many_traces
from benchmarks.predict.many_traces import trace_jobs
from tests.conftest import make_job


@pytest.mark.slow
def test_many_jobs_are_traced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    broken = replace(make_job(), model=ModelSpec("none", {"model_type": "no-such-model"}, "a test"))
    lora = make_job(
        precision="bf16", lora=parse_lora("r=4,targets=q_proj,saved=lm_head"), attention="flash_attention_2"
    )
    told = []
    jobs = [(make_job(), "own"), (make_job(ranks=1), "own"), (make_job(), "fused"), (broken, "own"), (lora, "own")]
    trace_jobs(jobs, lambda made, of: told.append((made, of)))
    assert told == [(n, 4) for n in range(1, 5)]
    monkeypatch.setattr(tracing.subprocess, "Popen", lambda *a, **k: pytest.fail("traced again"))
    monkeypatch.setattr(many_traces.multiprocessing, "get_context", lambda *_: pytest.fail("traced again"))
    trace_jobs([job for job in jobs if job[0] is not broken])
    assert trace_job(make_job()).exact
    found = trace_job(lora)
    head = make_job().model.config["vocab_size"] * make_job().model.config["hidden_size"]
    assert max(found.parameters) == head  # trained whole beside the adapters
    assert found.frozen
