"""Detect a training without DeepSpeed, and classify the optimizer that a script makes."""

from __future__ import annotations

from typing import Any

from autotune.rank.hooks.context import Context

_STEPS_WITHOUT_DEEPSPEED = 2  # one step may be part of a script's preparation
_OF_ONE_PLACE = ("deepspeed", "apex")  # their kernels need all tensors on one device


def install(context: Context) -> None:
    """Report optimizer steps without an engine to the watcher, from the second on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def stepped(*_: Any) -> None:
        nonlocal steps
        if context.engine is None and not context.earlier:
            steps += 1
            if steps >= _STEPS_WITHOUT_DEEPSPEED:
                context.watcher.strayed()

    context.patches.on_undo(register_optimizer_step_post_hook(stepped).remove)


def kind_of(context: Context, optimizer: Any) -> str:
    """Return the class name of a script's optimizer if it comes from DeepSpeed or apex, or an empty string.

    Other optimizers step on any device. The result is also empty if accelerate made the CPU variant that the script's
    config needs.
    """
    ancestors = type(optimizer).__mro__ if optimizer is not None else ()
    found = next((one.__name__ for one in ancestors if one.__module__.partition(".")[0] in _OF_ONE_PLACE), "")
    return "" if context.accelerated and "CPU" in found else found


def torchs_of(optimizer: Any) -> dict[str, Any]:
    """Return class and implementation of a script's optimizer if it is torch's own, or an empty dict.

    An implementation of None leaves the choice to torch. Subclasses are excluded, because their step may differ.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    asked = {name: optimizer.defaults.get(name) for name in ("fused", "foreach")}
    return {"class": type(optimizer).__name__, **asked}
