"""Arithmetic of a training step from the configuration alone."""

from __future__ import annotations

from typing import Any

from autotune.problem.job import Job


def dense_shape(config: dict[str, Any]) -> tuple[int, int, int] | None:
    """(layers, attention width = heads x head size, vocabulary) of a decoder, or None where the keys are unknown."""
    text: dict[str, Any] = config.get("text_config") or config
    layers: Any = text.get("num_hidden_layers", text.get("n_layer"))
    hidden: Any = text.get("hidden_size", text.get("n_embd"))
    heads: Any = text.get("num_attention_heads", text.get("n_head"))
    vocabulary: Any = text.get("vocab_size")
    if not all(isinstance(value, int) for value in (layers, hidden, heads, vocabulary)):
        return None
    head = text.get("head_dim") or hidden // heads
    return layers, heads * head, vocabulary


def matmul_parameters(config: dict[str, Any]) -> int | None:
    """Parameters in a matrix product for every token: all but the embedding look-up, the head included."""
    text = config.get("text_config") or config
    shape = dense_shape(config)
    hidden = text.get("hidden_size", text.get("n_embd"))
    if shape is None or not isinstance(hidden, int):
        return None
    layers, attention, vocabulary = shape
    heads: Any = text.get("num_attention_heads", text.get("n_head"))
    key_value = text.get("num_key_value_heads") or heads
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    gated = text.get("model_type") not in ("gpt2", "phi", "gpt_neox", "opt", "mpt")
    projections = hidden * attention * 2 + hidden * (attention // heads * key_value) * 2
    return int(layers * (projections + hidden * inner * (3 if gated else 2)) + hidden * vocabulary)


def model_flops_per_token(job: Job) -> float | None:
    """FLOPs of forward and backward a token: 6 x matmul parameters + 12 x layers x attention width x sequence
    (Chowdhery et al. 2022, PaLM, appendix B; recomputation is not counted); frozen weights take 4, as they have no
    gradients of their own. None for a shape that is not known."""
    shape, parameters = dense_shape(job.model.config), matmul_parameters(job.model.config)
    if shape is None or parameters is None:
        return None
    layers, attention, _ = shape
    return (4.0 if job.lora else 6.0) * parameters + 12.0 * layers * attention * job.seq_len
