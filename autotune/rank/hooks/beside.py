"""Engines that train beside the first (a critic, a discriminator): their batch is kept like the first's, and counted."""

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
    """An engine's config with the candidate's batch sizes, where its own are those of the first engine and the command names no
    file of its own for it, which the printed command would leave as it is; else the config."""
    ranks = int(os.environ["WORLD_SIZE"])
    own = batch_of(context.own_config or {}, ranks)
    if context.batch is None or own is None or batch_of(config, ranks) != own or several_configs(context.script):
        return config
    found = {key: value for key, value in copy.deepcopy(config).items() if key not in BATCH_KEYS}
    found[MICRO_BATCH], found[ACCUMULATION] = context.batch
    return found


def watch(context: Context, engine: Any, steps: Callable[[Any], bool], done: Callable[[Any], None]) -> None:
    """The watcher is told of every optimizer step of the engine, and of the rows that it was given since the one before.

    One that turns out to be the one that trains, or to come before it, is told of no more.

    Args:
        steps: whether the engine's next `step` is one of its optimizer.
        done: is told of each such step as well.
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
