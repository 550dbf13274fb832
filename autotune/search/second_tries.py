"""Retry failures once before they count against a candidate: time limits, and host OOM in parallel trials."""

from __future__ import annotations

import dataclasses

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Source
from autotune.search.crew import Crew
from autotune.search.proposer import Proposer
from autotune.units import format_duration


def excused(candidate: Candidate, outcome: Outcome, limit: float | None, proposer: Proposer, crew: Crew) -> Outcome:
    """Return the outcome, marked as interrupted if the trial is retried.

    A time limit may have been too short, and host OOM may come from trials that ran in parallel. The retry has twice
    the time, or runs alone, and its outcome counts.

    Args:
        candidate: the candidate.
        outcome: the trial's outcome.
        limit: the trial's limit in seconds; None if the budget or the user ended it.
        proposer: knows the candidate's earlier timeouts.
        crew: knows the parallel trials.
    """
    if outcome.kind is Kind.INTERRUPTED and outcome.source is Source.BUDGET and limit:
        why = f"took over {format_duration(limit)}, far more than what similar trials took"
        outcome = dataclasses.replace(
            outcome, kind=Kind.TIMEOUT, reason=why, evidence="deadline of the trial", source=Source.LIMIT
        )
    if outcome.kind is Kind.OOM_HOST and crew.set_apart(candidate):
        again = f"{outcome.reason}, while others ran beside it; it is tried again alone"
        outcome = dataclasses.replace(outcome, kind=Kind.INTERRUPTED, reason=again, capacity_bytes=None)
    ours = outcome.source in (Source.LIMIT, Source.SILENCE)  # more time does not help against other causes
    if outcome.kind is Kind.TIMEOUT and ours and proposer.patience(candidate) == 1.0:
        again = f"{outcome.reason}; it is tried again with twice the time"
        outcome = dataclasses.replace(outcome, kind=Kind.INTERRUPTED, reason=again)
    return outcome
