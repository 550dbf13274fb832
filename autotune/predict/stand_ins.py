"""What fake tensors cannot do, done without values: patches around a traced run, of torch and of transformers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def shapes_alone(fused: bool) -> Iterator[None]:
    """Models neither look at values, which fake tensors have not, nor check them.

    Args:
        fused: attention with dropout or a learnt bias is one kernel, as on a GPU; else as on the CPU, which has none for it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_plain_masks())
        stack.enter_context(_without_checks())
        if fused:
            stack.enter_context(_fused_attention())
        yield


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """transformers' own switch: no comparing of how many image tokens there are with how many features."""
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class _GradientOfBias(torch.autograd.Function):
    """Gives an attention bias that is learnt (T5's) its gradient: one number a score, as the kernel writes them."""

    @staticmethod
    def forward(ctx: Any, out: Any, bias: Any, shape: tuple[int, ...]) -> Any:
        ctx.shape, ctx.bias_shape = shape, bias.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient.new_empty(ctx.shape).sum_to_size(ctx.bias_shape), None


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention with dropout or with a learnt bias is one kernel, too. CUDA's memory-efficient one drops inside and keeps a
    seed, and writes the bias's gradient (torch's `_efficient_attention_backward`); the CPU's takes neither, and torch would
    fall back to products of whole score matrices."""
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        if attn_mask is None or not attn_mask.requires_grad:
            return original(query, key, value, attn_mask, 0.0, *args, **kwargs)
        out = original(query, key, value, attn_mask.detach(), 0.0, *args, **kwargs)
        return _GradientOfBias.apply(out, attn_mask, (*query.shape[:-1], key.shape[-2]))

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextlib.contextmanager
def _plain_masks() -> Iterator[None]:
    """Tells transformers that batches are not packed.

    It would look at the values of position ids, which fake tensors have not, and build masks that real training does
    without.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    if before is None:
        yield
        return
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)


@contextlib.contextmanager
def plain_conversion() -> Iterator[None]:
    """`module.to(…)` makes new parameters, shared where the old ones were.

    torch would swap fake tensors in place, which it refuses where anything holds a weak reference to one, as a fake mode
    does.
    """
    original = torch.nn.Module._apply
    made: dict[int, tuple[Any, Any]] = {}

    def converted(parameter: Any, fn: Any) -> Any:
        if id(parameter) not in made:
            with torch.no_grad():
                new = fn(parameter)
            same = new.dtype == parameter.dtype and new.device == parameter.device
            made[id(parameter)] = (parameter, parameter if same else torch.nn.Parameter(new, parameter.requires_grad))
        return made[id(parameter)][1]

    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = converted(parameter, fn)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    setattr(torch.nn.Module, original.__name__, apply)
    try:
        yield
    finally:
        setattr(torch.nn.Module, original.__name__, original)
