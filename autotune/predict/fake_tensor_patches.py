"""Patches of torch and transformers around a traced run, so that fake tensors can run without values."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

from autotune.rank.versions import experts_module, looks_inside, masks_module

Patch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def shapes_alone(fused: bool) -> Iterator[None]:
    """Patch models so that they neither read values, which fake tensors lack, nor check them.

    Args:
        fused: run attention with dropout or a learnt bias as one kernel, as on a GPU. The CPU has no such kernel.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_plain_masks())
        # transformers' own switch, without which it compares the number of image tokens with the number of features
        stack.enter_context(patch.dict(os.environ, {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}))
        stack.enter_context(_known_values())
        stack.enter_context(_grouped_products())
        stack.enter_context(_even_experts())
        stack.enter_context(_made_known())
        if fused:
            stack.enter_context(_fused_attention())
        yield


def with_values(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors that `make` returns as fake tensors with known values.

    Results computed only from these are known, too.

    Models with images cut their features by the values of a batch.
    """
    with _disable_current_modes():
        real = make()
    return dict(zip(real, _faked(real.values()), strict=True))


def _faked(values: Iterable[Any]) -> Iterator[Any]:
    """Yield real tensors as fake ones with known values, and other values unchanged."""
    mode = torch.empty(0).fake_mode  # type: ignore[attr-defined]
    for value in values:
        if isinstance(value, torch.Tensor):
            made = mode.from_tensor(value)
            made.constant = value
            yield made
        else:
            yield value


_MOST_KNOWN = 2**25  # elements: the pixels of a few images

_OF_GRIDS = (  # functions of transformers.vision_utils that depend on the values of the images' sizes
    "get_vision_cu_seqlens",
    "get_vision_attention_seqlens",
    "get_vision_position_ids",
    "get_vision_window_index",
    "get_vision_interpolation_indices_and_weights",
)
_POSITIONS = "get_rope_index"  # a method of Qwen2-VL and its successors that works token by token
_WINDOWS = "get_window_index"  # a method of Qwen2.5-VL's tower before transformers 5 that depends on the images' sizes


@contextlib.contextmanager
def _known_values() -> Iterator[None]:
    """Keep known values in tensors with more than one element, and compute functions of image sizes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST_KNOWN))
        # A model's module is loaded when its configuration is built.
        for module in [one for name, one in sys.modules.items() if name.startswith("transformers.models.")]:
            for name, function in [(name, vars(module).get(name)) for name in _OF_GRIDS]:
                if callable(function):
                    stack.enter_context(patch.object(module, name, _computed(function)))
            for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
                if _POSITIONS in vars(kind):
                    stack.enter_context(patch.object(kind, _POSITIONS, _blank_positions))
                if _WINDOWS in vars(kind):
                    stack.enter_context(patch.object(kind, _WINDOWS, _computed_method(vars(kind)[_WINDOWS])))
        yield


