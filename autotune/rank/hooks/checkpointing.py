"""Activation checkpointing: on or off as the candidate says, whatever the script's own code switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autotune.problem.candidate import CHECKPOINTING
from autotune.rank.hooks.context import Context

_ATTRIBUTE = "gradient_checkpointing"  # of layers, by which libraries and models of one's own ask whether it is on


@dataclass(frozen=True)
class _Switch:
    """Methods by which a library's models are switched."""

    enable: str
    disable: str
    supported: str  # the attribute by which a class says that it cannot be
    how: tuple[tuple[str, Any], ...] = ()  # arguments of `enable`


_SWITCHES = (
    _Switch(
        "gradient_checkpointing_enable",  # transformers
        "gradient_checkpointing_disable",
        "supports_gradient_checkpointing",
        (("gradient_checkpointing_kwargs", {"use_reentrant": False}),),
    ),
    _Switch("enable_gradient_checkpointing", "disable_gradient_checkpointing", "_supports_gradient_checkpointing"),
)  # the second: diffusers (models/modeling_utils.py)
_ENABLE = (*(one.enable for one in _SWITCHES), "activation_checkpointing_enable")  # with transformers' new name


def apply(context: Context, model: Any) -> None:
    """Switches a model as the candidate says. What the script's code (or peft's `prepare_model_for_kbit_training`) has switched
    on is off for a candidate without, and stays so. One that is on already is left with the script's own settings."""
    candidate = context.candidate
    if candidate is None or CHECKPOINTING not in candidate.as_dict:
        return
    on = is_on(model)
    if candidate.checkpointing:
        if not on and not context.through_arguments:
            for module, switch in _parts(model):
                _turn(module, switch, True)
        return
    for module, switch in _parts(model) if on else ():
        if is_on(module):
            _turn(module, switch, False)
    _keep_off(context, {id(module) for module in model.modules()}, {type(module) for module in model.modules()})


def _parts(model: Any) -> Iterator[tuple[Any, _Switch | None]]:
    """The outermost modules that can be switched, each with its methods; with none where its own code asks the attribute. A
    model of one's own may be made around a library's, whose layers have the attribute by their class."""
    switch = next((one for one in _SWITCHES if hasattr(model, one.enable)), None)
    if switch is not None:
        if getattr(model, switch.supported, True):
            yield model, switch
        return
    if isinstance(vars(model).get(_ATTRIBUTE), bool):
        yield model, None
    for child in model.children():
        yield from _parts(child)


def _turn(module: Any, switch: _Switch | None, on: bool) -> None:
    if switch is None:
        setattr(module, _ATTRIBUTE, on)
    elif on:
        getattr(module, switch.enable)(**dict(switch.how))
    else:
        getattr(module, switch.disable)()


def _keep_off(context: Context, modules: set[int], classes: set[type[Any]]) -> None:
    """From now on nothing switches it on in these modules, named by their ids; a reference's stay as they are."""

    def enable(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return None if id(module) in modules else original(module, *args, **kwargs)

    for one in classes:
        for name in _ENABLE:
            if hasattr(one, name):
                context.patches.wrap(one, name, enable)


def is_on(model: Any) -> bool:
    """Whether any part of a model is checkpointed, by the attribute that layers have."""
    return any(getattr(module, _ATTRIBUTE, False) is True for module in model.modules())


def can_switch(model: Any, through_arguments: bool = False) -> bool:
    """Whether it can be switched from what it is.

    Args:
        through_arguments: whether transformers' Trainer does it, which knows the whole model's own method alone.
    """
    parts = list(_parts(model))
    if through_arguments and not hasattr(model, _SWITCHES[0].enable):
        return False
    on = [(module, switch) for module, switch in parts if is_on(module)]
    return bool(parts) and all(switch is None or hasattr(module, switch.disable) for module, switch in on)


def call_of(model: Any) -> str:
    """How a script's code switches the first part of a model on, written from the model on; empty where it cannot, or as
    transformers' models are."""
    part, switch = next(_parts(model), (None, None))
    if part is None or (part is model and switch is _SWITCHES[0]):
        return ""
    path = next(name for name, module in model.named_modules() if module is part)
    called = f"{_ATTRIBUTE} = True" if switch is None else f"{switch.enable}()"
    return f"{path}.{called}" if path else called
