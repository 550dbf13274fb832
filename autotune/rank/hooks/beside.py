"""Auxiliary engines (a critic, a discriminator): set their batch like that of the first engine, and count it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, MICRO_BATCH
from autotune.problem.script import several_configs
from autotune.rank.hooks.batches import batch_of, sizes_of
from autotune.rank.hooks.context import Context


def with_batch(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's config with the candidate's batch sizes if its own equal those of the first engine.

    The config is returned unchanged if the command names several config files, because the printed command would not
    change the engine's own file.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    own = batch_of(context.own_config or {}, ranks)
    if context.batch is None or own is None or batch_of(config, ranks) != own or several_configs(context.script):
        return config
    found = {key: value for key, value in copy.deepcopy(config).items() if key not in BATCH_KEYS}
    found[MICRO_BATCH], found[ACCUMULATION] = context.batch
    return found


def watch(context: Context, engine: Any, steps: Callable[[Any], bool], done: Callable[[Any], None]) -> None:
    """Report every optimizer step of the engine to the watcher, with the rows since the preceding step.

    Reports end if the engine turns out to be the one that trains, or to precede it.

    Args:
        steps: returns True if the engine's next `step` runs its optimizer.
        done: called after each such step.
    """
    import torch

    rows = 0
    context.beside.append(engine)

    def forward(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        nonlocal rows
        if torch.is_grad_enabled():
            rows += sizes_of(args, kwargs).rows
        return original(*args, **kwargs)

    def step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        nonlocal rows
        boundary = steps(engine)
        result = original(*args, **kwargs)
        number = next((at for at, one in enumerate(context.beside) if one is engine), None)
        if boundary and number is not None:
            context.watcher.beside(number, rows)
            rows = 0
            done(engine)
        return result

    context.patches.wrap(engine, "forward", forward)
    context.patches.wrap(engine, "step", step)
