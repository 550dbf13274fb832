"""Reasons for the end of a search."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StopReason(Enum):
    """Reason for the end of a search; the value is its sentence, with fields for `stop`."""

    INTERRUPTED = "interrupted"
    BUDGET_USED = "budget used"
    MAX_TRIALS = "--max-trials {count} reached"
    WORKER_FAILED = "stopped: a trial beside it failed"
    MACHINE_FAILED = "the machine failed {count} times in a row"
    JOB_FAILS = "stopped: the job fails"
    MACHINE_FAILS = "stopped: the machine fails"
    ALL_TRIED = "every candidate is tried or ruled out"
    NOTHING_BETTER = "nothing better in {count} trials, of which half were the sampler's (--exhaustive goes on)"
    SMALL_GAIN = "the predicted gain of going on is below {percent:g} % (--exhaustive goes on)"
    NOTHING_FITS = "nothing fits: memory was too small for {tried} (--exhaustive goes on)"
    NOTHING_RUNS = "nothing runs: {tried}, have failed ({kinds}; --exhaustive goes on)"

    def stop(self, **fields: object) -> Stop:
        """Return a stop for this reason; `fields` fill its sentence."""
        return Stop(self, self.value.format(**fields))


@dataclass(frozen=True)
class Stop:
    """End of a search: the reason, and its sentence for the user."""

    reason: StopReason
    sentence: str
