"""Optimizers: a script that trains without DeepSpeed is noticed, of which class is one that it makes, and how torch's step."""

from __future__ import annotations

from typing import Any

from autotune.rank.hooks.context import Context

_STEPS_WITHOUT_DEEPSPEED = 2  # one may be a script's own preparation
_OF_ONE_PLACE = ("deepspeed", "apex")  # their kernels take tensors of one place alone


def install(context: Context) -> None:
    """The watcher hears of every optimizer step from the second on, as long as no engine exists."""
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
    """The name of the class, of DeepSpeed's or apex's, of an optimizer that the script has made; empty for all others, which step
    wherever their parameters are, and where accelerate has made one of the kind that the script's config wants."""
    ancestors = type(optimizer).__mro__ if optimizer is not None else ()
    found = next((one.__name__ for one in ancestors if one.__module__.partition(".")[0] in _OF_ONE_PLACE), "")
    return "" if context.accelerated and "CPU" in found else found


def torchs_of(optimizer: Any) -> dict[str, Any]:
    """The class of an optimizer that the script has made and that is torch's own, and which implementation it asks for: None
    where torch chooses. Empty for all others; one that is derived from torch's may step in a way of its own."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    asked = {name: optimizer.defaults.get(name) for name in ("fused", "foreach")}
    return {"class": type(optimizer).__name__, **asked}
