"""FLOPs of a training step from the configuration alone."""

from __future__ import annotations

from typing import Any

from autotune.problem.job import Job
from autotune.problem.tasks import CAUSAL, DECODED, IMAGE_TEXT, MASKED, SEQ2SEQ, told_image_size

Config = dict[str, Any]

# Architectures whose MLP has two matrices. All other architectures add a third as a gate.
_UNGATED = frozenset(
    (
        "gpt2",
        "phi",
        "gpt_neox",
        "opt",
        "mpt",
        "bert",
        "roberta",
        "xlm-roberta",
        "camembert",
        "electra",
        "deberta",
        "deberta-v2",
        "distilbert",
        "albert",
        "bart",
        "mbart",
        "blenderbot",
        "pegasus",
        "marian",
        "m2m_100",
        # towers
        "clip_vision_model",
        "siglip_vision_model",
        "idefics3_vision",
        "qwen2_vl",
        "qwen3_vl",
    )
)
# Names of the same size in different families.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_INNER = ("intermediate_size", "n_inner", "hidden_dim", "d_ff", "encoder_ffn_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _first(config: Config, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def dense_shape(config: Config) -> tuple[int, int, int] | None:
    """Return (layers, attention width = heads x head size, vocabulary) of a decoder or encoder; None if the keys are unknown."""
    text: Config = config.get("text_config") or config
    layers, hidden, heads = _first(text, _LAYERS), _first(text, _HIDDEN), _first(text, _HEADS)
    vocabulary = text.get("vocab_size")
    if layers is None or hidden is None or heads is None or not isinstance(vocabulary, int):
        return None
    head = text.get("head_dim") or text.get("d_kv") or hidden // heads
    return layers, heads * head, vocabulary


def matmul_parameters(config: Config, task: str = CAUSAL) -> int | None:
    """Return the parameters in a matrix product for every token: all but the embedding look-up. Only the experts that a token
    uses count, and the head only if it is as wide as the vocabulary."""
    text = config.get("text_config") or config
    shape = dense_shape(config)
    hidden = _first(text, _HIDDEN)
    if shape is None or hidden is None:
        return None
    layers, attention, vocabulary = shape
    heads = _first(text, _HEADS) or 1
    key_value = text.get("num_key_value_heads") or heads
    projections = hidden * attention * 2 + hidden * (attention // heads * key_value) * 2
    head = hidden * vocabulary if task in (*DECODED, MASKED, SEQ2SEQ) else 0
    head += hidden * hidden if task == MASKED else 0  # layer of a masked head
    return int(layers * projections + _mlp_parameters(text, hidden, layers) + head)


def _mlp_parameters(text: Config, hidden: int, layers: int) -> int:
    """Return the MLP parameters of all layers that one token uses."""
    inner = _first(text, _INNER) or 4 * hidden
    ungated = text.get("model_type") in _UNGATED
    if text.get("model_type") in ("t5", "mt5", "umt5"):
        ungated = not str(text.get("feed_forward_proj", "relu")).startswith("gated")
    matrices = 2 if ungated else 3
    dense = matrices * hidden * inner
    experts = _first(text, _EXPERTS)
    if not experts or not text.get("num_experts_per_tok"):
        return layers * dense
    of_expert = text.get("moe_intermediate_size") or inner
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * of_expert
    routed = matrices * hidden * (text["num_experts_per_tok"] * of_expert + shared) + hidden * experts
    step = text.get("decoder_sparse_step") or 1
    without = set(text.get("mlp_only_layers") or ()) | set(range(text.get("first_k_dense_replace") or 0))
    sparse = sum(1 for layer in range(layers) if layer not in without and (layer + 1) % step == 0)
    return int(sparse * routed + (layers - sparse) * dense)


def model_flops_per_token(job: Job) -> float | None:
    """Return the FLOPs of forward and backward per token: 6 x matmul parameters + 12 x layers x attention width x sequence
    (Chowdhery et al. 2022, PaLM, appendix B).

    Recomputation is not counted. Frozen weights take 4 instead of 6, as they have no gradients. An image tower's FLOPs are
    divided among the tokens of its sequence. The two stacks of an encoder-decoder are divided among the tokens of source and
    target. None for an unknown shape.
    """
    config = job.model.config
    shape, parameters = dense_shape(config), matmul_parameters(config, job.task)
    if shape is None or parameters is None:
        return None
    layers, attention, _ = shape
    times = 4.0 if job.lora else 6.0
    if job.task == SEQ2SEQ:
        return _flops_of_two_stacks(job, parameters, times)
    tower = _tower_flops(job, times) if job.task == IMAGE_TEXT else 0.0
    if tower is None:
        return None
    return times * parameters + 12.0 * layers * attention * job.seq_len + tower / job.seq_len


def _flops_of_two_stacks(job: Job, parameters: int, times: float) -> float | None:
    """Return the mean FLOPs of a source token, which the encoder processes, and a target token."""
    config = job.model.config
    hidden, shape = _first(config, _HIDDEN), dense_shape(config)
    if hidden is None or shape is None:
        return None
    layers, attention, vocabulary = shape
    deep = _first(config, ("num_decoder_layers", "decoder_layers")) or layers
    one_layer = (parameters - hidden * vocabulary) / layers
    crossing = 4 * hidden * attention  # projections, for source and target alike
    products = one_layer * (layers + deep) + crossing * deep + hidden * vocabulary
    scores = 12.0 * (layers + 2 * deep) * attention * job.seq_len
    return (times * products + scores) / 2


def _tower_flops(job: Job, times: float) -> float | None:
    """Return the FLOPs of one image in its tower; None if the configuration does not give its shape."""
    vision = job.model.config.get("vision_config")
    size = job.image_size or told_image_size(job.model.config)
    patch = vision.get("patch_size") if isinstance(vision, dict) else None
    if not isinstance(vision, dict) or size is None or not isinstance(patch, int):
        return None
    layers, hidden = _first(vision, _LAYERS), _first(vision, _HIDDEN)
    if layers is None or hidden is None:
        return None
    patches = (size // patch) ** 2
    parameters = layers * 4 * hidden * hidden + _mlp_parameters(vision, hidden, layers)
    return float(patches * (times * parameters + 12.0 * layers * hidden * patches))
