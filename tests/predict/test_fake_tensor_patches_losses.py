"""Losses of a kernel with the head in a trace, and the factor for the rest of Liger's kernels."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from autotune.predict import trace as tracing
from autotune.predict import tracer
from autotune.predict.trace import trace_job
from autotune.predict.trace_cache import closed_form_trace, with_liger
from autotune.predict.trace_data import FORWARD, Trace
from autotune.predict.tracer import trace_model
from autotune.problem.job import LIGER_LOSS, Job
from autotune.problem.models import ModelSpec
from tests.conftest import make_job
from tests.predict.passes import act_bytes_per_sequence

HIDDEN, INNER, HEADS, WORDS, TOKENS = 64, 160, 4, 1000, 96
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTH = 2  # of an element


def job_of(loss: str = LIGER_LOSS, layers: int = 1) -> Job:
    model = ModelSpec("llama", {"model_type": "llama", **SHAPE, "num_hidden_layers": layers}, "here")
    return dataclasses.replace(make_job(1, seq_len=TOKENS, precision="bf16"), model=model, loss=loss)


def test_a_loss_in_chunks_moves_every_logit_and_keeps_none() -> None:
    whole, one = (trace_model(job_of(loss)).plain for loss in ("full", LIGER_LOSS))
    assert one.moved[FORWARD][1] > 3 * WIDTH * WORDS * TOKENS
    chunks = -(-WORDS // HIDDEN)
    assert one.operators[FORWARD] > 4 * (chunks - 1)
    assert whole.after_forward[1] - one.after_forward[1] > WIDTH * WORDS * TOKENS
    head = WIDTH * WORDS * HIDDEN
    assert one.after_forward[0] - whole.after_forward[0] == pytest.approx(head, abs=8), "its gradient waits"


class Decoder(torch.nn.Module):
    """It makes its logits 32 bits wide, as Mllama's does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(HIDDEN, WORDS, bias=False, dtype=torch.bfloat16)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, hidden: torch.Tensor) -> object:
        return types.SimpleNamespace(logits=self.head(hidden).float())


def test_what_a_model_does_to_its_logits_is_nothing_that_the_kernel_reads() -> None:
    """Mllama's decoder makes them 32 bits wide, Granite and Gemma scale and cap them."""
    hidden = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    loss = tracer._chunked_loss(Decoder(), {"hidden": hidden})
    of_hidden, of_weight = loss.grad_fn.saved_tensors
    assert (of_hidden.shape, of_hidden.dtype) == ((TOKENS, HIDDEN), torch.bfloat16)
    assert (of_weight.shape, of_weight.dtype) == ((WORDS, HIDDEN), torch.bfloat16)


def test_a_closed_form_has_no_logits_either() -> None:
    without, fused = (closed_form_trace(job_of(loss), "why") for loss in ("full", LIGER_LOSS))
    less = without.plain.after_forward[1] - fused.plain.after_forward[1]
    assert less == TOKENS * WORDS * (WIDTH + 4 + 4)
    assert fused.plain.after_forward[0] == WIDTH * WORDS * HIDDEN


def test_all_of_ligers_kernels_are_a_rough_factor_on_a_trace_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = dataclasses.replace(closed_form_trace(job_of(), "why"), exact=True, note="")
    traced: list[Job] = []

    def known(job: Job, loss: str, device: str) -> Trace:
        traced.append(job)
        return exact

    monkeypatch.setattr(tracing, "known_trace", known)
    found = trace_job(dataclasses.replace(job_of("full"), liger=True))
    assert [(job.liger, job.loss) for job in traced] == [(False, LIGER_LOSS)]
    assert found == with_liger(exact)
    assert not found.exact
    assert "rough factor" in found.note
    assert act_bytes_per_sequence(found.plain) == pytest.approx(0.73 * act_bytes_per_sequence(exact.plain))
    assert found.plain.flops == exact.plain.flops
    assert (found.plain.fixed, found.parameters) == (exact.plain.fixed, exact.parameters)
