"""Activations and arithmetic from the configuration alone, where fake tensors cannot run a model."""

from __future__ import annotations

from typing import Any

from autotune.errors import UserError
from autotune.predict.flops import dense_shape, matmul_parameters
from autotune.predict.passes import BACKWARD, FORWARD, Pass, Trace
from autotune.problem.job import Job

_KEPT_BY_CHECKPOINTS = 0.15  # of what a forward saves: inputs of layers and the head, by the shipped models' traces


def closed_form_trace(job: Job, why: str) -> Trace:
    """A Trace of a dense decoder by counting what its layers keep (Korthikanti et al. 2022, section 4.1, generalised to
    grouped heads and gated MLPs, attention by a kernel that keeps no score matrix). `exact` is False: the predictor
    widens its intervals.

    Raises:
        UserError: the configuration names no shape.
    """
    text: dict[str, Any] = job.model.config.get("text_config") or job.model.config
    shape, products = dense_shape(job.model.config), matmul_parameters(job.model.config)
    hidden = text.get("hidden_size", text.get("n_embd"))
    if shape is None or products is None or not isinstance(hidden, int):
        raise UserError(
            f"model {job.model.name} can be neither traced ({why}) nor read: its configuration has no shape"
        )
    layers, attention, vocabulary = shape
    heads: int = text.get("num_attention_heads", text.get("n_head")) or 1
    key_value = attention // heads * (text.get("num_key_value_heads") or heads)
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    width = job.element_bytes
    tokens = job.seq_len
    # a layer: two norms (input kept in 32 bits by most), q k v, attention's output, two residuals, MLP's inner values
    layer = tokens * (width * (4 * hidden + 3 * attention + 2 * key_value + 4 * inner) + 4 * 2 * hidden)
    head = tokens * vocabulary * (width + 4 + 4)  # logits, their 32-bit copy and log-softmax
    block = tokens * hidden * width  # what a checkpointed layer keeps: its input
    flops, scores = 2.0 * products * tokens, 4.0 * layers * attention * tokens * tokens
    tied = bool(text.get("tie_word_embeddings", True))
    parameters = [products // layers] * layers + ([] if tied else [hidden * vocabulary])
    gradients = float(width * sum(parameters))

    def one(kept: float, recompute: float, in_layer: float) -> Pass:
        moved = 3.0 * layer * layers + head
        return Pass(
            phase=[FORWARD, BACKWARD, BACKWARD],
            fixed=[0.0, 0.0, 0.0],
            per_sequence=[kept + head, kept + head + in_layer, in_layer],
            gradients=[0.0, 0.0, gradients],
            in_use=[hidden * vocabulary * width] * 3,
            after_forward=(0.0, kept + head),
            flops=(flops, 2 * flops + recompute),
            attention=(scores, 2.5 * scores + recompute / flops * scores),
            moved=((0.0, moved), (0.0, 2 * moved)),
            operators=(30.0 * layers, 60.0 * layers),
        )

    return Trace(
        parameters,
        0,
        one(layer * layers, 0.0, 0.0),
        one(block * layers, flops, layer),
        exact=False,
        note=f"not traced ({why}): closed form",
        largest=max(parameters),
    )


def profile_trace(job: Job) -> Trace:
    """A Trace from what a user's script showed when it ran as it is: the sizes of its parameters, and the bytes that one
    forward saved for its backward. `exact` is False.

    Raises:
        UserError: it showed nothing.
    """
    seen: dict[str, Any] = job.script.profile if job.script else {}
    if not seen.get("trained"):
        raise UserError("the script showed no parameters that are trained")
    trained: list[int] = seen["trained"]
    total = sum(trained) + seen["frozen"]
    tokens = float(seen["tokens_per_sample"])
    saved = float(seen.get("saved_bytes_per_sample") or 34 * tokens * (total / 12) ** 0.5)
    kept = _KEPT_BY_CHECKPOINTS * saved
    flops = 2.0 * total * tokens
    backward = flops * (1 + sum(trained) / total)  # of frozen weights no gradient is made
    gradients = job.element_bytes * sum(trained)

    def one(left: float, recompute: float, again: float) -> Pass:
        return Pass(
            phase=[FORWARD, BACKWARD, BACKWARD],
            fixed=[0.0, 0.0, 0.0],
            per_sequence=[left, 1.2 * left + again, 0.2 * left + again],
            gradients=[0.0, 0.0, gradients],
            in_use=[job.element_bytes * max(trained)] * 3,
            after_forward=(0.0, left),
            flops=(flops, backward + recompute),
            attention=(0.0, 0.0),
            moved=((0.0, 3 * saved), (0.0, 6 * saved)),
            operators=(30.0 * 24, 60.0 * 24),
        )

    plain, checkpointed = one(saved, 0.0, 0.0), one(kept, flops, kept)
    if seen.get("checkpointed"):
        plain = checkpointed
    return Trace(
        trained,
        seen["frozen"],
        plain,
        checkpointed,
        exact=False,
        largest=max(trained),
        note="the script's model is not traced: predicted from what its first steps showed",
    )
