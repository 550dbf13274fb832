"""Which engine trains, where a script makes several: the first, unless its first run shows another.

A reference that is made first has an optimizer where its config has one, and a script may train in phases, each with an engine of
its own. Only the first run elects; what it has found stands in the profile, and counts from then on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.problem.script_job import EARLIER
from autotune.rank.hooks.context import Context

# Optimizer steps of another engine, one after another, while the one that was taken to train has no backward:
_REFERS = 3  # and has never had one, in evaluation mode
_ENDED = 2  # though it has stepped, before the other was made
_SILENT = 16  # of both as it may be where two take turns, a critic's many with a generator's one


@dataclass
class Rival:
    """An engine that may yet be the one that trains."""

    engine: Any
    config: dict[str, Any]  # the script's own
    optimizer: Any  # that the script has made itself, if any
    late: bool  # the one that trains had stepped before it was made
    steps: int = 0  # in a row


def is_early(context: Context) -> bool:
    """Whether the engine that is made now is one of those before the one that trains, by the script's first run."""
    return context.engine is None and len(context.earlier) < int(context.script.profile.get(EARLIER, 0))


def stand(context: Context, engine: Any, config: dict[str, Any], optimizer: Any) -> None:
    """Enters an engine that was made after the one that trains."""
    if context.candidate is None:
        context.rivals.append(Rival(engine, copy.deepcopy(config), optimizer, late=context.trained_steps > 0))


def trained(context: Context) -> None:
    """The engine that trains has a backward: whoever trains beside it does so in turns."""
    context.trained = True
    for rival in context.rivals:
        rival.steps = 0


def stepped(context: Context, engine: Any, take: Callable[[Rival], None]) -> None:
    """An engine beside the one that trains has made an optimizer step, and is the one that trains if that one is idle.

    Args:
        take: has what is hooked follow the engine.
    """
    rival = next((one for one in context.rivals if one.engine is engine), None)
    if rival is None:
        return
    rival.steps += 1
    if rival.steps < _needed(context, rival):
        return
    at = next(at for at, one in enumerate(context.beside) if one is engine)
    context.earlier += [context.engine, *context.beside[:at]]
    del context.beside[: at + 1]
    gone = [id(one) for one in (*context.earlier, engine)]
    context.rivals = [one for one in context.rivals if id(one.engine) not in gone]
    context.trained, context.trained_steps = True, 0
    take(rival)


def _needed(context: Context, rival: Rival) -> int:
    if not context.trained and not context.engine.module.training:
        return _REFERS
    return _ENDED if rival.late else _SILENT
