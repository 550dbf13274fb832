"""How long ranks may show no life before a trial is given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.problem.outcome import Phase


@dataclass(frozen=True)
class Deadlines:
    """How long ranks may show no life in a phase, in seconds: no message, no step of a main thread, nothing computed, read
    or written. What is large gets more on top, by `size_seconds`."""

    hello: float = 90.0  # an interpreter comes up and connects; nothing of the candidate is in it yet
    start: float = 90.0
    init: float = 120.0
    step: float = 60.0

    def of(self, phase: Phase) -> float:
        return {Phase.START: self.start, Phase.INIT: self.init}.get(phase, self.step)

    def allowing(self, seconds: float, patience: float) -> Callable[[Phase], float]:
        """The limit of each phase: `seconds` more where weights and states are made or moved, all times `patience`."""
        heavy = (Phase.INIT, Phase.LOAD, Phase.SAVE)
        return lambda phase: patience * (self.of(phase) + (seconds if phase in heavy else 0.0))


# a script may wait for the network, or for another process that prepares its data
SCRIPT_DEADLINES = Deadlines(start=300.0, init=300.0, step=120.0)
