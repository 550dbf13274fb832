"""Arithmetic from configurations against what traced models compute."""

import dataclasses

import pytest

from autotune.predict.step_time import matmul_parameters, model_flops_per_token, parameter_count
from autotune.predict.trace import trace_job
from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.job import Job, Lora
from autotune.problem.models import ModelSpec, default_task, resolve_model
from tests.conftest import make_job


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("tiny-llama", "causal-lm"),
        pytest.param("tiny-bert", "masked-lm", marks=pytest.mark.slow),
        pytest.param("tiny-bert", "classification", marks=pytest.mark.slow),
        ("tiny-mixtral", "causal-lm"),
    ],
)
def test_a_step_computes_what_is_said(model: str, task: str) -> None:
    job = make_job(model=model, task=task, seq_len=128, precision="bf16")
    run = trace_job(job).plain
    # backward computes scores again, in 5 products for forward's 2; bidirectional ones count twice in a trace
    attention = 3 * run.attention[0] / (1 if task == "causal-lm" else 2)
    said = model_flops_per_token(job)
    assert said is not None
    assert said * job.tokens_per_sample == pytest.approx(sum(run.flops) + attention, rel=0.005)


def test_published_counts_of_active_parameters() -> None:
    mixtral, qwen = (resolve_model(name).config for name in ("mixtral-8x7b", "qwen3-30b-a3b"))
    # Mistral: 12.9 of 46.7 billion; Qwen: 3.3 of 30.5 billion. Both with the embedding, which no product reads.
    assert matmul_parameters(mixtral) == pytest.approx(12.9e9 - 32000 * 4096, rel=0.005)
    assert matmul_parameters(qwen) == pytest.approx(3.35e9 - 151936 * 2048, rel=0.02)


def test_what_is_not_known() -> None:
    job = make_job(model="tiny-bert", task="classification", lora=Lora(4))
    whole = model_flops_per_token(make_job(model="tiny-bert", task="classification"))
    adapted = model_flops_per_token(job)
    assert whole is not None
    assert adapted is not None
    assert adapted < whole
    assert model_flops_per_token(Job(ModelSpec("it", {"model_type": "x"}, "here"), 1, 32)) is None
    assert model_flops_per_token(make_job(model="tiny-llava", task="image-text")) is None


def test_parameters_by_the_configuration_are_the_published_ones() -> None:
    """Tied heads, heads of their own, and experts: GPT-2 ties by a default that its configuration omits."""
    for name in ("gpt2-xl", "llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b", "bert-large-uncased"):
        model = resolve_model(name)
        assert model.parameters is not None
        job = Job(dataclasses.replace(model, parameters=None), 1, 64, task=default_task(model.config))
        assert parameter_count(job) == pytest.approx(model.parameters, rel=0.005), name
        assert sum(closed_form_trace(job, "a test").parameters) == pytest.approx(model.parameters, rel=0.005), name
