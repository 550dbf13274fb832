import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.predict import trace as tracing
from autotune.predict import tracer
from autotune.predict.passes import BACKWARD, FORWARD, Trace
from autotune.predict.trace import trace_job
from autotune.predict.tracer import Untraceable, trace_model
from autotune.problem.models import ModelSpec, resolve_model
from tests.conftest import make_job

REFERENCE = json.loads((Path(__file__).parents[2] / "benchmarks/data/activation_traces.json").read_text())


def deep(layers: int, model: str = "tiny-llama", **changes: object) -> ModelSpec:
    spec = resolve_model(model)
    config = {key: value for key, value in spec.config.items() if key != "layer_types"}
    return replace(spec, name=f"{model}-{layers}", config={**config, "num_hidden_layers": layers, **changes})


def test_reference_traces_are_met_within_one_per_cent() -> None:
    row = REFERENCE["qwen2.5-0.5b"]
    job = replace(make_job(1, seq_len=row["seq"], precision="bf16"), model=resolve_model("qwen2.5-0.5b"))
    trace = trace_model(job, use_cache=True)
    assert sum(trace.parameters) == row["n"]
    assert trace.plain.act_bytes_per_sequence == pytest.approx(row["act0"], rel=0.01)
    assert trace.of(True).act_bytes_per_sequence == pytest.approx(row["act1"], rel=0.01)
    assert sum(trace.plain.flops) == pytest.approx(row["flops0_1"], rel=1e-9)
    assert sum(trace.of(True).flops) == pytest.approx(row["flops1_1"], rel=1e-9)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma-2"])
def test_two_shallow_traces_tell_a_deep_one_exactly(model: str) -> None:
    job = replace(make_job(1, seq_len=16), model=deep(9 if model == "tiny-llama" else 12, model))
    quick, whole = trace_model(job), trace_model(job, whole_depth=True)
    for checkpointing in (False, True):
        one, other = quick.of(checkpointing), whole.of(checkpointing)
        assert one.flops == pytest.approx(other.flops)
        assert one.operators == pytest.approx(other.operators)
        for batch in (1, 3, 8):
            for phase in (FORWARD, BACKWARD):
                peaks = [
                    max(
                        f + s * batch + g
                        for f, s, g, p in zip(run.fixed, run.per_sequence, run.gradients, run.phase, strict=True)
                        if p == phase
                    )
                    for run in (one, other)
                ]
                assert peaks[0] == pytest.approx(peaks[1], rel=1e-6)


def test_checkpointing_keeps_less_and_computes_more() -> None:
    trace = trace_job(make_job())
    assert trace.of(True).after_forward[1] < 0.6 * trace.plain.after_forward[1]
    assert sum(trace.of(True).flops) > 1.1 * sum(trace.plain.flops)


def test_a_trace_is_cached_by_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracer_process: None) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    made = trace_job(make_job())
    files = list((tmp_path / "autotune" / "traces").iterdir())
    assert len(files) == 1
    monkeypatch.setattr(tracing.subprocess, "run", lambda *a, **k: pytest.fail("traced again"))
    again = trace_job(make_job(ranks=1))  # ranks do not matter to a trace
    assert again == made
    assert Trace.from_json(json.loads(json.dumps(made.to_json()))) == made
    monkeypatch.undo()
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    files[0].write_text('{"plain": {}}')
    assert trace_job(make_job()) == made, "a damaged one is made anew"


def test_what_cannot_be_traced_falls_back_to_the_closed_form_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    traced = trace_job(make_job(model="llama-3.2-1b", precision="bf16", seq_len=1024))

    class Done:
        stdout = json.dumps({"untraceable": "operator nonzero needs values"})
        stderr = ""

    monkeypatch.setattr(tracing.subprocess, "run", lambda *a, **k: Done())
    monkeypatch.setattr(tracing, "cache_key", lambda *arguments: "other")
    closed = trace_job(make_job(model="llama-3.2-1b", precision="bf16", seq_len=1024))
    assert not closed.exact
    assert "nonzero" in closed.note
    assert closed.plain.act_bytes_per_sequence == pytest.approx(traced.plain.act_bytes_per_sequence, rel=0.35)
    assert sum(closed.plain.flops) == pytest.approx(sum(traced.plain.flops), rel=0.15)
    assert not list(tmp_path.rglob("other*"))  # a fallback is not cached: the next version may trace it


def test_data_dependent_models_are_untraceable(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Embedding(8, 8)
            self.config = type("C", (), {"use_cache": False})()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
            out = self.inner(input_ids)
            if out.sum().item() > 0:
                out = out * 2
            return type("O", (), {"loss": out.mean()})()

    monkeypatch.setattr(tracer, "_build", lambda job, config: (Routed(), None))
    with pytest.raises(Untraceable):
        trace_model(make_job())


def test_a_model_that_cannot_be_built_is_said_in_one_line() -> None:
    job = replace(make_job(), model=ModelSpec("odd", {"model_type": "nosuchthing", "hidden_size": 8}, "test"))
    with pytest.raises(UserError, match="cannot be built"):
        trace_job(job)
