"""A deep model's pass from those of two shallow ones: layers repeat, so each adds what the one before it added.

Nothing here imports torch: configurations are any objects with transformers' attributes.
"""

from __future__ import annotations

import copy
from typing import Any

from autotune.predict.passes import BACKWARD, FORWARD, Pass


def small_depths(config: Any) -> tuple[int, int] | None:
    """Two depths whose difference is whole periods of the layers' pattern, or None where all layers must be run."""
    text = config.get_text_config()
    deep = getattr(text, "num_hidden_layers", None)
    if not isinstance(deep, int) or config.get_text_config() is not config:
        return None
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "mlp_only_layers", None):
        return None
    if getattr(text, "first_k_dense_replace", 0) or (getattr(text, "decoder_sparse_step", 1) or 1) > 1:
        return None
    period = 1
    for value in vars(text).values():
        if isinstance(value, list | tuple) and len(value) == deep:
            period = max(period, _period(list(value)))
    short = deep % period + period
    while short < 2:
        short += period
    long = short + period
    return (short, long) if long + 1 < deep else None


def _period(values: list[Any]) -> int:
    return next(n for n in range(1, len(values) + 1) if all(v == values[i % n] for i, v in enumerate(values)))


def at_depth(config: Any, layers: int) -> Any:
    """A copy of a transformers configuration with fewer layers, lists of one entry a layer cut to it."""
    changed = copy.deepcopy(config)
    deep = config.num_hidden_layers
    for name, value in list(vars(changed).items()):
        if isinstance(value, list | tuple) and len(value) == deep:
            setattr(changed, name, type(value)(value[:layers]))
    changed.num_hidden_layers = layers
    return changed


def extrapolate(short: Pass, long: Pass, depths: tuple[int, int], deep: int) -> Pass:
    """The pass of a model `deep` layers deep from those of two shallower ones.

    Each phase's first half of allocations is matched from its beginning and the second half from its end: what lies
    between are whole layers more of the same.
    """
    factor = (deep - depths[1]) / (depths[1] - depths[0])

    def further(a: float, b: float) -> float:
        return b + (b - a) * factor

    phase: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in ("fixed", "per_sequence", "gradients", "in_use")}
    for kind in (FORWARD, BACKWARD):
        mine = [i for i, p in enumerate(short.phase) if p == kind]
        theirs = [i for i, p in enumerate(long.phase) if p == kind]
        for at, i in enumerate(mine):
            j = theirs[at] if at < len(mine) / 2 else theirs[len(theirs) - len(mine) + at]
            phase.append(kind)
            for name, column in columns.items():
                column.append(further(getattr(short, name)[i], getattr(long, name)[j]))
    after: Any = tuple(further(a, b) for a, b in zip(short.after_forward, long.after_forward, strict=True))
    flops: Any = tuple(further(a, b) for a, b in zip(short.flops, long.flops, strict=True))
    attention: Any = tuple(further(a, b) for a, b in zip(short.attention, long.attention, strict=True))
    operators: Any = tuple(further(a, b) for a, b in zip(short.operators, long.operators, strict=True))
    frozen: Any = tuple(further(a, b) for a, b in zip(short.frozen_only, long.frozen_only, strict=True))
    moved: Any = tuple(
        tuple(further(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(short.moved, long.moved, strict=True)
    )
    return Pass(
        phase,
        **columns,
        after_forward=after,
        flops=flops,
        attention=attention,
        moved=moved,
        operators=operators,
        frozen_only=frozen,
    )
