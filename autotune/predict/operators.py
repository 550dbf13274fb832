"""FLOPs and bytes moved by the operators of a traced run. Only the tracer imports this module."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autotune.predict.counters import Counters
from autotune.rank.live import LiveTensors


class CountedTensors(LiveTensors):
    """Count every operator's FLOPs and bytes moved while active, in addition to the bytes alive."""

    def __init__(self, run: Counters) -> None:
        super().__init__()
        self._run = run
        self._kinds: dict[Any, tuple[bool, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        run = self._run
        view, flop_formula = self._kind_of(func)
        if view:
            return out
        run.operators[run.phase] += 1
        if "flash_attention_for_cpu" in func.name():  # represents every fused kernel; torch has no formula for it
            run.attention[run.phase] += _attention_flops(func, args, kwargs or {})
            return out
        if flop_formula is not None:
            run.flops[run.phase] += flop_formula(*args, **(kwargs or {}), out_val=out)
            return out
        tensors = [out, *args] if "embedding" not in func.name() else [out, out]
        run.moved[run.phase] += sum(
            leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)
        )
        return out

    def _kind_of(self, func: Any) -> tuple[bool, Any]:
        """Return (the operator starts no kernel, its FLOP formula or None)."""
        if func not in self._kinds:
            returns = func._schema.returns
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            view = view or func.namespace == "prim" or func.overloadpacket.__name__ == "_unsafe_view"
            self._kinds[func] = (view, _MORE_FLOPS.get(func.name()) or flop_registry.get(func.overloadpacket))
        return self._kinds[func]


def _attention_flops(func: Any, args: Any, kwargs: Any) -> float:
    """Return the FLOPs of attention: 2 products in forward, and 5 in backward, which computes the scores again (Dao 2023,
    FlashAttention-2). Attention without a causal mask counts twice: see `Pass.attention`."""
    backward = "backward" in func.name()
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, length, width = query.shape
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    whole = 1.0 if given.get("is_causal") else 2.0
    return float(whole * (10.0 if backward else 4.0) * batch * heads * length * key.shape[2] * width)


def _routed_flops(rows: Any, other: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Return the FLOPs of `grouped_mm`: every row is multiplied with the weights of its expert. With two matrices of rows, as
    for the weights' gradient, the sum runs over each expert's rows."""
    return int(2 * rows.shape[-2] * rows.shape[-1] * other.shape[-1])


def _routed_backward_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of both gradients."""
    return 2 * _routed_flops(rows, weights)


_MORE_FLOPS = {  # formulas that torch lacks
    "aten::_grouped_mm": _routed_flops,
    "transformers::grouped_mm_fallback": _routed_flops,
    "transformers::grouped_mm_fallback_backward": _routed_backward_flops,
}
