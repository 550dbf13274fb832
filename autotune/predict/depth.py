"""Extrapolate a deep model's pass from those of shallow models: each repeated layer adds as much as the one before.

A model has one stack of layers, or two: an encoder's and a decoder's. Nothing here imports torch: configurations are any
objects with transformers' attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from autotune.predict.passes import Pass

_STACKS = ("ModuleList", "Sequential")
Depths = dict[str, int]  # number of layers of each stack, by the attribute that counts them

# Attributes that count an encoder-decoder's layers (T5's and BART's families).
_TWO_STACKS = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))


class Extrapolation(NamedTuple):
    """Shallow models that represent a deep model."""

    short: Depths
    # (depths that have grown from `short`, how many more times that growth is added)
    longer: list[tuple[Depths, float]]


def extrapolation(config: Any, model: Any = None) -> Extrapolation | None:
    """Return the shallow models whose passes give that of the configuration; None if all layers must run.

    An encoder-decoder's two stacks grow together if they are equally deep.

    Args:
        model: the whole model, on any device, which shows which layers are alike. Without it the configuration's lists
            decide.
    """
    deep = depths_of(config)
    if deep is None:
        return None
    kinds = {name: None if model is None else layer_kinds(model, layers) for name, layers in deep.items()}
    small = {name: _small_depths(*_place(config, name), _least_layers(config, name), kinds[name]) for name in deep}
    short = {name: small[name][0] if small[name] else deep[name] for name in deep}  # type: ignore[index]
    grown: dict[tuple[int, int, int], Depths] = {}
    for name, pair in small.items():
        if pair is not None:
            grown.setdefault((*pair, deep[name]), {})[name] = pair[1]
    longer = [({**short, **changed}, (whole - high) / (high - low)) for (low, high, whole), changed in grown.items()]
    return Extrapolation(short, longer) if longer else None


def depths_of(config: Any) -> Depths | None:
    """Return the layer counts of a configuration's stacks, for a model with images those of its text; None for other models."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        for names in _TWO_STACKS:
            if all(isinstance(getattr(config, name, None), int) for name in names):
                return {name: getattr(config, name) for name in names}
        return None
    if text is not config and text is not getattr(config, "text_config", None):
        return None
    deep = getattr(text, "num_hidden_layers", None)
    if not isinstance(deep, int):
        return None
    return {"num_hidden_layers": deep, **_tower_depths(config)}


def _tower_depths(config: Any) -> Depths:
    """Return the depth of a tower for images, if its layers all do the same work."""
    vision = getattr(config, "vision_config", None)
    taken = getattr(config, "vision_feature_layer", -1)  # index, from the end, of the layer whose output is used
    if getattr(vision, "deepstack_visual_indexes", None) or not isinstance(taken, int) or taken >= 0:
        return {}
    names = [name for name in ("depth", "num_hidden_layers") if isinstance(getattr(vision, name, None), int)]
    return {f"vision_config.{name}": getattr(vision, name) for name in names[:1]}


def _place(config: Any, name: str) -> tuple[Any, str]:
    """Return the part of a configuration that has the attribute of a stack, and the attribute."""
    part, dot, attribute = name.rpartition(".")
    if dot:
        return getattr(config, part), attribute
    return (config.get_text_config() if name == "num_hidden_layers" else config), name


def _least_layers(config: Any, name: str) -> int:
    """Return the fewest layers of a shallow stack. A text's first layers may take features of an image each (Qwen3-VL), and
    two more are alike. A tower's last layers may be unused."""
    if "." in name:
        return 1 - int(getattr(config, "vision_feature_layer", -1)) + 1
    return 2 + len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def layer_kinds(model: Any, layers: int) -> list[Any]:
    """Return a value per layer that is equal for equal layers: their modules, sizes and switches.

    Configurations name their patterns in many ways (lists of kinds, lists of indices, a period and an offset), but the built
    model always shows the pattern. The list is empty if the model has no list of so many layers.
    """
    stacks = [one for one in model.modules() if type(one).__name__ in _STACKS and len(one) == layers]
    return list(zip(*([_kind(layer) for layer in stack] for stack in stacks), strict=True))


def _kind(layer: Any) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, value is not None and tuple(value.shape)) for key, value in module._parameters.items()),
            tuple((key, _switch(value)) for key, value in sorted(vars(module).items()) if not key.startswith("_")),
        )
        for name, module in layer.named_modules()
    )


def _switch(value: Any) -> Any:
    """Keep flags and names, and reduce other values to their presence. Numbers, and names with digits, may count the layers."""
    plain = isinstance(value, bool) or (isinstance(value, str) and not any(map(str.isdigit, value)))
    return value if plain else value is None


