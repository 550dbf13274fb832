"""Adapters as people write them: `r=64 targets=c_attn,c_proj,w1,w2 + trainable wte,lm_head`."""

from __future__ import annotations

import re

from published_rows import LeftOut, Row

from autotune.problem.job import Lora
from autotune.problem.models import ModelSpec


def lora_of(row: Row) -> Lora | None:
    text = row["lora"].lower()
    if "frozen" in text:
        raise LeftOut("part of the model is frozen without adapters")
    if re.match(r"none|no\b|full|unknown \(looks full", text) or not text or text == "unknown":
        return None
    rank = re.search(r"\b(?:r|rank)\s*[=: ]\s*(\d+)", text)
    targets = re.search(r"targets?\s*=\s*([\w,\-]+)", text)
    names = targets.group(1).split(",") if targets else []
    if "all-linear" in text or "all linear" in text:
        names = ["all-linear"]
    saved = re.search(r"trainable ([\w,]+)", text)
    whole = tuple(_SAVED.get(name, name) for name in saved.group(1).split(",")) if saved else ()
    return Lora(int(rank.group(1)) if rank else 8, tuple(names) or ("q", "v"), saved=whole)


_SAVED = {
    "wte": "embed_tokens",
    "embed": "embed_tokens",
    "embedding": "embed_tokens",
}  # names elsewhere -> in llama-like classes


# Modules as papers and other code bases call them -> as transformers' llama-like classes do.
_TARGETS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "proj": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "w_pack": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "default": ("q_proj", "k_proj", "v_proj"),
    "c_proj": ("o_proj", "down_proj"),
    "w1": ("up_proj",),
    "w2": ("gate_proj",),
    "head": ("lm_head",),
    "output": ("lm_head",),
}
# Where an architecture has other names: (query, key, value), output, MLP.
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt_neox": {"qkv": ("query_key_value",), "o": ("dense",), "mlp": ("dense_h_to_4h", "dense_4h_to_h")},
    "bloom": {"qkv": ("query_key_value",), "o": ("dense",), "mlp": ("dense_h_to_4h", "dense_4h_to_h")},
    "falcon": {"qkv": ("query_key_value",), "o": ("dense",), "mlp": ("dense_h_to_4h", "dense_4h_to_h")},
    "gpt2": {"qkv": ("c_attn",), "o": ("c_proj",), "mlp": ("c_fc",)},
    "gpt_bigcode": {"qkv": ("c_attn",), "o": ("c_proj",), "mlp": ("c_fc",)},
    "mpt": {"qkv": ("Wqkv",), "o": ("out_proj",), "mlp": ("up_proj", "down_proj")},
    "phi": {"o": ("dense",), "mlp": ("fc1", "fc2")},
    "opt": {"o": ("out_proj",), "mlp": ("fc1", "fc2")},
    "phi3": {"qkv": ("qkv_proj",), "o": ("o_proj",), "mlp": ("gate_up_proj", "down_proj")},
    "glm": {"mlp": ("gate_up_proj", "down_proj")},
    "gptj": {"o": ("out_proj",), "mlp": ("fc_in", "fc_out")},
    "gpt_neo": {"o": ("out_proj",), "mlp": ("c_fc", "c_proj")},
}


def targets_in(model: ModelSpec, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of modules as this model has them."""
    own = _NAMES.get(str(model.config["model_type"]), {})
    found: list[str] = []
    for name in names:
        for module in _TARGETS.get(name.lower(), (name,)):
            if module in ("q_proj", "k_proj", "v_proj") and "qkv" in own:
                found += own["qkv"]
            elif module == "o_proj" and "o" in own:
                found += own["o"]
            elif module in ("gate_proj", "up_proj", "down_proj") and "mlp" in own:
                found += own["mlp"]
            else:
                found.append(module)
    return tuple(dict.fromkeys(found))
