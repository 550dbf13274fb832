"""Deep models of every kind: what two depths say against all layers run."""

from typing import Any

import pytest

from autotune.predict import tracer
from autotune.predict.trace_data import BACKWARD, FORWARD, Pass
from autotune.predict.tracer import trace_model
from autotune.problem.job import Job
from autotune.problem.models import ModelSpec, resolve_model


def deep(model: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = resolve_model(model).config
    for name, value in changes.items():
        part, dot, key = name.rpartition(".")
        config = {**config, part: {**config[part], key: value}} if dot else {**config, name: value}
    return config


def peak(run: Pass, phase: int, micro_batch: int, gradients: float) -> float:
    rows = zip(run.fixed, run.per_sequence, run.gradients, run.phase, strict=True)
    return max(fixed + each * micro_batch + gradients * grads for fixed, each, grads, at in rows if at == phase)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task", "changes"),
    [
        ("tiny-bert", "masked-lm", {"num_hidden_layers": 7}),
        ("tiny-t5", "seq2seq", {"num_layers": 5, "num_decoder_layers": 7}),
        ("tiny-t5", "seq2seq", {"num_layers": 6, "num_decoder_layers": 6}),
        ("tiny-llava", "image-text", {"text_config.num_hidden_layers": 6, "vision_config.num_hidden_layers": 7}),
    ],
)
def test_few_layers_say_what_all_do(
    model: str, task: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(ModelSpec(model, deep(model, changes), "here"), 2, 32, "bf16", task=task)
    short = trace_model(job)
    monkeypatch.setattr(tracer, "extrapolation", lambda *_: None)
    whole = trace_model(job)
    assert short.parameters == whole.parameters
    for checkpointing in (False, True):
        found, true = short.of(checkpointing), whole.of(checkpointing)
        for name in ("after_forward", "flops", "attention", "operators"):
            assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name
        for phase in (FORWARD, BACKWARD):
            for micro_batch in (1, 4, 64):
                for gradients in (0.0, 1.0):
                    said, run = (peak(one, phase, micro_batch, gradients) for one in (found, true))
                    assert said == pytest.approx(run, rel=1e-6)