def _small_depths(text: Any, name: str, least: int, kinds: Sequence[Any] | None = None) -> tuple[int, int] | None:
    """Return two depths that differ by whole periods of the layers' pattern. Return None if all layers must run, for example
    if the two have more layers together than the whole model.

    Args:
        kinds: value per layer from `layer_kinds`; None if unknown.
    """
    deep = getattr(text, name)
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "mlp_only_layers", None):
        return None
    if getattr(text, "first_k_dense_replace", 0) or (getattr(text, "decoder_sparse_step", 1) or 1) > 1:
        return None
    if getattr(text, "sparse_step", 0) or getattr(text, "encoder_sparse_step", 0):  # only some layers have experts
        return None
    patterns = [list(value) for value in vars(text).values() if isinstance(value, list | tuple) and len(value) == deep]
    if _whole_blocks(text):
        patterns.append([layer in _whole_blocks(text) for layer in range(deep)])
    if kinds is not None:
        if len(kinds) != deep:
            return None
        patterns.append(list(kinds))
    every = list(zip(*patterns, strict=True)) if patterns else [()] * deep
    return next((pair for period in range(1, deep) if (pair := _depths_of_period(every, period, least))), None)


def _depths_of_period(kinds: Sequence[Any], period: int, least: int) -> tuple[int, int] | None:
    """Return the two depths if layers repeat after `period`, else None.

    The first layers may differ from the rest: the shallow model has them, too. Its second half equals the end of the deeper
    model and of the whole.
    """
    deep = len(kinds)
    for short in range(deep % period + period, deep, period):
        long = short + period
        if short + long > deep:
            return None
        first = min(short, period + short // 2)
        if short >= least and all(kinds[at] == kinds[at - period] for at in range(first, deep)):
            return short, long
    return None


def _whole_blocks(vision: Any) -> list[int]:
    """Return the layers of a tower whose attention spans the image; the other layers attend to windows (Qwen2.5-VL)."""
    return list(getattr(vision, "fullatt_block_indexes", None) or ())


def at_depth(config: Any, depths: Depths) -> Any:
    """Copy a transformers configuration with fewer layers, and cut its lists of one entry per layer."""
    changed = copy.deepcopy(config)
    for stack, layers in depths.items():
        part, name = _place(changed, stack)
        deep = getattr(part, name)
        for key, value in list(vars(part).items()):
            if isinstance(value, list | tuple) and len(value) == deep > layers:
                setattr(part, key, type(value)(value[:layers]))
        if _whole_blocks(part):
            part.fullatt_block_indexes = [layer for layer in _whole_blocks(part) if layer < layers]
        setattr(part, name, layers)
    return changed


def extrapolate(short: Pass, longer: Sequence[tuple[Pass, float]]) -> Pass:
    """Extrapolate the pass of a deep model from a shallow one and from deeper ones, each with the times its growth is added.

    Allocations are matched by section of each phase (a model's stacks and their surroundings): the first half from the
    section's beginning, the second half from its end. The allocations between are whole layers.
    """
    names = ("fixed", "per_sequence", "gradients", "in_use")
    places = [_matched(short, long) for long, _ in longer]

    def further(of_short: float, of_longer: Sequence[float]) -> float:
        # Each longer model includes all of the short one, so only its growth is multiplied.
        return of_short + sum(
            (more - of_short) * (factor + 1) for more, (_, factor) in zip(of_longer, longer, strict=True)
        )

    columns: dict[str, list[float]] = {
        name: [
            further(value, [getattr(long, name)[at[i]] for at, (long, _) in zip(places, longer, strict=True)])
            for i, value in enumerate(getattr(short, name))
        ]
        for name in names
    }

    def pair(name: str, *parts: int) -> Any:
        runs = [short, *(long for long, _ in longer)]
        values = [getattr(run, name) for run in runs]
        for part in parts:
            values = [value[part] for value in values]
        return tuple(further(first, others) for first, *others in zip(*values, strict=True))

    return Pass(
        list(short.phase),
        fixed=columns["fixed"],
        per_sequence=columns["per_sequence"],
        gradients=columns["gradients"],
        in_use=columns["in_use"],
        after_forward=pair("after_forward"),
        flops=pair("flops"),
        attention=pair("attention"),
        moved=(pair("moved", 0), pair("moved", 1)),
        operators=pair("operators"),
        frozen_only=pair("frozen_only"),
    )


def _matched(short: Pass, long: Pass) -> list[int]:
    """Map each allocation of the shallow model to the matching one of the deeper model."""
    found = [0] * len(short.phase)
    of_mine, of_theirs = _sections(short), _sections(long)
    for section in dict.fromkeys(of_mine):
        mine = [i for i, one in enumerate(of_mine) if one == section]
        theirs = [i for i, one in enumerate(of_theirs) if one == section]
        for at, i in enumerate(mine):
            from_end = len(theirs) - len(mine) + at
            found[i] = theirs[at] if at < len(mine) / 2 else theirs[from_end]
    return found


def _sections(run: Pass) -> list[tuple[int, int]]:
    """Return (phase, section) of each allocation."""
    return list(zip(run.phase, run.section or [0] * len(run.phase), strict=True))
