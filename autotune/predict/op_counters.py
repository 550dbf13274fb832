"""Counters of allocations and FLOPs in one forward and backward, and the Pass that two such runs make."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autotune.predict.trace_data import BACKWARD, FORWARD, Pass
from autotune.rank.devices import LiveTensors


class Counters:
    """Counters of one forward and backward; pairs hold one entry per phase."""

    def __init__(self) -> None:
        self.phase = FORWARD
        self.gradients = 0.0  # bytes of gradients that parameters hold now
        self.base = 0.0  # bytes alive before the run: parameters and buffers
        self.section = 0  # index of the section: before an encoder's end, after it, and its own backward
        self.events: list[tuple[int, float, float, int]] = []  # phase, bytes besides gradients, gradients, section
        self.flops = [0.0, 0.0]
        self.attention = [0.0, 0.0]
        self.moved = [0.0, 0.0]
        self.operators = [0.0, 0.0]
        self.after_forward = 0.0
        self.frozen_inputs: list[tuple[Any, float]] = []  # (weak reference to the storage, bytes)
        self.latest: dict[int, Any] = {}  # weak reference to the last storage that was read at an address
        self.frozen_only = 0.0  # bytes that only frozen linear layers have read, from `dropped_inputs`
        self.last = 0

    def read(self, tensor: Any) -> None:
        """Record the input of a frozen linear layer in forward."""
        storage = tensor.untyped_storage()
        latest = self.latest.get(storage._cdata)
        if latest is None or latest() is None:  # a freed storage leaves its address to another
            self.latest[storage._cdata] = weakref.ref(storage)
            self.frozen_inputs.append((self.latest[storage._cdata], float(storage.nbytes())))

    def dropped_inputs(self) -> float:
        """Return the bytes that frozen linear layers have read and that are freed by now. Call it when forward ends."""
        return sum(size for reference, size in self.frozen_inputs if reference() is None)

    def saw(self, alive: int) -> None:
        """Record the bytes alive after a change. Only growth can be a peak."""
        grew, self.last = alive > self.last, alive
        if not grew:
            return
        self.events.append((self.phase, alive - self.base - self.gradients, self.gradients, self.section))


def joined_passes(two: Counters, three: Counters) -> Pass:
    """Join runs with micro-batches of two and three sequences into a Pass, allocation by allocation."""
    events = [np.array(run.events, dtype=float) for run in (two, three)]
    if events[0].shape != events[1].shape or (events[0][:, [0, 3]] != events[1][:, [0, 3]]).any():
        events = [_phase_peaks(table) for table in events]
    first, second = events
    slope = second[:, 1] - first[:, 1]
    after = three.after_forward - two.after_forward
    dropped = three.frozen_only - two.frozen_only

    def more(name: str) -> Any:
        return tuple(b - a for a, b in zip(getattr(two, name), getattr(three, name), strict=True))

    moved: Any = tuple((3 * a - 2 * b, b - a) for a, b in zip(two.moved, three.moved, strict=True))
    return Pass(
        phase=first[:, 0].astype(int).tolist(),
        fixed=(first[:, 1] - 2 * slope).tolist(),
        per_sequence=slope.tolist(),
        gradients=first[:, 2].tolist(),
        section=first[:, 3].astype(int).tolist(),
        after_forward=(two.after_forward - 2 * after, after),
        flops=more("flops"),
        attention=more("attention"),
        moved=moved,
        operators=(two.operators[0], two.operators[1]),
        frozen_only=(two.frozen_only - 2 * dropped, dropped),
    )


def _phase_peaks(table: Any) -> Any:
    """Return the highest entry of each phase, for two runs whose allocations do not match one to one."""
    rows = [table[table[:, 0] == phase] for phase in (FORWARD, BACKWARD)]
    highest = np.array([row[(row[:, 1] + row[:, 2]).argmax()] for row in rows])
    highest[:, 3] = 0.0
    return highest


def add_counter_hooks(model: Any, counters: Counters) -> None:
    """Hook the model so that the counters track accumulated gradients, and in forward what frozen linear layers read."""

    def accumulated(parameter: Any) -> None:
        counters.gradients += parameter.nbytes

    def reads(module: Any, args: Any) -> None:
        if counters.phase == FORWARD:
            counters.read(args[0])

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(accumulated)
    for module in model.modules():
        # torch's own class, which calls torch.nn.functional.linear
        if type(module).__name__ == "Linear" and not module.weight.requires_grad:
            module.register_forward_pre_hook(reads)


def follow_encoder(encoder: Any, counters: Counters) -> None:
    """Begin a section after the encoder's forward, and another when the gradient of an output exists."""
    awaited = False

    def backward_begins(*_: Any) -> None:
        nonlocal awaited
        counters.section += awaited
        awaited = False

    def forward_ends(module: Any, args: Any, output: Any) -> None:
        nonlocal awaited
        counters.section += 1
        awaited = True
        for one in tree_leaves(output):
            if getattr(one, "requires_grad", False):
                one.register_hook(backward_begins)

    encoder.register_forward_hook(forward_ends)


# -- operators ---------------------------------------------------------------------------------------------------------


class CountedTensors(LiveTensors):
    """Count every operator's FLOPs and bytes moved while active, in addition to the bytes alive."""

    def __init__(self, run: Counters) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        run = self._run
        view, flop_formula = _kind_of(func)
        if view:
            return out
        run.operators[run.phase] += 1
        if "flash_attention_for_cpu" in func.name():  # represents every fused kernel; torch has no formula for it
            run.attention[run.phase] += _attention_flops(func, args, kwargs or {})
        elif flop_formula is not None:
            run.flops[run.phase] += flop_formula(*args, **(kwargs or {}), out_val=out)
        else:
            tensors = [out, *args] if "embedding" not in func.name() else [out, out]
            run.moved[run.phase] += sum(
                leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)
            )
        return out


@functools.cache
def _kind_of(func: Any) -> tuple[bool, Any]:
    """Return (the operator starts no kernel, its FLOP formula or None)."""
    returns = func._schema.returns
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    view = view or func.namespace == "prim" or func.overloadpacket.__name__ == "_unsafe_view"
    return view, _MORE_FLOPS.get(func.name()) or flop_registry.get(func.overloadpacket)


def _attention_flops(func: Any, args: Any, kwargs: Any) -> float:
    """Return the FLOPs of attention: 2 products in forward, and 5 in backward.

    Backward computes the scores again (Dao 2023, FlashAttention-2). Attention without a causal mask counts twice: see
    `Pass.attention`.
    """
    backward = "backward" in func.name()
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, length, width = query.shape
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    whole = 1.0 if given.get("is_causal") else 2.0
    return float(whole * (10.0 if backward else 4.0) * batch * heads * length * key.shape[2] * width)


def _routed_flops(rows: Any, other: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Return the FLOPs of `grouped_mm`: every row is multiplied with the weights of its expert.

    With two matrices of rows, as for the weights' gradient, the sum runs over each expert's rows.
    """
    return int(2 * rows.shape[-2] * rows.shape[-1] * other.shape[-1])


def _routed_backward_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of both gradients."""
    return 2 * _routed_flops(rows, weights)


_MORE_FLOPS = {  # formulas that torch lacks
    "aten::_grouped_mm": _routed_flops,
    "transformers::grouped_mm_fallback": _routed_flops,
    "transformers::grouped_mm_fallback_backward": _routed_backward_flops,
}
