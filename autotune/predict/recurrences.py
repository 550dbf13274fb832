"""Run recurrences over a sequence at once and by shapes alone. transformers runs them token by token if no kernel is
installed.

Only the tracer imports this module. A loop over 2048 tokens takes fake tensors minutes a layer. The stand-in keeps as many
bytes for backward and counts the loop's kernels and bytes. The result matches a training without `mamba_ssm`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.predict.counters import Counters
from autotune.predict.passes import BACKWARD, FORWARD

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
        _count(run, FORWARD, tokens * cost[0], 4.0 * _bytes(states))
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        decay, states = ctx.saved_tensors
        tokens, run, cost = ctx.counted
        _count(run, BACKWARD, tokens * cost[1], cost[2] * tokens * _bytes(states))
        spare = torch.empty_like(states)  # one token's gradient, padded with zeros to the whole sequence
        made = torch.empty_like(decay), torch.empty_like(states), None, None, None
        del spare
        return made


def _count(run: Counters, phase: int, starts: float, moved: float) -> None:
    """Count the loop. A recomputation runs forward again and counts in the phase in which it happens."""
    phase = run.phase if phase == FORWARD else phase
    run.operators[phase] += starts  # type: ignore[call-overload]
    run.moved[phase] += moved


def _bytes(tensor: Any) -> float:
    return float(tensor.numel() * tensor.element_size())


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
    """Replace the loops of all loaded models. A model is loaded when its configuration is built."""
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]:
            owners: list[tuple[Any, str, Any]] = [(module, _SCAN, _scan)]
            owners += [(kind, _LINEAR, _linear) for kind in vars(module).values() if isinstance(kind, type)]
            for owner, name, make in owners:
                if callable(before := vars(owner).get(name)):
                    setattr(owner, name, make(run, before))
                    stack.callback(setattr, owner, name, before)
        yield
