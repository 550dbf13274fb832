"""A loss from slices of the vocabulary: equal to the model's own, with a sixteenth of its logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autotune.problem.models import VOCABULARY_SLICES
from autotune.rank.model_builder import use_chunked_loss
from tests.rank.live_rank import PeakTensors

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 301,
}
HEADS = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
TYPES: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "gemma2": {**HEADS, "final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25, "num_key_value_heads": 1, "pad_token_id": 0},
    "granite": {"logits_scaling": 8.0, "num_key_value_heads": 1, "pad_token_id": 0},
    "gpt2": {},  # its head is tied to the embedding
    "phi": {"partial_rotary_factor": 0.5, "pad_token_id": 0},  # its head has a bias
    "qwen3_moe": {**HEADS, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
}


def made(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 301} if kind == "gpt2" else SMALL
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model.train() if kind != "gpt2" else model.eval()  # its dropout would draw


def trained(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Return the loss and the gradients of one backward from twice the loss."""
    out = model(**batch)
    loss = out["loss"]
    (2 * loss).backward()
    return float(loss.detach()), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def batch_of(rows: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 301, (rows, tokens), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", TYPES)
def test_loss_and_gradients_equal_those_of_full_logits(kind: str, dtype: torch.dtype) -> None:
    exact = made(kind, torch.float32, **TYPES[kind]).to(dtype).float()  # what both should be
    full = made(kind, dtype, **TYPES[kind])
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    batch = batch_of()
    (_, wanted), (ours, gradients), (theirs, others) = (trained(one, batch) for one in (exact, chunked, full))
    assert ours == pytest.approx(theirs, rel=1e-6 if dtype == torch.float32 else 1e-3)
    assert len(gradients) == len(others) == len(wanted)
    for mine, full_one, want in zip(gradients, others, wanted, strict=True):
        error, usual = (float((one.float() - want).norm() / want.norm()) for one in (mine, full_one))
        assert error < max(2 * usual, 2e-6), "as exact as the full loss"


def test_autocast_trains_as_with_full_logits() -> None:
    full = made("phi", **TYPES["phi"])
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    with torch.autocast("cpu", torch.bfloat16):
        (ours, gradients), (theirs, others) = (trained(one, batch_of()) for one in (chunked, full))
    assert ours == pytest.approx(theirs, rel=1e-3)
    for mine, other in zip(gradients, others, strict=True):
        assert mine.dtype == other.dtype
        assert float((mine - other).norm() / other.norm()) < 0.02


def test_a_loss_of_no_labels_matches_the_models_own() -> None:
    model = made("llama", **HEADS)
    chunked = copy.deepcopy(model)
    use_chunked_loss(chunked)
    batch = batch_of()
    batch["labels"][:] = -100
    assert str(float(model(**batch).loss)) == str(float(chunked(**batch)["loss"])) == "nan"


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen3_moe"])
def test_a_model_with_more_than_backbone_and_head_is_refused(kind: str) -> None:
    more = {"output_router_logits": True, **TYPES["qwen3_moe"]} if kind == "qwen3_moe" else {"is_decoder": True}
    with pytest.raises(ValueError, match="loss chunked is for causal models of a backbone and a linear head"):
        use_chunked_loss(made(kind, **more))


def test_logits_exist_for_one_slice_at_a_time() -> None:
    """Of the peak, full logits take `tokens x vocabulary` several times, slices a sixteenth of that."""
    tokens, vocabulary = 64, 16 * 301
    peaks = {}
    for name in ("full", "chunked"):
        model = made("llama", **HEADS)
        model.resize_token_embeddings(vocabulary)
        if name == "chunked":
            use_chunked_loss(model)
        ids = torch.randint(1, 301, (1, tokens))
        with PeakTensors() as live:
            for tensor in (*model.parameters(), *model.buffers()):
                live.add(tensor)
            rest = live.bytes
            loss = model(input_ids=ids, labels=ids)["loss"]
            peaks[name] = live.peak - rest
            del loss
    logits = 4 * tokens * vocabulary
    assert peaks["full"] > 2 * logits
    assert peaks["chunked"] < peaks["full"] - 2 * logits + 4 * logits / VOCABULARY_SLICES
