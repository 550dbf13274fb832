"""Losses of a traced model, one for each of `trace.LOSSES`. Only the tracer imports this module."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from autotune.predict.fused_kernels import FusedLinear, LossInPlace
from autotune.predict.stand_ins import with_values
from autotune.problem.job import Job
from autotune.problem.liger import kernels_of
from autotune.problem.tasks import DECODED, IMAGE_TEXT
from autotune.rank.live import LiveTensors
from autotune.rank.synthetic import one_batch, to_device
from autotune.rank.workload import forward
from autotune.versions import version_of

IN_CHUNKS = ("chunked", "chunked-apart")


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Return torch's autocast for CUDA, as far as the CPU has the same operators: matrix products and attention in 16 bits."""
    if job.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, job.autocast))


def loss_of(job: Job, model: Any, batches: Any, micro_batch: int, loss: str, live: LiveTensors) -> Any:
    """Return the scalar on which backward starts, for one micro-batch. `batches` come from the user's own workload."""
    if batches is not None:
        return forward(model, to_device(next(iter(batches(micro_batch))), torch.device("cpu")))
    batch = _counted_batch(job, model.config, micro_batch, live)
    if loss == "own" or job.task not in DECODED:
        return model(**batch).loss
    labels = batch.pop("labels")
    if loss in IN_CHUNKS:
        return _chunked_loss(model, batch, apart=loss == "chunked-apart")
    logits = model(**batch).logits
    if loss == "fused":
        return logits.mean()
    if loss == "fused32":
        return LossInPlace.apply(logits.float())
    if loss in ("shifted32", "held32"):
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    if loss == "shifted-cast":
        shifted = shifted.float()
    scalar = torch.nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].reshape(-1))
    if loss == "held32":
        scalar.held = logits  # type: ignore[attr-defined]
    return scalar


def _chunked_loss(model: Any, batch: dict[str, Any], apart: bool) -> Any:
    """Run a head and loss that are one kernel (liger-kernel, ops/fused_linear_cross_entropy.py; Hsu et al. 2024). Forward
    handles a part of the tokens at a time, with logits about as large as the hidden states, and already makes both gradients."""
    head, read = model.get_output_embeddings(), []

    def forward_of_head(hidden: Any) -> Any:
        read.append(hidden)
        return hidden[..., :1]  # the kernel also does what a model does to its logits, so only one column remains here

    head.forward = forward_of_head
    model(**batch)
    hidden = read.pop()
    return FusedLinear.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight, apart, _chunk_of(model))


def _chunk_of(model: Any) -> int:
    kernels = kernels_of(model.config.model_type, version_of("liger_kernel"))
    return kernels.chunk if kernels else 1


def bytes_of_head(job: Job, model: Any, loss: str) -> float:
    """Return the bytes of a head that the loss reads from outside its module, else 0. ZeRO-3 then registers it as a parameter
    of the whole model (`register_external_parameter`, runtime/zero/parameter_offload.py), and releases it when the model has
    finished a pass."""
    if loss not in IN_CHUNKS or job.task not in DECODED:
        return 0.0
    weight = model.get_output_embeddings().weight
    return float(weight.numel() * weight.element_size())


@dataclass(frozen=True)
class Uncounted:
    """Work of a loss in forward that a traced run does not do."""

    flops: float = 0.0
    moved: float = 0.0  # bytes
    operators: int = 0

    @classmethod
    def of(cls, job: Job, model: Any, micro_batch: int, loss: str) -> Uncounted:
        """Return the work of a fused kernel's loss, which reads the logits twice and writes their gradient once. In parts,
        add logits and both gradients for all parts except the one that runs."""
        if loss not in (*IN_CHUNKS, "fused32") or job.task not in DECODED:
            return cls()
        weight = model.get_output_embeddings().weight
        products, (vocabulary, width) = (3 if weight.requires_grad else 2), weight.shape
        tokens = micro_batch * job.seq_len
        if loss == "fused32":
            return cls(0.0, 3.0 * 4 * tokens * vocabulary, 1)
        at_once = width * _chunk_of(model)
        chunks = -(-vocabulary // at_once)
        flops = 2 * products * tokens * width * max(0, vocabulary - at_once)
        return cls(float(flops), 3.0 * tokens * vocabulary * weight.element_size(), (products + 1) * (chunks - 1) + 1)


def blank_batch(job: Job, config: Any, micro_batch: int) -> dict[str, Any]:
    """Return the arguments of a named model's forward, with zeros if values do not matter.

    Raises:
        ValueError: no batch with images can be made for the model.
    """
    return one_batch(job, config, micro_batch, job.seq_len, _zeros)


def _counted_batch(job: Job, config: Any, micro_batch: int, live: LiveTensors) -> dict[str, Any]:
    """Return a blank batch under fake tensors; with images its values are known."""
    if job.task != IMAGE_TEXT:
        return blank_batch(job, config, micro_batch)
    batch = with_values(lambda: blank_batch(job, config, micro_batch))
    for tensor in batch.values():
        live.add(tensor)
    return batch


def _zeros(shape: tuple[int, ...], below: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)
