"""Patches of torch and transformers around a traced run, and stub kernels, so that fake tensors can run without values."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

from autotune.predict.op_counters import Counters
from autotune.problem.models import Kernels, kernels_of, liger_replaces_anything
from autotune.rank.versions import experts_module, looks_inside, masks_module
from autotune.versions import release, version_of

Patch = contextlib.AbstractContextManager[Any]


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
        for module in _loaded_models():
            for name, function in [(name, vars(module).get(name)) for name in _OF_GRIDS]:
                if callable(function):
                    stack.enter_context(patch.object(module, name, _computed(function)))
            for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
                if _POSITIONS in vars(kind):
                    stack.enter_context(patch.object(kind, _POSITIONS, _blank_positions))
                if _WINDOWS in vars(kind):
                    stack.enter_context(patch.object(kind, _WINDOWS, _computed_method(vars(kind)[_WINDOWS])))
        yield


def _loaded_models() -> list[ModuleType]:
    """Return transformers' modules of models. A model's is loaded when its configuration is built."""
    return [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]


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


# -- recurrences -------------------------------------------------------------------------------------------------------
#
# Run recurrences over a sequence at once and by shapes alone. transformers runs them token by token if no kernel is
# installed.
#
# A loop over 2048 tokens takes fake tensors minutes a layer. The stand-in keeps as many bytes for backward and counts
# the loop's kernels and bytes. The result matches a training without `mamba_ssm`.

# A function of mamba, falcon_mamba and jamba. transformers wraps it if a kernel is installed.
_SCAN = "mamba_selective_scan"
_LINEAR = "_rnn_scan"  # a method in recurrent_gemma
# (kernels per token in forward, kernels per token in backward, times that backward moves all states per token).
# Backward puts each token's gradient into zeros for the whole sequence and adds them up (select_backward), so bytes
# grow with the square of the length. Counted in the loops of transformers 5 at 24 tokens.
_OF_SCAN, _OF_LINEAR = (4.0, 12.6, 8.0), (6.0, 14.5, 6.0)


class _Recurrence(torch.autograd.Function):
    """state[t] = decay[t] * state[t - 1] + input[t] along a dimension. Keeps the decays and all states."""

    @staticmethod
    def forward(ctx: Any, decay: Any, given: Any, tokens: int, run: Counters, cost: tuple[float, float, float]) -> Any:
        states = torch.empty_like(given)
        ctx.save_for_backward(decay, states)
        ctx.counted = tokens, run, cost
        run.add(tokens * cost[0], 4.0 * states.nbytes)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        decay, states = ctx.saved_tensors
        tokens, run, cost = ctx.counted
        run.add(tokens * cost[1], cost[2] * tokens * states.nbytes)
        spare = torch.empty_like(states)  # one token's gradient, padded with zeros to the whole sequence
        made = torch.empty_like(decay), torch.empty_like(states), None, None, None
        del spare
        return made


def _scan(run: Counters, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the reference of Mamba's selective scan in transformers, without its loop."""

    def scan(
        hidden_states: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any = None,
        z: Any = None,
        delta_bias: Any = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        dtype, tokens = hidden_states.dtype, hidden_states.shape[2]
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = torch.nn.functional.softplus(dt)
        decay = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
        given = dt[:, :, :, None] * B.transpose(1, 2)[:, None, :, :].float() * hidden_states[:, :, :, None].float()
        states = _Recurrence.apply(decay, given, tokens, run, _OF_SCAN)  # type: ignore[no-untyped-call]
        # (batch, tokens, inner, state) x (batch, tokens, state, 1)
        out = (states.to(dtype).transpose(1, 2) @ C.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        if D is not None:
            out = out + hidden_states * D[None, :, None]
        if z is not None:
            out = out * torch.nn.functional.silu(z)
        return (out, states[:, :, -1]) if return_last_state else out

    return scan


def _linear(run: Counters, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace RecurrentGemma's recurrence, without its loop."""

    def scan(
        self: Any, hidden_states: Any, recurrent_gate: Any, reset: Any, recurrent_states: Any, acc_dtype: Any = None
    ) -> Any:
        if hidden_states.shape[1] == 1:
            return original(self, hidden_states, recurrent_gate, reset, recurrent_states)
        wide = acc_dtype or torch.float32
        decay = (recurrent_gate * ~reset).type(wide)
        states = _Recurrence.apply(decay, hidden_states.type(wide), hidden_states.shape[1], run, _OF_LINEAR)  # type: ignore[no-untyped-call]
        return states.type(hidden_states.dtype), states[:, -1]

    return scan


@contextlib.contextmanager
def at_once(run: Counters) -> Iterator[None]:
    """Replace the loops of all loaded models."""
    with contextlib.ExitStack() as stack:
        for module in _loaded_models():
            owners: list[tuple[Any, str, Any]] = [(module, _SCAN, _scan)]
            owners += [(kind, _LINEAR, _linear) for kind in vars(module).values() if isinstance(kind, type)]
            for owner, name, make in owners:
                if callable(before := vars(owner).get(name)):
                    stack.enter_context(patch.object(owner, name, make(run, before)))
        yield


# -- fused kernels -----------------------------------------------------------------------------------------------------
#
# Stand-ins for Liger's kernels, which need a GPU. They allocate, keep for backward and move as much.
#
# Source: liger-kernel 0.8.5, `ops/rms_norm.py`, `ops/swiglu.py`, `ops/geglu.py`, `ops/rope.py`, `ops/fused_moe.py` and
# `ops/fused_linear_cross_entropy.py`. One or two torch operators replace a kernel and read and write as much. None
# computes the kernel's result.

# peft's name of a module that is trained next to adapters
_TRAINED_WHOLE = re.compile(r"\.(original_module|modules_to_save\.[^.]+)$")
# Older versions made a layer's experts separate modules, or gave them other shapes. Liger replaces none of those.
_AT_ONCE = release(version_of("transformers")) >= (5,)


@contextlib.contextmanager
def liger_kernels(model: torch.nn.Module, version: str | None = None) -> Iterator[None]:
    """Replace parts of the model with stand-ins for a version of Liger (default: the newest).

    Parts that Liger does not know stay. A known decoder inside an unknown model stays, too.
    """
    with contextlib.ExitStack() as stack:
        for part in model.modules() if liger_replaces_anything(_type_of(model), version) else ():
            kernels = kernels_of(_type_of(part), version)
            if kernels and hasattr(part, "layers"):
                _replace_modules(part, kernels)
                for owner in {sys.modules[type(module).__module__] for module in part.modules()}:
                    for name in kernels.rotations:
                        if hasattr(owner, name):
                            stack.enter_context(patch.object(owner, name, _rotated))
        yield


def _type_of(part: Any) -> str | None:
    found: str | None = getattr(getattr(part, "config", None), "model_type", None)
    return found


def _replace_modules(decoder: torch.nn.Module, kernels: Kernels) -> None:
    beside_experts = {
        f"{path}.mlp" for path, layer in decoder.named_modules() if getattr(layer, "enable_moe_block", False)
    }
    for path, module in decoder.named_modules():
        if path in beside_experts:
            continue  # Gemma 4's MLP next to experts stays
        name = _TRAINED_WHOLE.sub("", path).rpartition(".")[2]
        if name in kernels.norms and type(module).__name__.endswith("RMSNorm"):
            if module._parameters.get("weight") is None:
                continue  # Gemma 4's router has a norm that scales nothing
            module.forward = _normalised(module, kernels.in_place)  # type: ignore[method-assign]
        elif hasattr(module, "down_proj"):
            joined = getattr(module, "gate_up_proj", None)
            if kernels.experts and _AT_ONCE and isinstance(joined, torch.nn.Parameter):
                module.forward = _routed(module)  # type: ignore[method-assign]
            elif kernels.gates and isinstance(joined, torch.nn.Module):
                module.forward = _gated_at_once(module)  # type: ignore[method-assign]
            elif kernels.gates and hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
                module.forward = _gated(module)  # type: ignore[method-assign]


def _normalised(module: Any, in_place: bool) -> Callable[..., Any]:
    return lambda hidden: _Norm.apply(hidden, module.weight, in_place)


def _gated(module: Any) -> Callable[..., Any]:
    return lambda hidden: module.down_proj(_Gate.apply(module.gate_proj(hidden), module.up_proj(hidden)))


def _gated_at_once(module: Any) -> Callable[..., Any]:
    return lambda hidden: module.down_proj(_Gate.apply(*module.gate_up_proj(hidden).chunk(2, dim=-1)))


def _routed(module: Any) -> Callable[..., Any]:
    def forward(hidden: Any, chosen: Any, weights: Any) -> Any:
        rows = hidden.reshape(-1, hidden.shape[-1])
        made = _Experts.apply(rows, module.gate_up_proj, module.down_proj, weights.reshape(len(rows), -1))
        return made.view(hidden.shape)

    return forward


def _rotated(query: Any, key: Any, cosine: Any, sine: Any, *_: Any, **__: Any) -> Any:
    return _Rotation.apply(query, key, cosine, sine)


class _Norm(torch.autograd.Function):
    """RMS norm: keeps its input and one 32-bit number per row."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, in_place: bool) -> Any:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        ctx.in_place = in_place
        return hidden.neg()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return (gradient.mul_(hidden) if ctx.in_place else gradient * hidden), of_weight, None


class _Gate(torch.autograd.Function):
    """Gated activation: keeps its two operands and writes their gradients over them. `down_proj` keeps its output."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        return gate.mul_(gradient), up.mul_(gradient)


class _Rotation(torch.autograd.Function):
    """Rotary embedding: rotates query and key in place, and their gradients too, once a row's heads are contiguous."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, cosine: Any, sine: Any) -> Any:
        ctx.save_for_backward(cosine, sine)
        return _turned(query), _turned(key)

    @staticmethod
    def backward(ctx: Any, of_query: Any, of_key: Any) -> Any:
        return _turned(of_query), _turned(of_key), None, None


def _turned(heads: Any) -> Any:
    """Return (batch, heads, rows, width), negated in place, or a copy if the heads were not contiguous."""
    return heads.transpose(1, 2).contiguous().neg_().transpose(1, 2)


class _Experts(torch.autograd.Function):
    """Mixture of experts: keeps the input rows, gate and up of each expert that a row chose, and the choices.

    The kernel gathers an expert's rows itself. Every product multiplies all chosen rows with one expert's weights, which
    takes as many FLOPs. Gradients of frozen weights are made, too.
    """

    @staticmethod
    def forward(ctx: Any, rows: Any, gate_up: Any, down: Any, weights: Any) -> Any:
        weights = weights.flatten()
        chosen = len(weights)
        gates, active = (rows.new_empty(chosen, width) for width in (gate_up.shape[1], down.shape[-1]))
        _multiply(_chosen(rows, chosen), gate_up[0].t(), gates)
        made = rows.new_empty(chosen, rows.shape[1])
        _multiply(active, down[0].t(), made)
        places = rows.new_empty(3 * chosen, dtype=torch.int32)  # positions, sources and destinations of the chosen rows
        ctx.save_for_backward(rows, gate_up, down, gates, weights, places)
        return rows.neg()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows, gate_up, down, gates, weights, _ = ctx.saved_tensors
        chosen = len(weights)
        of_gates, active = torch.empty_like(gates), gates.new_empty(chosen, down.shape[-1])
        _multiply(_chosen(gradient, chosen), down[0], active)
        of_weights, of_down = torch.zeros_like(weights), torch.zeros_like(down)
        _multiply(_chosen(gradient, chosen).t(), active, of_down[0])
        of_chosen = rows.new_empty(chosen, rows.shape[1])
        _multiply(of_gates, gate_up[0], of_chosen)
        of_rows, of_gate_up = torch.zeros_like(rows), torch.zeros_like(gate_up)
        _multiply(of_gates.t(), _chosen(rows, chosen), of_gate_up[0])
        wanted = ctx.needs_input_grad
        of_both = (of_gate_up if wanted[1] else None, of_down if wanted[2] else None)
        return of_rows, *of_both, of_weights.view(len(rows), -1)


class LossInPlace(torch.autograd.Function):
    """Cross entropy whose gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        """Save the logits for backward; return a loss of shape ()."""
        ctx.save_for_backward(logits)
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the saved logits as the gradient, since it overwrites them."""
        return ctx.saved_tensors


class FusedLinear(torch.autograd.Function):
    """A head and its loss, computed for a part of the tokens at a time; forward already makes the gradients of both.

    A part's logits are `chunk` times as large as the hidden states. Only one part runs here, as each part reuses the same
    memory. `tracer.add_uncounted` counts FLOPs and bytes of the remaining parts: `tracer.extrapolate` would take repeated
    operators without an allocation for layers. The kernel rounds the rows of a part up to a power of two, up to twice as
    many. Two micro-batches cannot show growth in such steps, so this is the lower bound.

    Some versions make a part's gradient of the head apart in 32 bits (`apart`). With 32-bit logits all versions do. All do so
    on cards before Ampere, too, which is not counted.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, apart: bool, chunk: int) -> Any:
        """Allocate the tensors of Liger's fused linear loss in chunks; return a loss of shape ()."""
        tokens, width = hidden.shape
        chunks = -(-weight.shape[0] // (chunk * width))
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        part = hidden[: -(-tokens // chunks)]
        logits = part @ weight.t()
        _multiply(logits, weight, of_hidden[: len(part)])
        if of_weight is not None and (apart or logits.dtype == torch.float32):
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
        return *ctx.saved_tensors, None, None


def _chosen(rows: Any, count: int) -> Any:
    """Return (count, width) without allocating memory."""
    return rows[:1].expand(count, -1)


def _multiply(left: Any, right: Any, into: Any) -> None:
    """Multiply into existing memory. Kernels convert what they read; torch, under autocast, makes a copy."""
    if left.dtype == right.dtype == into.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(left.to(into.dtype) @ right.to(into.dtype))
