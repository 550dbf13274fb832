"""A study's trials as records: what was tried, why, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome

AS_IS = "the script as it is"  # the note of the trial of its own config
SEARCH, VERIFY, RESUME = "search", "verify", "resume"  # a trial's roles; the last: it goes on from a checkpoint
TRAINING = "training"  # recorded by `autotune.recovery.callback`
FOUND_RUNNING = "found running"  # the evidence of a trial whose tuner was gone


@dataclass(frozen=True)
class Record:
    """A trial of the study as stored."""

    number: int
    candidate: Candidate
    outcome: Outcome | None  # None while it runs
    role: str  # SEARCH, VERIFY, RESUME or TRAINING
    note: str = ""  # why it was tried


def resumed_peak_bytes(records: list[Record], candidate: Candidate) -> int | None:
    """The highest memory of a rank that went on from a checkpoint of the candidate's; None where none has."""
    found = [r.outcome for r in records if r.role == RESUME and r.candidate == candidate and r.outcome]
    return found[-1].peak_bytes if found and found[-1].ok else None


def found_running(records: list[Record]) -> set[tuple[Candidate, str]]:
    """(candidate, role) of trials during which a tuner ended, and which have not come to an end of their own since."""
    found: set[tuple[Candidate, str]] = set()
    for record in records:
        if record.outcome is None:
            continue
        if record.outcome.evidence == FOUND_RUNNING:
            found.add((record.candidate, record.role))
        elif record.outcome.kind is not Kind.INTERRUPTED:
            found -= {(record.candidate, role) for role in (SEARCH, VERIFY, RESUME)}
    return found


def record_of(trial: optuna.trial.FrozenTrial) -> Record | None:
    knobs = trial.user_attrs.get("candidate")
    if knobs is None:
        return None
    stored = trial.user_attrs.get("outcome")
    return Record(
        trial.number,
        Candidate(tuple(sorted(knobs.items()))),
        Outcome.from_json(stored) if stored else None,
        trial.user_attrs.get("role", SEARCH),
        trial.user_attrs.get("note", ""),
    )
