"""Time limits for a worker group, and the reasons for which a watch ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.problem.outcome import Phase
from autotune.versions import StrEnum

_LAPSE_SECONDS = 5.0  # seconds; a normal turn of the watch loop takes tenths of a second


class Stop(StrEnum):
    """Reason for which the watch of a group ended."""

    ARRIVED = "arrived"  # the awaited event has happened
    FAILED = "failed"  # a rank reported an error, or is gone
    SILENT = "silent"  # no heartbeat for longer than the policy allows
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Policy:
    """Differences between the ranks of a trial and those of a training.

    Args:
        hello_seconds: limit for all ranks to start and connect.
        silence_seconds: limit without a heartbeat per phase. A heartbeat is a message, progress of the main thread, or
            computing, reading or writing.
        settle_seconds: wait after the first failure, because a peer's consequential error may arrive before the cause.
        may_leave: True if a rank may end by itself with exit code 0. A trial's ranks wait for the order.
    """

    hello_seconds: float
    silence_seconds: Callable[[Phase], float]
    settle_seconds: float
    may_leave: bool


class Quiet:
    """Time without a heartbeat, in a loop that marks its turns.

    A loop that stands still was suspended itself, usually with its ranks (`scontrol suspend`, `docker pause`). The
    suspended time does not count.

    Attributes:
        now: start of this turn. All times are on the monotonic clock.
        began: start of the loop.
        last_alive: last heartbeat of a rank.
        last_look: last check of silent ranks.
    """

    def __init__(self) -> None:
        self.now = self.began = self.last_alive = self.last_look = time.monotonic()

    def turn(self) -> None:
        """Begin the next turn."""
        before, self.now = self.now, time.monotonic()
        if (lapse := self.now - before) > _LAPSE_SECONDS:
            self.began += lapse
            self.last_alive = min(self.now, self.last_alive + lapse)
            self.last_look = min(self.now, self.last_look + lapse)
