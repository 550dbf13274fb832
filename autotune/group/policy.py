"""How patient one is with a group of ranks, and why watching it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.problem.outcome import Phase
from autotune.versions import StrEnum


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
