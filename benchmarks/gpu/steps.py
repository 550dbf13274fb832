"""The one list of what only a GPU can prove, from most to least worth. Each step is a module of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.errors import UserError


@dataclass(frozen=True)
class Step:
    """A step, and seconds on one GPU, most of them estimates."""

    name: str  # of its module, whose `run(ground)` yields rows
    limit_seconds: float  # it is ended after so long
    least_seconds: float  # it is not begun if less of the call is left
    expected_seconds: float
    purpose: str
    keys: int = 1  # columns that name a row
    is_first: bool = False  # part of the first minutes
    timed: bool = False  # begins only when no op is being built any more, which takes the cores that its ranks need


STEPS = (
    Step("facts", 60, 20, 8, "the machine, as a reader needs it to debug the rest from afar", is_first=True),
    Step("script", 170, 110, 130, "autotune run of a Trainer script in the sandbox", is_first=True, timed=True),
    Step("two_ranks", 200, 130, 150, "a study of two ranks on one card: NCCL at all stages", is_first=True, timed=True),
    Step("levers", 200, 40, 150, "compile, Liger and chunked loss of two models", 2, is_first=True, timed=True),
    Step("stage3", 80, 30, 50, "steps of stage 3: parameters kept or fetched, overlap", timed=True),
    Step("study", 160, 120, 130, "autotune run of a named model with a global batch", timed=True),
    Step("fidelity", 180, 40, 86, "the study's winner, or a fixed candidate, against plain torchrun", 2, timed=True),
    Step("launch", 120, 40, 87, "launch goes on after an OOM at a cap of the allocator"),
    Step("costs", 120, 30, 40, "cost of the memory monitor at its own rate and at 100 Hz", 2, timed=True),
    Step("ooms", 480, 60, 180, "true OOMs of allocator, libraries and pinned memory: texts, numbers, verdict (4, 22)"),
)
BY_NAME = {step.name: step for step in STEPS}
FIRST = tuple(step.name for step in STEPS if step.is_first)


def chosen(names: Iterable[str] | None, option: str) -> list[Step]:
    """Return the named steps in the order of worth; None: all.

    Raises:
        UserError: there is no such step.
    """
    wanted = set(BY_NAME if names is None else (name.strip() for name in names))
    if unknown := sorted(wanted - BY_NAME.keys()):
        raise UserError(f"{option}: no step {', '.join(unknown) or '(empty)'}; expected some of {','.join(BY_NAME)}")
    return [step for step in STEPS if step.name in wanted]
