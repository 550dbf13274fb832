"""Ends of trials that a candidate does not pay for the first time: limits of ours, and main memory that others had taken."""

from __future__ import annotations

import dataclasses

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Source
from autotune.search.crew import Crew
from autotune.search.proposer import Proposer
from autotune.units import format_duration


def excused(candidate: Candidate, outcome: Outcome, limit: float | None, proposer: Proposer, crew: Crew) -> Outcome:
    """The Outcome, but where the trial is made again: a limit of ours that ended it may have been too short the first time,
    or main memory ran out while others ran beside it. With twice as much time, or alone, it counts.

    Args:
        limit: the trial's, in seconds; None where the budget's end or a person came first.
    """
    if outcome.kind is Kind.INTERRUPTED and outcome.source is Source.BUDGET and limit:
        why = f"took over {format_duration(limit)}, far more than what similar trials took"
        outcome = dataclasses.replace(
            outcome, kind=Kind.TIMEOUT, reason=why, evidence="deadline of the trial", source=Source.LIMIT
        )
    if outcome.kind is Kind.OOM_HOST and crew.set_apart(candidate):
        again = f"{outcome.reason}, while others ran beside it; it is tried again alone"
        outcome = dataclasses.replace(outcome, kind=Kind.INTERRUPTED, reason=again, capacity_bytes=None)
    ours = outcome.source in (Source.LIMIT, Source.SILENCE)  # of others more time changes nothing
    if outcome.kind is Kind.TIMEOUT and ours and proposer.patience(candidate) == 1.0:
        again = f"{outcome.reason}; it is tried again with twice the time"
        outcome = dataclasses.replace(outcome, kind=Kind.INTERRUPTED, reason=again)
    return outcome
