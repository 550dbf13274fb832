"""torch's optimizers: a script that trains without DeepSpeed is noticed."""

from __future__ import annotations

from typing import Any

from autotune.rank.hooks.context import Context

_STEPS_WITHOUT_DEEPSPEED = 2  # one may be a script's own preparation


def install(context: Context) -> None:
    """The watcher hears of every optimizer step from the second on, as long as no engine exists."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def stepped(*_: Any) -> None:
        nonlocal steps
        if context.engine is None:
            steps += 1
            if steps >= _STEPS_WITHOUT_DEEPSPEED:
                context.watcher.strayed()

    context.patches.on_undo(register_optimizer_step_post_hook(stepped).remove)
