"""How long a rank warms up and measures, and what its step times come to. Pure functions: no clock, no torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, fields
from typing import Any

from autotune.rank.recurring import UNLIKE, pace_of

SETTLED = 0.05  # warm-up ends when two step times in a row differ by less than this fraction
MAX_WARMUP_STEPS = 6
MAX_TIMED_MICRO_BATCHES = 3  # of a longer accumulation only the first, one from the middle and the boundary are run

LONGER = 2  # times the most steps and seconds, where work may recur of which too little was seen
ALIKE_STEPS = 12  # after so many that are alike nothing is expected to recur, though the first took longer
ALIKE_SHARE = 0.25  # of the longest measurement's seconds, which may be spent on seeing that

StepParts = list[float]  # seconds of one optimizer step: of the whole, or of each micro-batch that was run


@dataclass(frozen=True)
class Request:
    """What a `measure` message asks for."""

    micro_batch: int
    accumulation: int
    min_steps: int
    max_steps: int
    min_seconds: float
    max_seconds: float
    most_seconds: float = math.inf  # however much longer it would take
    full: bool = False  # run every micro-batch of an accumulation, extrapolate nothing

    @classmethod
    def of(cls, message: dict[str, Any]) -> Request:
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step that are run."""
        if self.full or self.accumulation <= MAX_TIMED_MICRO_BATCHES:
            return self.accumulation
        return MAX_TIMED_MICRO_BATCHES

    @property
    def extrapolated(self) -> bool:
        return self.micro_batches < self.accumulation


def warmed_up(step_seconds: list[float], request: Request) -> bool:
    """Whether warm-up steps that took `step_seconds` are enough: their times have settled, or the warm-up has taken its
    share of the measurement's time."""
    count = len(step_seconds)
    if count >= MAX_WARMUP_STEPS:
        return True
    # The first step allocates the optimizer's states and compiles kernels: it is never compared with the second.
    if count >= 3 and abs(step_seconds[-1] - step_seconds[-2]) <= SETTLED * step_seconds[-2]:
        return True
    return count >= 2 and sum(step_seconds) > min(3 * request.min_seconds, 0.4 * request.max_seconds)


def enough(request: Request, elapsed_seconds: float, steps: int) -> bool:
    """Whether so many measured steps in so many seconds are what was asked for."""
    if steps >= request.max_steps or elapsed_seconds > request.max_seconds:
        return True
    return steps >= request.min_steps and elapsed_seconds > request.min_seconds


def settled(request: Request, elapsed_seconds: float, step_seconds: list[float], warmup: list[float]) -> bool:
    """Whether measured steps that are enough also tell what a script's steps take, or the time for that is over. More of
    them are needed where one had other work than the rest (data that is generated, an evaluation): it may recur. What a
    script does every so many steps it does in the first, too, where it cannot be told from what an engine does only once.

    Args:
        step_seconds: of all ranks, so that all come to the same.
        warmup: the same of those before them.
    """
    pace, count = pace_of(step_seconds, len(warmup)), len(step_seconds)
    if pace.settled:
        alike = count >= min(ALIKE_STEPS, LONGER * request.max_steps) or max(warmup) <= UNLIKE * pace.seconds
        return alike or elapsed_seconds > ALIKE_SHARE * request.max_seconds
    times = LONGER if pace.pending else 1
    most_seconds = min(times * request.max_seconds, max(request.max_seconds, request.most_seconds))
    return count >= times * request.max_steps or elapsed_seconds > most_seconds


def stretch(request: Request, elapsed_seconds: float, steps: int, seconds_per_step: float) -> int:
    """Steps to run before the ranks compare their clocks again, at least one. They do not compare after every step: that
    would make each step wait for the slowest rank, and training does not."""
    wanted = max(request.min_steps - steps, math.ceil((request.min_seconds - elapsed_seconds) / seconds_per_step))
    affordable = int((request.max_seconds - elapsed_seconds) / seconds_per_step)
    return max(1, min(wanted, affordable, request.max_steps - steps))


def extrapolate(parts: StepParts, accumulation: int) -> float:
    """Seconds of a whole step of `accumulation` micro-batches from [first, middle, boundary]; of the whole step from [it].

    The first micro-batch is counted once: it has no gradients to add to, so it is faster than those that follow.
    """
    if len(parts) < 2:
        return parts[0]
    return parts[0] + (accumulation - 2) * parts[1] + parts[-1]


def micro_seconds(steps: list[StepParts]) -> float:
    """Median seconds of a micro-batch between the first and the boundary."""
    return statistics.median(part for parts in steps for part in parts[1:-1] or parts[:1])


def boundary_seconds(steps: list[StepParts]) -> float:
    """Median seconds of the micro-batch that ends a step, the optimizer's update included."""
    return statistics.median(parts[-1] for parts in steps)
