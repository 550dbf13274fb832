"""What a step takes where not all steps have the same work. Pure functions: no clock, no torch.

A script may generate data, or evaluate, in every fourth step: a median then leaves that work out, and a config whose steps are
small enough to hide it looks many times as fast as it is. A machine may stall, too, which is no work of the script's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

UNLIKE = 1.25  # times the median, or as many times less: such a step has other work than most
RARE = 0.1  # of the steps: fewer, at no regular distance, are stalls of the machine
SETTLED = 0.05  # of the figure: by as much a lone step may change it
SURE = 0.1  # of the figure: a mean is measured on while its interval is wider
_PERIODS = 2  # whole ones, with which a mean is believed


@dataclass(frozen=True)
class Pace:
    """What step times come to."""

    seconds: float  # of a step as it is trained: a median, or the mean over whole periods where other work recurs
    spread: float  # half the width of its 95 % interval
    pending: bool = False  # whether steps are missing that would tell if, or how often, work recurs
    vague: bool = False  # whether it is a mean that more steps would make clearly surer

    @property
    def settled(self) -> bool:
        return not (self.pending or self.vague)


def pace_of(step_seconds: Sequence[float], unseen: int = 0) -> Pace:
    """The Pace of steps in the order in which they ran.

    Args:
        unseen: steps of the training before them, whose times say nothing.
    """
    middle = statistics.median(step_seconds)
    usual = Pace(middle, median_spread(step_seconds))
    marks = _unlike(step_seconds)
    if not marks:
        return usual
    count, last = len(step_seconds), marks[-1]
    excess = abs(sum(step_seconds[at] - middle for at in marks)) / count
    # what began with the training has had the time to come again
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
    """Where steps are that clearly took longer than most; of steps that clearly took less, where these are more."""
    middle = statistics.median_low(step_seconds)
    # against the mean without the longest: beside a rollout the jitter of a short step is nothing
    usual = max(middle, statistics.fmean(sorted(step_seconds)[:-1] or step_seconds))
    slow = [at for at, seconds in enumerate(step_seconds) if seconds - middle > (UNLIKE - 1) * usual]
    fast = [at for at, seconds in enumerate(step_seconds) if middle - seconds > (1 - 1 / UNLIKE) * usual]
    return slow if len(slow) >= len(fast) else fast


def _over_periods(step_seconds: Sequence[float], marks: Sequence[int]) -> Pace:
    """Of whole periods: from the step after one that is marked to the next that is, inclusive."""
    periods = [step_seconds[first + 1 : end + 1] for first, end in pairwise(marks)]
    count, steps = len(periods), marks[-1] - marks[0]
    mean = sum(map(sum, periods)) / steps
    if count < _PERIODS:  # one says nothing of the next
        return Pace(mean, abs(mean - statistics.median(step_seconds)), pending=True)
    # of a ratio of two sums, since periods may differ in their steps
    squares = sum((sum(period) - mean * len(period)) ** 2 for period in periods)
    spread = 1.96 * (squares / (count * (count - 1))) ** 0.5 / (steps / count)
    return Pace(mean, spread, vague=spread > SURE * mean)


def median_spread(values: Sequence[float]) -> float:
    """Half the width of a 95 % interval of the median: 1.96 x 1.2533 x s / sqrt(n), s from the interquartile range
    (normal theory of the sample median; robust against a single slow step)."""
    if len(values) < 3:
        return max(values) - min(values)
    low, _, high = statistics.quantiles(sorted(values), n=4, method="inclusive")
    return float(1.96 * 1.2533 * (high - low) / 1.349 / len(values) ** 0.5)
