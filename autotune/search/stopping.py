"""End of a search: the reason, and how much speed the untried candidates may still hold."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from autotune.predict.features import Floats
from autotune.search.belief import Mixture
from autotune.util.units import counted

# -- reasons -----------------------------------------------------------------------------------------------------------
#
# One member per reason, so that no control flow compares sentences. Studies store the sentence; `StopReason.of` reads it.


class StopReason(Enum):
    """Reason for the end of a search; the value is its sentence, with fields for `stop`.

    `Tuner.run` replaces any reason by INTERRUPTED if the user stopped the call. With `--parallel`, the reason of the first
    worker counts.

    `StudyStore.update_call` (`search/study.py`) stores the sentence as `Call.ended` (`search/trials.py`):

    - `autotune run` prints it with the counts of the call's trials (`_summary` in `commands/run.py`), with or without a
      winner. If no trial ran, `no_winner_lines` (`results/console.py`) says why. `run --json` has it as `ended`.
    - `autotune show` prints the sentence of the last call, and `show --json` has it as `ended`.
    - The HTML report lists the sentences of all calls (`results/report/build.py`).

    A call has no sentence, and `show` prints "not ended", if it was killed or ended by another exception than UserError or
    MachineError. A call that ends before `Tuner.run`, such as in a script's probe run, is not stored.
    """

    # limits of the call: SearchLoop.why_stop (search/tuner.py), which reads Budget (search/budget.py), TrialRecorder
    # (search/tuner.py) and SearchWorkers (search/concurrency.py)
    INTERRUPTED = "interrupted"
    BUDGET_USED = "budget used"
    MAX_TRIALS = "--max-trials {count} reached"
    # never stored: SearchLoop.run raises the worker's exception. For a UserError or a MachineError, Tuner.run stores a
    # reason below, and for another exception nothing
    WORKER_FAILED = "stopped: a trial beside it failed"
    MACHINE_FAILED_REPEATEDLY = "the machine failed {count} times in a row"
    # an error that ends the call: TrialRecorder (search/tuner.py) or the executor raises it, Tuner.run stores it
    JOB_FAILS = "stopped: the job fails"  # any UserError, also of the executor, such as a fork server that died
    MACHINE_ERROR = "stopped: the machine fails"  # any MachineError
    # Proposer._decide (search/proposer.py); the last two: nothing_works there
    ALL_TRIED = "every candidate is tried or ruled out"
    SMALL_GAIN = "the predicted gain of going on is below {percent:g} % (--exhaustive goes on)"
    NOTHING_FITS = "nothing fits: memory was too small for {tried} (--exhaustive goes on)"
    NOTHING_RUNS = "nothing runs: {tried}, have failed ({kinds}; --exhaustive goes on)"

    def stop(self, **fields: object) -> Stop:
        """Return a stop for this reason; `fields` fill its sentence."""
        return Stop(self, self.value.format(**fields))

    @classmethod
    def of(cls, sentence: str) -> StopReason | None:
        """Return the reason of a stored sentence; None for an unknown or an empty one."""
        return next((one for one in cls if sentence.startswith(one.value.partition("{")[0])), None)


@dataclass(frozen=True)
class Stop:
    """End of a search: the reason, and its sentence for the user."""

    reason: StopReason
    sentence: str


# -- confidence --------------------------------------------------------------------------------------------------------

PROBABILITY = 0.9
# Measured configs; with fewer, bounds of 90 % hold too rarely (tiny-llama_2xcpu of `benchmarks/search/search.py`: never
# after two trials, in 7 of 12 searches after three).
LEAST_MEASURED = 4


@dataclass(frozen=True)
class Confidence:
    """Bound of the gain that the untried candidates hold over the best measured one."""

    left_share: float  # share of speed; exceeded with a probability of 1 - PROBABILITY; infinite if unknown
    trials: int
    measured: int  # configs
    untried: bool = True  # a candidate may still be tried

    @property
    def sentence(self) -> str:
        """Text for the user, such as `untried configs are at most 3 % faster, with 90 % probability (judged by 14 trials)`."""
        if not self.untried:
            return "no config is left to try"
        if self.measured < LEAST_MEASURED:
            return f"{counted(self.measured, 'config')} measured: too few to bound the speed of the untried ones"
        trials = counted(self.trials, "trial")
        if not self.left_share:
            return f"no untried config is faster, with {100 * PROBABILITY:.0f} % probability (judged by {trials})"
        if self.left_share > 1:
            return f"untried configs may be more than twice as fast (judged by {trials})"
        percent = max(1, math.ceil(100 * self.left_share))
        return f"untried configs are at most {percent} % faster, with {100 * PROBABILITY:.0f} % probability (judged by {trials})"


def speed_left(ahead: Mixture, fits: Floats, groups: NDArray[np.intp]) -> float:
    """Return the share of speed that the best untried candidate exceeds with a probability of 1 - PROBABILITY.

    The bound is rounded up to a whole percent, and infinite beyond twice the speed. Errors are taken as equal within a group
    and as independent between groups.

    Args:
        ahead: logarithm of speed over the best measured candidate, for n candidates.
        fits: (n,) probability that the candidate fits.
        groups: (n,) group of each candidate.
    """
    _, groups = np.unique(groups, return_inverse=True)

    def probability_below(percent: int) -> float:
        worst = np.zeros(groups.max(initial=0) + 1)
        np.maximum.at(worst, groups, fits * (1 - ahead.probability_below(math.log1p(percent / 100))))
        return float(np.prod(1 - worst))

    percent = bisect.bisect_left(range(101), PROBABILITY, key=probability_below)
    return percent / 100 if percent <= 100 else math.inf
