"""Parts of a model that Liger's kernels replace, by model type and Liger's version.

Source: liger-kernel 0.8.5, `transformers/monkey_patch.py`. The table lists the default effect of
`_apply_liger_kernel_to_instance` on each type of `MODEL_TYPE_TO_APPLY_LIGER_FN`; transformers' Trainer calls it without options.
The first version for each type is from the same file of versions 0.6.1 to 0.8.4.

Left out are layer norms and Nemotron's squared ReLU, which keep the same tensors as torch's. Also left out are the rotation of
Llama 4 and the towers of models with images.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autotune.versions import release

LIGER_READ = "0.8.5"  # version from which this table was read
# Liger's version -> oldest transformers that it needs; with an older one its import fails.
NEEDS_TRANSFORMERS = {(0, 7, 0): (4, 52), (0, 8, 5): (5, 0)}
_FIVE = (5,)  # major version of transformers
# The first version that can be imported with transformers 5, and the first that finds these types' experts there.
_BESIDE_FIVE = (0, 6, 5)
_EXPERTS_BESIDE_FIVE = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "qwen3_next", "hunyuan_v1_moe"), (0, 7, 0)),
    "glm4v_moe": (0, 8, 0),
}
# Versions that compute each chunk's part of the head's gradient in 32 bits and then add it (ops/fused_linear_cross_entropy.py).
# If the sum has 32 bits, later versions do so only if torch has no product of 16-bit operands into 32 bits.
_APART_FROM, _APART_UNTIL, _WIDE_UNTIL = (0, 6, 2), (0, 8, 3), (0, 8, 1)
_TORCH_INTO_32_BITS = (2, 8)
_CHUNKS_SINCE = (0, 8, 3)  # since then models may have their own chunk size
_ROTATION = ("apply_rotary_pos_emb",)


@dataclass(frozen=True)
class Kernels:
    """Parts of a decoder that are replaced."""

    norms: frozenset[str]  # names of replaced RMS norms; all others stay
    in_place: bool = True  # backward of a norm overwrites the gradient that it receives
    rotations: tuple[str, ...] = _ROTATION  # functions of the model's module
    gates: bool = True  # activation and product of MLPs
    experts: bool = False  # all experts of a layer at once, in versions that support it
    loss: str = "chunked"  # one of `trace.LOSSES`
    chunk: int = 1  # size of one chunk's logits, as a multiple of the hidden states'


_LAYER = frozenset(("norm", "input_layernorm", "post_attention_layernorm"))
_AFTER = frozenset(("norm", "post_attention_layernorm", "post_feedforward_layernorm"))
_AROUND = _AFTER | {"input_layernorm", "pre_feedforward_layernorm"}
_HEADS = frozenset(("q_norm", "k_norm"))
_LOW_RANK = frozenset(("q_a_layernorm", "kv_a_layernorm"))
_GLM = _LAYER | {"post_self_attn_layernorm", "post_mlp_layernorm"}

_PLAIN = Kernels(_LAYER)
_NEXT = Kernels(_LAYER | _HEADS, in_place=False, rotations=(), experts=True)
_LATENT = Kernels(_LAYER | _LOW_RANK, rotations=(), experts=True)

_DECODERS = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "smollm3", "phi3", "gemma", "hunyuan_v1_dense"), _PLAIN),
    "mllama_text_model": _PLAIN,
    "llama4_text": Kernels(_LAYER, rotations=()),
    "mixtral": Kernels(_LAYER, experts=True),
    "hunyuan_v1_moe": Kernels(_LAYER, gates=False, experts=True),
    "gpt_oss": Kernels(_LAYER, gates=False, chunk=8),  # model/gpt_oss.py, since 0.8.3
    "granite": Kernels(_LAYER, loss="fused32"),  # logits are scaled first
    "nemotron": Kernels(frozenset(), rotations=(), gates=False),
    "qwen3": Kernels(_LAYER | _HEADS),
    "qwen3_moe": Kernels(_LAYER | _HEADS, experts=True),
    # transformers 5 calls another function for the rotation than the one that Liger replaces
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"), Kernels(_LAYER, rotations=("apply_multimodal_rotary_pos_emb",))
    ),
    "qwen3_vl_text": Kernels(_LAYER | _HEADS, gates=False),
    "qwen3_vl_moe_text": Kernels(_LAYER | _HEADS, gates=False, experts=True),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _NEXT),
    "gemma2": Kernels(_AROUND, in_place=False),
    "gemma3_text": Kernels(_AROUND | _HEADS, in_place=False),
    "gemma4_text": Kernels(_AROUND | _HEADS, in_place=False, rotations=()),
    **dict.fromkeys(("olmo2", "olmo3"), Kernels(_AFTER, in_place=False)),
    "exaone4": Kernels(_AFTER | _HEADS, in_place=False),
    "glm4": Kernels(_GLM, in_place=False, rotations=()),
    "glm4v_text": Kernels(_GLM, rotations=()),
    "glm4v_moe_text": Kernels(_LAYER, rotations=(), experts=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    "deepseek_v4": Kernels(_LAYER, rotations=(), gates=False),
    "falcon_h1": Kernels(frozenset(("final_layernorm", "input_layernorm", "pre_ff_layernorm"))),
}
_ONLY_WITHIN = frozenset(("glm4v_text", "glm4v_moe_text"))  # only inside a model with images
_CHUNKED_WITH_IMAGES = """
    gemma3 gemma4 glm4v glm4v_moe internvl llava mllama paligemma
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
"""
_WITH_IMAGES = {  # kind of loss; the decoder's type decides which parts inside are replaced
    **dict.fromkeys(_CHUNKED_WITH_IMAGES.split(), "chunked"),
    "llama4": "own",  # Liger replaces only the forward of the decoder's own head
}
# Types whose forward with images uses attributes that transformers' models no longer have, or drops arguments that they need.
FAILS_WITH_IMAGES = frozenset(("paligemma", "mllama", "llama4"))
_SINCE = {
    "glm4v": (0, 6, 2),
    **dict.fromkeys(("falcon_h1", "glm4v_moe", "internvl", "qwen3_next", "smolvlm"), (0, 6, 3)),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "olmo3"), (0, 6, 4)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"), (0, 6, 4)),
    **dict.fromkeys(("exaone4", "gpt_oss"), (0, 6, 5)),
    **dict.fromkeys(("gemma4_text", "ministral", "nemotron"), (0, 8, 0)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), (0, 8, 0)),
    **dict.fromkeys(("gemma4", "deepseek_v4"), (0, 8, 1)),
    "deepseek_v3": (0, 8, 4),
    "deepseek_v2": (0, 8, 5),
}
_EXPERTS_SINCE = (0, 8, 0)  # ops/fused_moe.py; earlier versions loop over the experts


def kernels_of(model_type: str | None, version: str | None = None) -> Kernels | None:
    """Return the parts of a decoder of this type that a version of Liger's kernels, or the newest, replaces; None if none."""
    kernels = _DECODERS.get(model_type or "")
    if kernels is None or version is None:
        return kernels
    own = release(version)
    chunk = kernels.chunk if own >= _CHUNKS_SINCE else 1
    return dataclasses.replace(kernels, experts=kernels.experts and own >= _EXPERTS_SINCE, chunk=chunk)


