"""Estimate the step time of a training whose steps have unequal work. Pure functions: no clock, no torch.

A script may generate data or evaluate in every fourth step. A median ignores that work, so a config with short steps
looks many times faster than it is. The machine may also stall, which is not work of the script.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_TIMED_MICRO_BATCHES = 3  # a longer accumulation runs only the first, a middle and the boundary micro-batch
OVERRUN = 1.5  # first step over the share of the budget that is left for steps, at most
UNLIKE = 1.25  # ratio to the median, up or down, beyond which a step has different work
RARE = 0.1  # share of steps; fewer at irregular distances are stalls of the machine
SETTLED = 0.05  # relative change of the estimate that one step may cause
LONE = 0.25  # half the relative width of the interval of a single step
SURE = 0.1  # relative width of a mean's interval below which measuring may stop
_PERIODS = 2  # whole periods needed for a reliable mean


@dataclass(frozen=True)
class Pace:
    """Estimated step time with its uncertainty."""

    seconds: float  # seconds per step: a median, or the mean over whole periods if extra work recurs
    spread: float  # seconds; half the width of the 95 % interval
    pending: bool = False  # True if more steps are needed to see if, or how often, work recurs
    vague: bool = False  # True if the estimate is a mean that more steps would make clearly more precise

    @property
    def settled(self) -> bool:
        """Return True if no step is pending and the estimate is not vague."""
        return not (self.pending or self.vague)


def pace_of(step_seconds: Sequence[float], unseen: int = 0) -> Pace:
    """Estimate the Pace of steps in the order in which they ran.

    Args:
        unseen: earlier steps of the training, whose times are not usable.
    """
    middle = statistics.median(step_seconds)
    usual = Pace(middle, median_spread(step_seconds))
    marks = _unlike(step_seconds)
    if not marks:
        return usual
    count, last = len(step_seconds), marks[-1]
    excess = abs(sum(step_seconds[at] - middle for at in marks)) / count
    # Extra work at the start of training has had time to recur.
    waiting = excess > SETTLED * middle and count - 1 - last < last + unseen
    if len(marks) == 1:
        return Pace(middle, usual.spread, pending=waiting)
    longest = max(after - before for before, after in pairwise(marks))
    if max(marks[0], count - 1 - last) <= longest:
        return _over_periods(step_seconds, marks)
    if len(marks) < RARE * count:
        return Pace(middle, usual.spread, pending=waiting)
    mean = statistics.fmean(step_seconds)
    spread = 1.96 * statistics.stdev(step_seconds) / count**0.5
    return Pace(mean, spread, vague=spread > SURE * mean)


def _unlike(step_seconds: Sequence[float]) -> list[int]:
    """Return the indexes of steps clearly slower than most, or clearly faster if these outnumber the slow ones."""
    middle = statistics.median_low(step_seconds)
    # The mean without the longest step is the reference, because jitter of short steps is negligible next to a rollout.
    usual = max(middle, statistics.fmean(sorted(step_seconds)[:-1] or step_seconds))
    slow = [at for at, seconds in enumerate(step_seconds) if seconds - middle > (UNLIKE - 1) * usual]
    fast = [at for at, seconds in enumerate(step_seconds) if middle - seconds > (1 - 1 / UNLIKE) * usual]
    return slow if len(slow) >= len(fast) else fast


def _over_periods(step_seconds: Sequence[float], marks: Sequence[int]) -> Pace:
    """Return the mean over whole periods. A period ends with a marked step and begins after the previous one."""
    periods = [step_seconds[first + 1 : end + 1] for first, end in pairwise(marks)]
    count, steps = len(periods), marks[-1] - marks[0]
    mean = sum(map(sum, periods)) / steps
    if count < _PERIODS:  # one period does not predict the next
        return Pace(mean, abs(mean - statistics.median(step_seconds)), pending=True)
    # Standard error of a ratio of two sums, because periods may differ in length.
    squares = sum((sum(period) - mean * len(period)) ** 2 for period in periods)
    spread = 1.96 * (squares / (count * (count - 1))) ** 0.5 / (steps / count)
    return Pace(mean, spread, vague=spread > SURE * mean)


def median_spread(values: Sequence[float]) -> float:
    """Return half the width of a 95 % interval of the median: 1.96 x 1.2533 x s / sqrt(n).

    The standard deviation s comes from the interquartile range, which is robust against a single slow step. Source:
    normal theory of the sample median. A single step shows no variation, so its interval is wide.
    """
    if len(values) == 1:
        return LONE * values[0]
    if len(values) < 3:
        return max(values) - min(values)
    low, _, high = statistics.quantiles(sorted(values), n=4, method="inclusive")
    return float(1.96 * 1.2533 * (high - low) / 1.349 / len(values) ** 0.5)
