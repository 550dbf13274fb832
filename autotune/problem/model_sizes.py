"""Sizes in a model's configuration, and their bounds."""

from __future__ import annotations

from typing import Any

from autotune.bounds import shown

# Keys of a configuration that set a model's size: numbers, and a few switches.
SHAPE_KEYS = frozenset(
    (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "sliding_window"),
        *("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "n_layers", "n_heads", "n_ctx"),
        *("d_model", "d_ff", "d_kv", "dim", "hidden_dim", "num_layers", "num_heads", "num_decoder_layers"),
        *("encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads"),
        *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "n_shared_experts", "decoder_sparse_step", "first_k_dense_replace"),
        *("depth", "embed_dim", "patch_size", "image_size", "type_vocab_size"),
    )
)
SWITCHES = frozenset(("tie_word_embeddings",))
# Keys that may be zero in a model.
_OR_NONE = frozenset(
    (
        *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace", "type_vocab_size"),
    )
)
# Keys that count layers.
_LAYERS = frozenset(
    (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
        *("encoder_layers", "decoder_layers", "depth", "first_k_dense_replace"),
    )
)
# Keys that no model can have as zero; other zeros switch a feature off.
_NEVER_ZERO = _LAYERS | {"hidden_size", "num_attention_heads", "vocab_size", "n_embd", "n_head", "d_model"}
MOST_LAYERS, MOST_SIZE = 10_000, 10**9


def size_trouble(key: str, value: object) -> str | None:
    """Return why a value is not a valid size of a model, or None."""
    if key not in SHAPE_KEYS:
        return "is no size of a model; expected hidden_size, num_hidden_layers, …"
    if key in SWITCHES:
        return None if isinstance(value, bool) else f"expected true or false, found {value!r}"
    low, high = int(key not in _OR_NONE), MOST_LAYERS if key in _LAYERS else MOST_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        return f"expected a whole number from {low} to {high}, found {shown(value)}"
    return None


def config_trouble(config: dict[str, Any]) -> str | None:
    """Return why the sizes in a configuration are impossible, or None. Lists, nulls and words are left to transformers."""
    for key, value in config.items():
        if isinstance(value, dict):
            if why := config_trouble(value):
                return f"{key}.{why}"
        elif isinstance(value, int | float) and not isinstance(value, bool) and key in SHAPE_KEYS - SWITCHES:
            why = size_trouble(key, value) if value or key in _NEVER_ZERO else None
            if why:
                return f"{key}: {why}"
    return None
