"""Apply verification results to the search. Evaluation, save and resume use memory that no search trial uses."""

from __future__ import annotations

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome
from autotune.search.proposer import Proposer
from autotune.search.standings import NOT_VERIFIED, Measured, Standings, held_bytes


def teach(
    candidate: Candidate, outcome: Outcome, searched: Measured | None, standings: Standings, proposer: Proposer
) -> None:
    """Update proposer and standings after a verification or resume trial. The standings already contain the outcome.

    Args:
        candidate: the verified candidate.
        outcome: outcome of the verification.
        searched: the candidate's earlier measurement; None if there is none.
        standings: the measured candidates.
        proposer: the proposer.
    """
    why = standings.why_not(candidate)
    if not why:
        proposer.settle(candidate, standings.verified[candidate][1].samples_per_second)
    if why in ("", NOT_VERIFIED):
        return
    standings.reject(candidate, why)
    proposer.drop(candidate)
    verified = outcome.measurement
    if verified is None and not outcome.kind.is_oom:  # a hang or a crash says nothing about other candidates
        return
    over = verified is not None and verified.peak_bytes > proposer.hardware.ceiling_bytes
    # an OOM and allocator retries show only that the peak was too high
    share = proposer.hardware.ceiling_bytes / verified.peak_bytes if verified is not None and over else 1.0
    proposer.tighten(candidate, outcome, searched[1] if searched else None, share)
    if verified is None:
        standings.doubt(proposer.needing_no_less(candidate, outcome.kind))
    if searched is not None and outcome.kind is not Kind.OOM_HOST:
        standings.doubt_stage(candidate.stage, share * held_bytes(searched[1]))
    for other in filter(standings.is_doubted, list(proposer.speed)):
        proposer.drop(other)
