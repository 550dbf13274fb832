"""Rules for the length of warm-up and measurement, and the resulting step times. Pure functions: no clock, no torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, fields
from typing import Any

from autotune.rank.recurring import UNLIKE, pace_of

SETTLED = 0.05  # warm-up ends when two step times in a row differ by less than this fraction
MAX_WARMUP_STEPS = 6
MAX_TIMED_MICRO_BATCHES = 3  # a longer accumulation runs only the first, a middle and the boundary micro-batch

LONGER = 2  # factor on the most steps and seconds if recurring work may have been missed
ALIKE_STEPS = 12  # equal steps after which nothing is expected to recur, even if the first took longer
ALIKE_SHARE = 0.25  # share of the longest measurement's seconds that may be spent on that check

StepParts = list[float]  # seconds of one optimizer step: the whole, or each micro-batch that was run


@dataclass(frozen=True)
class Request:
    """Parameters of a `measure` message."""

    micro_batch: int
    accumulation: int
    min_steps: int
    max_steps: int
    min_seconds: float
    max_seconds: float
    most_seconds: float = math.inf  # upper limit of any extension
    full: bool = False  # run every micro-batch of an accumulation, without extrapolation

    @classmethod
    def of(cls, message: dict[str, Any]) -> Request:
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that are run per step."""
        if self.full or self.accumulation <= MAX_TIMED_MICRO_BATCHES:
            return self.accumulation
        return MAX_TIMED_MICRO_BATCHES

    @property
    def extrapolated(self) -> bool:
        return self.micro_batches < self.accumulation


def warmed_up(step_seconds: list[float], request: Request) -> bool:
    """Return True if the warm-up may end: step times have settled, or it took its share of the time."""
    count = len(step_seconds)
    if count >= MAX_WARMUP_STEPS:
        return True
    # The first step allocates the optimizer's states and compiles kernels, so it is never compared with the second.
    if count >= 3 and abs(step_seconds[-1] - step_seconds[-2]) <= SETTLED * step_seconds[-2]:
        return True
    return count >= 2 and sum(step_seconds) > min(3 * request.min_seconds, 0.4 * request.max_seconds)


def enough(request: Request, elapsed_seconds: float, steps: int) -> bool:
    """Return True if the measured steps and seconds satisfy the request."""
    if steps >= request.max_steps or elapsed_seconds > request.max_seconds:
        return True
    return steps >= request.min_steps and elapsed_seconds > request.min_seconds


def settled(request: Request, elapsed_seconds: float, step_seconds: list[float], warmup: list[float]) -> bool:
    """Return True if the measured steps represent a script's step time, or the time for that is over.

    More steps are needed if a step had extra work (data generation, an evaluation), which may recur. Recurring work
    also runs in the first step. There it cannot be distinguished from the one-time work of an engine.

    Args:
        step_seconds: averages over all ranks, so that all ranks decide alike.
        warmup: averages of the preceding steps.
    """
    pace, count = pace_of(step_seconds, len(warmup)), len(step_seconds)
    if pace.settled:
        alike = count >= min(ALIKE_STEPS, LONGER * request.max_steps) or max(warmup) <= UNLIKE * pace.seconds
        return alike or elapsed_seconds > ALIKE_SHARE * request.max_seconds
    times = LONGER if pace.pending else 1
    most_seconds = min(times * request.max_seconds, max(request.max_seconds, request.most_seconds))
    return count >= times * request.max_steps or elapsed_seconds > most_seconds


def stretch(request: Request, elapsed_seconds: float, steps: int, seconds_per_step: float) -> int:
    """Return the number of steps, at least one, to run before the ranks compare their clocks again.

    A comparison after every step would make each step wait for the slowest rank, which training does not do.
    """
    wanted = max(request.min_steps - steps, math.ceil((request.min_seconds - elapsed_seconds) / seconds_per_step))
    affordable = int((request.max_seconds - elapsed_seconds) / seconds_per_step)
    return max(1, min(wanted, affordable, request.max_steps - steps))


def extrapolate(parts: StepParts, accumulation: int) -> float:
    """Return the seconds of a whole step of `accumulation` micro-batches.

    The first micro-batch is counted once: it has no gradients to add to, so it is faster than the following ones.

    Args:
        parts: seconds of [first, middle, boundary], or of [whole step].
    """
    if len(parts) < 2:
        return parts[0]
    return parts[0] + (accumulation - 2) * parts[1] + parts[-1]


def micro_seconds(steps: list[StepParts]) -> float:
    """Return the median seconds of a micro-batch between the first and the boundary."""
    return statistics.median(part for parts in steps for part in parts[1:-1] or parts[:1])


def boundary_seconds(steps: list[StepParts]) -> float:
    """Return the median seconds of the micro-batch that ends a step, the optimizer's update included."""
    return statistics.median(parts[-1] for parts in steps)
