"""Select the engine that trains if a script makes several: the first, unless the probe run shows another.

A reference model made first has an optimizer if its config has one. A script may also train in phases with an engine
for each. Only the probe run selects. Its result is part of the profile and applies to later runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.problem.script_job import EARLIER
from autotune.rank.hooks.context import Context

# Optimizer steps in a row of another engine during which the current choice has no backward:
_REFERS = 3  # the current choice has never had one, and is in evaluation mode
_ENDED = 2  # the current choice had stepped before the other was made
_SILENT = 16  # neither applies; two engines may alternate, such as a critic's many steps with a generator's one


@dataclass
class Rival:
    """Another engine that may turn out to be the one that trains."""

    engine: Any
    config: dict[str, Any]  # the script's own
    optimizer: Any  # optimizer that the script made itself, or None
    late: bool  # True if the current choice had stepped before this one was made
    steps: int = 0  # in a row


def is_early(context: Context) -> bool:
    """Return True if the engine being made precedes the one that trains, by the probe run."""
    return context.engine is None and len(context.earlier) < int(context.script.profile.get(EARLIER, 0))


def stand(context: Context, engine: Any, config: dict[str, Any], optimizer: Any) -> None:
    """Register an engine that was made after the current choice."""
    if context.candidate is None:
        context.rivals.append(Rival(engine, copy.deepcopy(config), optimizer, late=context.trained_steps > 0))


def trained(context: Context) -> None:
    """Record a backward of the engine that trains: other engines then alternate with it."""
    context.trained = True
    for rival in context.rivals:
        rival.steps = 0


def stepped(context: Context, engine: Any, take: Callable[[Rival], None]) -> None:
    """Record an optimizer step of another engine, and select it if the current choice is idle.

    Args:
        take: moves the hooks to the selected engine.
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
