"""Stand-ins for Liger's kernels, which need a GPU. They allocate, keep for backward and move as much. Only the tracer imports
this module.

Source: liger-kernel 0.8.5, `ops/rms_norm.py`, `ops/swiglu.py`, `ops/geglu.py`, `ops/rope.py`, `ops/fused_moe.py` and
`ops/fused_linear_cross_entropy.py`. One or two torch operators replace a kernel and read and write as much. None computes the
kernel's result.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.predict.stand_ins import replaced
from autotune.problem.liger import Kernels, is_known, kernels_of
from autotune.versions import release, version_of

# peft's name of a module that is trained next to adapters
_TRAINED_WHOLE = re.compile(r"\.(original_module|modules_to_save\.[^.]+)$")
# Older versions made a layer's experts separate modules, or gave them other shapes. Liger replaces none of those.
_AT_ONCE = release(version_of("transformers")) >= (5,)


@contextlib.contextmanager
def liger_kernels(model: torch.nn.Module, version: str | None = None) -> Iterator[None]:
    """Replace parts of the model with stand-ins for a version of Liger (default: the newest). Parts that Liger does not know
    stay. A known decoder inside an unknown model stays, too."""
    with contextlib.ExitStack() as stack:
        for part in model.modules() if is_known(_type_of(model), version) else ():
            kernels = kernels_of(_type_of(part), version)
            if kernels and hasattr(part, "layers"):
                _replace_modules(part, kernels)
                for owner in {sys.modules[type(module).__module__] for module in part.modules()}:
                    for name in kernels.rotations:
                        if hasattr(owner, name):
                            stack.enter_context(replaced(owner, name, _rotated))
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
        ctx.save_for_backward(logits)
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.saved_tensors


class FusedLinear(torch.autograd.Function):
    """A head and its loss, computed for a part of the tokens at a time; forward already makes the gradients of both.

    A part's logits are `chunk` times as large as the hidden states. Only one part runs here, as each part reuses the same
    memory. `losses.Uncounted` counts FLOPs and bytes of the remaining parts: `depth.extrapolate` would take repeated
    operators without an allocation for layers. The kernel rounds the rows of a part up to a power of two, up to twice as
    many. Two micro-batches cannot show growth in such steps, so this is the lower bound.

    Some versions make a part's gradient of the head apart in 32 bits (`apart`). With 32-bit logits all versions do. All do so
    on cards before Ampere, too, which is not counted.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, apart: bool, chunk: int) -> Any:
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