def _blank_positions(_: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Return (positions by time, height and width; their offsets)."""
    return input_ids.new_zeros(3, *input_ids.shape), input_ids.new_zeros(len(input_ids), 1)


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(grid: Any, *args: Any, **kwargs: Any) -> Any:
        known = getattr(grid, "constant", None)
        if known is None:
            return function(grid, *args, **kwargs)
        with _disable_current_modes():
            found = function(known, *args, **kwargs)
        return tuple(_faked(found)) if isinstance(found, tuple) else next(_faked([found]))

    return compute


def _computed_method(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tower, grid: _computed(functools.partial(method, tower))(grid)


class _GradientOfBias(torch.autograd.Function):
    """Give a learnt attention bias (T5's) its gradient: one number per score, as the kernel writes them."""

    @staticmethod
    def forward(ctx: Any, out: Any, bias: Any, shape: tuple[int, ...]) -> Any:
        ctx.shape, ctx.bias_shape = shape, bias.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient.new_empty(ctx.shape).sum_to_size(ctx.bias_shape), None


def _fused_attention() -> Patch:
    """Run attention with dropout or a learnt bias as one kernel.

    CUDA's memory-efficient kernel applies dropout inside, keeps a seed, and writes the bias's gradient (torch's
    `_efficient_attention_backward`). The CPU's kernel supports neither, so torch would fall back to products of whole score
    matrices.
    """
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        if attn_mask is None or not attn_mask.requires_grad:
            return original(query, key, value, attn_mask, 0.0, *args, **kwargs)
        out = original(query, key, value, attn_mask.detach(), 0.0, *args, **kwargs)
        return _GradientOfBias.apply(out, attn_mask, (*query.shape[:-1], key.shape[-2]))

    return patch.object(functional, "scaled_dot_product_attention", attention)


def _grouped_products() -> Patch:
    """Run products of experts in dtypes other than bf16.

    torch runs these but has no shapes for them. The fallback operator of transformers replaces them with equal results.
    """
    return _in_place_of(
        experts_module(),
        "_can_use_grouped_mm",
        lambda before: lambda input, weight, offs: weight.dtype == torch.bfloat16 and before(input, weight, offs),
    )


def _even_experts() -> Patch:
    """Spread tokens evenly over experts.

    Older models run one expert after the other, each with the tokens that chose it, and find these by `one_hot` of the
    choices.
    """
    functional = torch.nn.functional
    original = functional.one_hot

    def one_hot(chosen: Any, num_classes: int = -1) -> Any:
        if num_classes < 1 or not _is_unknown(chosen):
            return original(chosen, num_classes)
        made = chosen.new_zeros(*chosen.shape, num_classes)
        with _disable_current_modes():
            in_turn = torch.arange(chosen.numel()) % num_classes
            made.constant = original(in_turn.view(chosen.shape), num_classes)
        return made

    return contextlib.nullcontext() if experts_module() else patch.object(functional, "one_hot", one_hot)


@contextlib.contextmanager
def _made_known() -> Iterator[None]:
    """Give values to tensors that models create and then read.

    A single random number decides whether a layer is skipped: here no layer is. Older models read more: ones are the mask of
    a batch without one (weights that begin as ones have one dimension), and a range holds the position of each token. Older
    models also search the batch for padding, to warn about it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch, "rand", _known(torch.rand, lambda made: made.dim() == 0, torch.ones)))
        if looks_inside():
            models = importlib.import_module("transformers.modeling_utils").PreTrainedModel
            stack.enter_context(patch.object(models, "warn_if_padding_and_no_attention_mask", lambda *_: None))
            stack.enter_context(patch.object(torch, "ones", _known(torch.ones, lambda made: made.dim() > 1)))
            stack.enter_context(patch.object(torch, "arange", _known(torch.arange, lambda made: True)))
        yield


def _known(
    make: Callable[..., Any], wanted: Callable[[Any], bool], values: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Wrap `make` so that its wanted tensors have known values: its own, or those of `values`."""

    def made(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        real = not any(isinstance(one, torch.Tensor) for one in args)
        if real and _is_unknown(tensor) and wanted(tensor) and tensor.numel() <= _MOST_KNOWN:
            with _disable_current_modes():
                tensor.constant = (values or make)(*args, **kwargs)
        return tensor

    return made


def _is_unknown(tensor: Any) -> bool:
    return isinstance(tensor, fake_tensor.FakeTensor) and tensor.constant is None


def _plain_masks() -> Patch:
    """Make transformers assume that batches are not packed.

    Otherwise it would read the values of position ids, which fake tensors lack, and build masks that real training does not
    use.
    """
    return _in_place_of(masks_module(), "find_packed_sequence_indices", lambda before: lambda position_ids: None)


def _in_place_of(module: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Replace a module's function by what `make` returns for it. Do nothing if the function is missing."""
    before = getattr(module, name, None)
    return contextlib.nullcontext() if before is None else patch.object(module, name, make(before))


def plain_conversion() -> Patch:
    """Make `module.to(…)` create new parameters, shared like the old ones.

    torch would swap fake tensors in place. It refuses to if anything holds a weak reference to one, as a fake mode does.
    """
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

    return patch.object(torch.nn.Module, "_apply", apply)


# transformers runs a recurrence over a sequence token by token if no kernel is installed. Fake tensors then take minutes a layer.
# A function of mamba, falcon_mamba and jamba, and a method of recurrent_gemma.
_RECURRENCES = ("mamba_selective_scan", "_rnn_scan")


def runs_token_by_token(model: torch.nn.Module) -> bool:
    """Check that the model has such a recurrence."""
    kinds = {type(module) for module in model.modules()}
    owners = [*kinds, *(sys.modules[kind.__module__] for kind in kinds)]
    return any(hasattr(owner, name) for owner in owners for name in _RECURRENCES)


# -- losses ------------------------------------------------------------------------------------------------------------


class FusedLinear(torch.autograd.Function):
    """A head and its loss, computed for a part of the tokens at a time; forward already makes the gradients of both.

    A part's logits are as large as the hidden states. Only one part runs here, as each part reuses the same memory.
    `tracer.add_uncounted` counts FLOPs and bytes of the remaining parts: `tracer.extrapolate` would take repeated operators
    without an allocation for layers. The kernel rounds the rows of a part up to a power of two, up to twice as
    many. Two micro-batches cannot show growth in such steps, so this is the lower bound.

    With 32-bit logits a part's gradient of the head is made apart in 32 bits. On cards before Ampere it always is, which is
    not counted.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        """Allocate the tensors of Liger's fused linear loss in chunks; return a loss of shape ()."""
        tokens, width = hidden.shape
        chunks = -(-weight.shape[0] // width)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        part = hidden[: -(-tokens // chunks)]
        logits = part @ weight.t()
        _multiply(logits, weight, of_hidden[: len(part)])
        if of_weight is not None and logits.dtype == torch.float32:
            of_weight.add_((logits.t() @ part).float())
        elif of_weight is not None:
            # torch has no such product into 32 bits on CPUs, so the sum is made in 16 bits inside the same memory.
            sums = of_weight.view(logits.dtype)[:, :width]
            torch.addmm(sums, logits.t(), part.to(logits.dtype), out=sums)
        del logits
        ctx.save_for_backward(of_hidden, of_weight)
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the gradients that forward computed: hidden states (tokens, width), weight (vocabulary, width)."""
        return ctx.saved_tensors


def _multiply(left: Any, right: Any, into: Any) -> None:
    """Multiply into existing memory. Kernels convert what they read; torch, under autocast, makes a copy."""
    if left.dtype == right.dtype == into.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(left.to(into.dtype) @ right.to(into.dtype))
