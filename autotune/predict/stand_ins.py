"""Patches of torch and transformers around a traced run, so that fake tensors can run without values."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

from autotune.rank.versions import experts_module, looks_inside, masks_module


@contextlib.contextmanager
def shapes_alone(fused: bool) -> Iterator[None]:
    """Patch models so that they neither read values, which fake tensors lack, nor check them.

    Args:
        fused: run attention with dropout or a learnt bias as one kernel, as on a GPU. The CPU has no such kernel.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_plain_masks())
        stack.enter_context(_without_checks())
        stack.enter_context(_known_values())
        stack.enter_context(_grouped_products())
        stack.enter_context(_even_experts())
        stack.enter_context(_made_known())
        if fused:
            stack.enter_context(_fused_attention())
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class while the context is active."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def with_values(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors that `make` returns as fake tensors with known values. Results computed only from these are known,
    too.

    Models with images cut their features by the values of a batch.
    """
    with _disable_current_modes():
        real = make()
    mode = torch.empty(0).fake_mode  # type: ignore[attr-defined]
    made = {}
    for name, value in real.items():
        made[name] = mode.from_tensor(value)
        made[name].constant = value
    return made


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
        stack.enter_context(replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST_KNOWN))
        for module in [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]:
            for name, function in [(name, vars(module).get(name)) for name in _OF_GRIDS]:
                if callable(function):
                    stack.enter_context(replaced(module, name, _computed(function)))
            for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
                if _POSITIONS in vars(kind):
                    stack.enter_context(replaced(kind, _POSITIONS, _blank_positions))
                if _WINDOWS in vars(kind):
                    stack.enter_context(replaced(kind, _WINDOWS, _computed_method(vars(kind)[_WINDOWS])))
        yield


def _blank_positions(_: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Return (positions by time, height and width; their offsets)."""
    return input_ids.new_zeros(3, *input_ids.shape), input_ids.new_zeros(len(input_ids), 1)


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(grid: Any, *args: Any, **kwargs: Any) -> Any:
        known = getattr(grid, "constant", None)
        if known is None:
            return function(grid, *args, **kwargs)
        found: list[Any] = []

        def keep() -> dict[str, Any]:
            found.append(function(known, *args, **kwargs))
            leaves = found[0] if isinstance(found[0], tuple) else (found[0],)
            return {str(at): leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

        fakes = with_values(keep)
        if not isinstance(found[0], tuple):
            return fakes["0"]
        return tuple(fakes.get(str(at), leaf) for at, leaf in enumerate(found[0]))

    return compute


def _computed_method(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tower, grid: _computed(functools.partial(method, tower))(grid)


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """Set transformers' own switch that skips comparing the number of image tokens with the number of features."""
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
    """Give a learnt attention bias (T5's) its gradient: one number per score, as the kernel writes them."""

    @staticmethod
    def forward(ctx: Any, out: Any, bias: Any, shape: tuple[int, ...]) -> Any:
        ctx.shape, ctx.bias_shape = shape, bias.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient.new_empty(ctx.shape).sum_to_size(ctx.bias_shape), None


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
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

    with replaced(functional, "scaled_dot_product_attention", attention):
        yield


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """Run products of experts in dtypes other than bf16. torch runs these but has no shapes for them, so transformers'
    fallback operator replaces them with equal results."""
    with _in_place_of(
        experts_module(),
        "_can_use_grouped_mm",
        lambda before: lambda input, weight, offs: weight.dtype == torch.bfloat16 and before(input, weight, offs),
    ):
        yield


@contextlib.contextmanager
def _even_experts() -> Iterator[None]:
    """Spread tokens evenly over experts. Older models run one expert after the other, each with the tokens that chose it, and
    find these by `one_hot` of the choices."""
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

    with contextlib.nullcontext() if experts_module() else replaced(functional, "one_hot", one_hot):
        yield


@contextlib.contextmanager
def _made_known() -> Iterator[None]:
    """Give values to tensors that models create and then read.

    A single random number decides whether a layer is skipped: here no layer is. Older models read more: ones are the mask of
    a batch without one (weights that begin as ones have one dimension), and a range holds the position of each token. Older
    models also search the batch for padding, to warn about it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch, "rand", _known(torch.rand, lambda made: made.dim() == 0, torch.ones)))
        if looks_inside():
            models = importlib.import_module("transformers.modeling_utils").PreTrainedModel
            stack.enter_context(replaced(models, "warn_if_padding_and_no_attention_mask", lambda *_: None))
            stack.enter_context(replaced(torch, "ones", _known(torch.ones, lambda made: made.dim() > 1)))
            stack.enter_context(replaced(torch, "arange", _known(torch.arange, lambda made: True)))
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


@contextlib.contextmanager
def _plain_masks() -> Iterator[None]:
    """Make transformers assume that batches are not packed.

    Otherwise it would read the values of position ids, which fake tensors lack, and build masks that real training does not
    use.
    """
    with _in_place_of(masks_module(), "find_packed_sequence_indices", lambda before: lambda position_ids: None):
        yield


@contextlib.contextmanager
def _in_place_of(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a module's function by what `make` returns for it. Do nothing if the function is missing."""
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    with replaced(module, name, make(before)):
        yield


@contextlib.contextmanager
def plain_conversion() -> Iterator[None]:
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

    with replaced(torch.nn.Module, "_apply", apply):
        yield
