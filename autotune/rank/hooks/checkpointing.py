"""Set activation checkpointing as the candidate does, and override the script's own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autotune.problem.candidate import CHECKPOINTING
from autotune.rank.hooks.context import Context

_ATTRIBUTE = "gradient_checkpointing"  # attribute of layers by which libraries and custom models check if it is on


@dataclass(frozen=True)
class _Switch:
    """Methods that switch checkpointing in a library's models."""

    enable: str
    disable: str
    supported: str  # attribute by which a class declares that it has no support
    how: tuple[tuple[str, Any], ...] = ()  # arguments of `enable`


_SWITCHES = (
    _Switch(
        "gradient_checkpointing_enable",  # from transformers
        "gradient_checkpointing_disable",
        "supports_gradient_checkpointing",
        (("gradient_checkpointing_kwargs", {"use_reentrant": False}),),
    ),
    _Switch("enable_gradient_checkpointing", "disable_gradient_checkpointing", "_supports_gradient_checkpointing"),
)  # the second is from diffusers (models/modeling_utils.py)
_ENABLE = (*(one.enable for one in _SWITCHES), "activation_checkpointing_enable")  # includes transformers' new name


def apply(context: Context, model: Any) -> None:
    """Switch a model's checkpointing as the candidate says.

    For a candidate without it, checkpointing by the script (or peft's `prepare_model_for_kbit_training`) is turned off
    and stays off. Checkpointing that is already on keeps the script's settings.
    """
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
    """Yield the outermost switchable modules with their methods, or None if their code reads the attribute.

    A custom model may wrap a library's model, whose layers inherit the attribute from their class.
    """
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
    """Prevent later calls from turning it on in these modules, given by id; reference models are not affected."""

    def enable(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return None if id(module) in modules else original(module, *args, **kwargs)

    for one in classes:
        for name in _ENABLE:
            if hasattr(one, name):
                context.patches.wrap(one, name, enable)


def is_on(model: Any) -> bool:
    """Return True if any part of a model is checkpointed, by the attribute of its layers."""
    return any(getattr(module, _ATTRIBUTE, False) is True for module in model.modules())


def can_switch(model: Any, through_arguments: bool = False) -> bool:
    """Return True if checkpointing can be switched from its current state.

    Args:
        through_arguments: True if transformers' Trainer switches it, which knows only the method of the whole model.
    """
    parts = list(_parts(model))
    if through_arguments and not hasattr(model, _SWITCHES[0].enable):
        return False
    on = [(module, switch) for module, switch in parts if is_on(module)]
    return bool(parts) and all(switch is None or hasattr(module, switch.disable) for module, switch in on)


def call_of(model: Any) -> str:
    """Return the code that turns it on for the first switchable part, as an expression on the model.

    Returns:
        An empty string if it cannot be turned on, or works as in transformers' models.
    """
    part, switch = next(_parts(model), (None, None))
    if part is None or (part is model and switch is _SWITCHES[0]):
        return ""
    path = next(name for name, module in model.named_modules() if module is part)
    called = f"{_ATTRIBUTE} = True" if switch is None else f"{switch.enable}()"
    return f"{path}.{called}" if path else called
