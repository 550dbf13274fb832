"""Activation checkpointing: on or off as the candidate says, whatever the script's own code switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.problem.candidate import CHECKPOINTING
from autotune.rank.hooks.context import Context

_ENABLE = ("gradient_checkpointing_enable", "activation_checkpointing_enable")  # transformers' names, old and new
_DISABLE = "gradient_checkpointing_disable"


def apply(context: Context, model: Any) -> None:
    """Switches a model as the candidate says. What the script's code (or peft's `prepare_model_for_kbit_training`) has switched
    on is off for a candidate without, and stays so. One that is on already is left with the script's own settings."""
    candidate = context.candidate
    if candidate is None or CHECKPOINTING not in candidate.as_dict:
        return
    on = is_on(model)
    if candidate.checkpointing:
        enable = getattr(model, _ENABLE[0], None)
        if enable is not None and not on and not context.through_arguments:
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    if on:
        model.gradient_checkpointing_disable()
    _keep_off(context, {id(module) for module in model.modules()}, {type(module) for module in model.modules()})


def _keep_off(context: Context, modules: set[int], classes: set[type[Any]]) -> None:
    """From now on nothing switches it on in these modules, named by their ids; a reference's stay as they are."""

    def enable(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return None if id(module) in modules else original(module, *args, **kwargs)

    for one in classes:
        for name in _ENABLE:
            if hasattr(one, name):
                context.patches.wrap(one, name, enable)


def is_on(model: Any) -> bool:
    """Whether any part of a model is checkpointed, by the attribute that transformers' layers have."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def can_switch(model: Any) -> bool:
    """Whether it can be switched from what it is."""
    return hasattr(model, _ENABLE[0]) and (hasattr(model, _DISABLE) or not is_on(model))