def since(model_type: str | None, transformers: str | None = None) -> tuple[int, ...] | None:
    """Return the first Liger version that replaces anything in a whole model of this type, or None if no version does.

    Versions before 0.6.1 count as one, the empty tuple.

    Args:
        transformers: the installed version, with which Liger must work; None ignores it.
    """
    known = model_type in _WITH_IMAGES or (model_type in _DECODERS and model_type not in _ONLY_WITHIN)
    if not known:
        return None
    kind = str(model_type)
    first: tuple[int, ...] = _SINCE.get(kind, ())
    if release(transformers) >= _FIVE:
        first = max(first, _BESIDE_FIVE, _EXPERTS_BESIDE_FIVE.get(kind, ()))
    return first


def is_known(model_type: str | None, version: str | None = None) -> bool:
    """Check that a version of Liger's kernels, or the newest, replaces anything in a whole model of this type."""
    first = since(model_type)
    return first is not None and (version is None or first <= release(version))


def loss_in_kernel(
    model_type: str | None, version: str | None = None, *, wide: bool = False, torch: str | None = None
) -> str:
    """Return how a whole model of this type computes its loss under a version of Liger's kernels, or the newest.

    The result is one of `trace.LOSSES`.

    Args:
        wide: the weights have 32 bits.
        torch: torch's version.
    """
    if not is_known(model_type, version):
        return "own"
    kernels = kernels_of(model_type)
    loss = kernels.loss if kernels else _WITH_IMAGES[str(model_type)]
    own = release(version or LIGER_READ)
    made_apart = _APART_FROM <= own < (_WIDE_UNTIL if wide else _APART_UNTIL)
    if wide and torch is not None and own >= _APART_FROM:
        made_apart = made_apart or release(torch) < _TORCH_INTO_32_BITS
    return "chunked-apart" if loss == "chunked" and made_apart else loss
