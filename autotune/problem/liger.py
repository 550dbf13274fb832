"""Which parts of a model Liger's kernels replace, by its type and their version.

Source: liger-kernel 0.8.5, `transformers/monkey_patch.py`: what `_apply_liger_kernel_to_instance` does to each type of
`MODEL_TYPE_TO_APPLY_LIGER_FN` when nothing else is asked for, as transformers' Trainer calls it; since when a type is among them,
by the same file of versions 0.6.1 to 0.8.4. Left out are layer norms, which keep what torch's keep, the squared ReLU of Nemotron
likewise, the rotation of Llama 4, and the towers of models with images.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autotune.versions import release

LIGER_READ = "0.8.5"  # the version that this table was read of
# Since when it needs transformers as new as this: with an older one it fails when it is imported
NEEDS_TRANSFORMERS = {(0, 7, 0): (4, 52), (0, 8, 5): (5, 0)}
_FIVE = (5,)  # of transformers
# The first that can be imported beside it, and the first that finds the experts of these types there
_BESIDE_FIVE = (0, 6, 5)
_EXPERTS_BESIDE_FIVE = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "qwen3_next", "hunyuan_v1_moe"), (0, 7, 0)),
    "glm4v_moe": (0, 8, 0),
}
# Versions that make each chunk's part of the head's gradient in 32 bits before they add it (ops/fused_linear_cross_entropy.py);
# to a sum in 32 bits the later ones do so where torch has no product of 16-bit operands into 32 bits
_APART_FROM, _APART_UNTIL, _WIDE_UNTIL = (0, 6, 2), (0, 8, 3), (0, 8, 1)
_TORCH_INTO_32_BITS = (2, 8)
_CHUNKS_SINCE = (0, 8, 3)  # models may have a size of their own
_ROTATION = ("apply_rotary_pos_emb",)


@dataclass(frozen=True)
class Kernels:
    """What is replaced in a decoder."""

    norms: frozenset[str]  # names of RMS norms; all others stay
    in_place: bool = True  # backward of a norm writes over the gradient that it is given
    rotations: tuple[str, ...] = _ROTATION  # functions of the model's module
    gates: bool = True  # of MLPs: activation and product
    experts: bool = False  # all of a layer's at once, where the version can
    loss: str = "chunked"  # one of `trace.LOSSES`
    chunk: int = 1  # times as large as hidden states are logits of one chunk


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
    # what transformers 5 rotates by has another name than what Liger puts there
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
_ONLY_WITHIN = frozenset(("glm4v_text", "glm4v_moe_text"))  # a model with images
_CHUNKED_WITH_IMAGES = """
    gemma3 gemma4 glm4v glm4v_moe internvl llava mllama paligemma
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
"""
_WITH_IMAGES = {  # how their loss is taken; within, the decoder's type says what is replaced
    **dict.fromkeys(_CHUNKED_WITH_IMAGES.split(), "chunked"),
    "llama4": "own",  # Liger has the forward of the decoder's own head alone
}
# Whose forward with images looks for what transformers' models have no more, or does not hand on what they ask for
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
_EXPERTS_SINCE = (0, 8, 0)  # ops/fused_moe.py; before, a loop over experts


def kernels_of(model_type: str | None, version: str | None = None) -> Kernels | None:
    """What a version of Liger's kernels, or the newest, replaces in a decoder of this type; None: nothing."""
    kernels = _DECODERS.get(model_type or "")
    if kernels is None or version is None:
        return kernels
    own = release(version)
    chunk = kernels.chunk if own >= _CHUNKS_SINCE else 1
    return dataclasses.replace(kernels, experts=kernels.experts and own >= _EXPERTS_SINCE, chunk=chunk)


def since(model_type: str | None, transformers: str | None = None) -> tuple[int, ...] | None:
    """The version of Liger's kernels that was the first to replace anything in a whole model of this type beside a version of
    transformers, or any, as far as any before 0.6.1 did not; None: none does."""
    known = model_type in _WITH_IMAGES or (model_type in _DECODERS and model_type not in _ONLY_WITHIN)
    if not known:
        return None
    kind = str(model_type)
    first: tuple[int, ...] = _SINCE.get(kind, ())
    if release(transformers) >= _FIVE:
        first = max(first, _BESIDE_FIVE, _EXPERTS_BESIDE_FIVE.get(kind, ()))
    return first


def is_known(model_type: str | None, version: str | None = None) -> bool:
    """Whether a version of Liger's kernels, or the newest, replaces anything in a whole model of this type."""
    first = since(model_type)
    return first is not None and (version is None or first <= release(version))


def loss_in_kernel(
    model_type: str | None, version: str | None = None, *, wide: bool = False, torch: str | None = None
) -> str:
    """How the loss of a whole model of this type is taken with a version of Liger's kernels, or the newest: one of
    `trace.LOSSES`. `wide`: of weights in 32 bits, by a version of torch."""
    if not is_known(model_type, version):
        return "own"
    kernels = kernels_of(model_type)
    loss = kernels.loss if kernels else _WITH_IMAGES[str(model_type)]
    own = release(version or LIGER_READ)
    made_apart = _APART_FROM <= own < (_WIDE_UNTIL if wide else _APART_UNTIL)
    if wide and torch is not None and own >= _APART_FROM:
        made_apart = made_apart or release(torch) < _TORCH_INTO_32_BITS
    return "chunked-apart" if loss == "chunked" and made_apart else loss
