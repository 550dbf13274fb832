"""What fake tensors cannot do, done without values: patches around a traced run, of torch and of transformers."""

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
    """Models neither look at values, which fake tensors have not, nor check them.

    Args:
        fused: attention with dropout or a learnt bias is one kernel, as on a GPU; else as on the CPU, which has none for it.
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
    """An attribute of a module or class is `value` for as long."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def with_values(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The tensors that `make` returns as fake ones whose values are known: what is computed from these alone is known, too.
    Models with images cut their features by the values of a batch."""
    with _disable_current_modes():
        real = make()
    mode = torch.empty(0).fake_mode  # type: ignore[attr-defined]
    made = {}
    for name, value in real.items():
        made[name] = mode.from_tensor(value)
        made[name].constant = value
    return made


_MOST_KNOWN = 2**25  # elements: the pixels of a few images

_OF_GRIDS = (  # transformers.vision_utils: what depends on the values of the images' sizes
    "get_vision_cu_seqlens",
    "get_vision_attention_seqlens",
    "get_vision_position_ids",
    "get_vision_window_index",
    "get_vision_interpolation_indices_and_weights",
)
_POSITIONS = "get_rope_index"  # a method of Qwen2-VL and its heirs, token by token
_WINDOWS = "get_window_index"  # a method of Qwen2.5-VL's tower before transformers 5, of the images' sizes


@contextlib.contextmanager
def _known_values() -> Iterator[None]:
    """Values that are known stay so in tensors of more than one element, and functions of image sizes are computed."""
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
    """(positions by time, height and width, their offsets)."""
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

    with replaced(functional, "scaled_dot_product_attention", attention):
        yield


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """Products of experts in other dtypes than bf16: torch runs these but has no shapes for them; transformers' own operator
    for where torch has none gives the same."""
    with _in_place_of(
        experts_module(),
        "_can_use_grouped_mm",
        lambda before: lambda input, weight, offs: weight.dtype == torch.bfloat16 and before(input, weight, offs),
    ):
        yield


@contextlib.contextmanager
def _even_experts() -> Iterator[None]:
    """Older models run one expert after the other, each with the tokens that chose it, and learn these by `one_hot` of the
    choices: here each is chosen as often as another."""
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
    """What models look into of their own making. A single random number says whether a layer is left out: here none is.
    Older ones look into more: ones are the mask of a batch without one (weights that begin as ones have one dimension), a range
    where each token stands. And they look for padding in the batch, to warn of it."""
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
    """`make`, of whose tensors the wanted ones have known values: its own, or those that `values` makes."""

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
    """Tells transformers that batches are not packed.

    It would look at the values of position ids, which fake tensors have not, and build masks that real training does
    without.
    """
    with _in_place_of(masks_module(), "find_packed_sequence_indices", lambda before: lambda position_ids: None):
        yield


@contextlib.contextmanager
def _in_place_of(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """What `make` makes of a module's function stands in its place; nothing is done where there is none."""
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    with replaced(module, name, make(before)):
        yield


@contextlib.contextmanager
def plain_conversion() -> Iterator[None]:
    """`module.to(…)` makes new parameters, shared where the old ones were.

    torch would swap fake tensors in place, which it refuses where anything holds a weak reference to one, as a fake mode
    does.
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
