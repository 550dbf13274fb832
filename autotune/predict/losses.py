"""The loss of a traced model, taken in one of the ways of `trace.LOSSES`. A part of the tracer: only it imports this."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from autotune.predict.stand_ins import with_values
from autotune.problem.job import Job
from autotune.problem.tasks import DECODED, IMAGE_TEXT
from autotune.rank.live import LiveTensors
from autotune.rank.synthetic import one_batch, to_device
from autotune.rank.workload import forward


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for CUDA, as far as the CPU's has the same operators: matrix products and attention in 16 bits."""
    if job.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, job.autocast))


def loss_of(job: Job, model: Any, batches: Any, micro_batch: int, loss: str, live: LiveTensors) -> Any:
    """The scalar that backward begins with, of one micro-batch; `batches` are those of a workload of the user's own."""
    if batches is not None:
        return forward(model, to_device(next(iter(batches(micro_batch))), torch.device("cpu")))
    batch = _counted_batch(job, model.config, micro_batch, live)
    if loss == "own" or job.task not in DECODED:
        return model(**batch).loss
    labels = batch.pop("labels")
    if loss == "chunked":
        return _chunked_loss(model, batch)
    logits = model(**batch).logits
    if loss == "fused":
        return logits.mean()
    if loss in ("shifted32", "held32"):
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    if loss == "shifted-cast":
        shifted = shifted.float()
    scalar = torch.nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].reshape(-1))
    if loss == "held32":
        scalar.held = logits  # type: ignore[attr-defined]
    return scalar


def _chunked_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Of a head and loss that are one kernel (liger-kernel, ops/fused_linear_cross_entropy.py; Hsu et al. 2024): logits of as
    many tokens at a time as make them about as large as the hidden states, and the gradients of both in forward already."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: hidden
    hidden = model(**batch).logits
    return _FusedLinear.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight)


class _FusedLinear(torch.autograd.Function):
    """One chunk is enough: the others take its memory. Products count for as many times as there are chunks, all but one of
    them without an allocation, which `depth.extrapolate` would take for layers."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        tokens, width = hidden.shape
        chunks = -(-weight.shape[0] // width)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        part = hidden[: -(-tokens // chunks)]
        logits = part @ weight.t()
        in_32_bits = logits.float()
        del in_32_bits
        of_part = logits @ weight
        if of_weight is not None:
            of_weight.add_(logits.t() @ part)
        del of_part, logits
        ctx.gradients = of_hidden, of_weight
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.gradients


def uncounted_flops(job: Job, model: Any, micro_batch: int, loss: str) -> float:
    """FLOPs of the chunks that `_FusedLinear` does not run: logits, and the gradients of both that they are made of."""
    if loss != "chunked" or job.task not in DECODED:
        return 0.0
    weight = model.get_output_embeddings().weight
    products, (vocabulary, width) = (3 if weight.requires_grad else 2), weight.shape
    return float(2 * products * micro_batch * job.seq_len * width * (vocabulary - width))


def blank_batch(job: Job, config: Any, micro_batch: int) -> dict[str, Any]:
    """The arguments of a named model's forward, zeros where values do not matter.

    Raises:
        ValueError: no batch with images can be made for the model.
    """
    return one_batch(job, config, micro_batch, job.seq_len, _zeros)


def _counted_batch(job: Job, config: Any, micro_batch: int, live: LiveTensors) -> dict[str, Any]:
    """A blank batch under fake tensors; with images its values are known."""
    if job.task != IMAGE_TEXT:
        return blank_batch(job, config, micro_batch)
    batch = with_values(lambda: blank_batch(job, config, micro_batch))
    for tensor in batch.values():
        live.add(tensor)
    return batch


def _zeros(shape: tuple[int, ...], below: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)
