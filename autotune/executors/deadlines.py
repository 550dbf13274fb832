"""Time limits for ranks without a sign of progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.problem.outcome import Phase


@dataclass(frozen=True)
class Deadlines:
    """Seconds that ranks may show no progress in a phase.

    Progress is a message, a step of a main thread, computation, or I/O. Large models get additional seconds from
    `size_seconds`.
    """

    hello: float = 90.0  # an interpreter starts and connects, before it receives the candidate
    start: float = 90.0
    init: float = 120.0
    step: float = 60.0

    def of(self, phase: Phase) -> float:
        return {Phase.START: self.start, Phase.INIT: self.init}.get(phase, self.step)

    def allowing(self, seconds: float, patience: float) -> Callable[[Phase], float]:
        """Return the limit of each phase: `seconds` more in heavy phases, all times `patience`.

        Heavy phases create or move weights and optimizer states.
        """
        heavy = (Phase.INIT, Phase.LOAD, Phase.SAVE)
        return lambda phase: patience * (self.of(phase) + (seconds if phase in heavy else 0.0))


# Scripts may wait for the network, or for another process that prepares their data.
SCRIPT_DEADLINES = Deadlines(start=300.0, init=300.0, step=120.0)
