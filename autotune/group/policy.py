"""How patient one is with a group of ranks, and why watching it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.problem.outcome import Phase
from autotune.versions import StrEnum

_LAPSE_SECONDS = 5.0  # a turn of the loop that watches takes tenths of a second


class Stop(StrEnum):
    """Why watching a group ended."""

    ARRIVED = "arrived"  # what was waited for is here
    FAILED = "failed"  # a rank reported an error, or is gone
    SILENT = "silent"  # no rank showed life for longer than the policy allows
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Policy:
    """What differs between the ranks of a trial and those of a training.

    Args:
        hello_seconds: for all ranks to come up and connect.
        silence_seconds: how long no rank may show life in a phase, once they have: no message, no step of its main thread,
            nothing computed, read or written.
        settle_seconds: what is waited after the first failure, so that a peer's complaint does not outrun its cause.
        may_leave: whether a rank may end by itself with exit code 0. A trial's ranks may not: they wait to be told.
    """

    hello_seconds: float
    silence_seconds: Callable[[Phase], float]
    settle_seconds: float
    may_leave: bool


class Quiet:
    """How long no rank has shown life, in a loop that says when a turn begins. A loop that stands still was stopped itself, and
    the ranks mostly with it (`scontrol suspend`, `docker pause`): that time does not count.

    Attributes:
        now: when this turn began, on the monotonic clock; so are the others.
        began: when the loop did.
        last_alive: when a rank has shown life last.
        last_look: when ranks that say nothing were last looked at.
    """

    def __init__(self) -> None:
        self.now = self.began = self.last_alive = self.last_look = time.monotonic()

    def turn(self) -> None:
        """The next turn begins."""
        before, self.now = self.now, time.monotonic()
        if (lapse := self.now - before) > _LAPSE_SECONDS:
            self.began += lapse
            self.last_alive = min(self.now, self.last_alive + lapse)
            self.last_look = min(self.now, self.last_look + lapse)
