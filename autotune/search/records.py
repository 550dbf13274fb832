"""A study's trials as records: what was tried, why, and what came of it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import optuna

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Source

AS_IS = "the script as it is"  # the note of the trial of its own config
SEARCH, VERIFY, RESUME = "search", "verify", "resume"  # a trial's roles; the last: it goes on from a checkpoint
TRAINING = "training"  # recorded by `autotune.recovery.callback`

# a trial's attributes
CANDIDATE, ROLE, OUTCOME, TUNER = "candidate", "role", "outcome", "tuner"
CLAIM = "claim"  # the candidate of a tuner that has asked for it, and does not have it yet
LEFT = "left"  # the outcome of one that another tuner has closed


@dataclass(frozen=True)
class Record:
    """A trial of the study as stored."""

    number: int
    candidate: Candidate
    outcome: Outcome | None  # None while it runs
    role: str  # SEARCH, VERIFY, RESUME or TRAINING
    note: str = ""  # why it was tried
    tuner: str | None = None  # whose it is; before there were several at once nobody said


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
        if record.outcome.source is Source.DEATH:
            found.add((record.candidate, record.role))
        elif record.outcome.kind is not Kind.INTERRUPTED:
            found -= {(record.candidate, role) for role in (SEARCH, VERIFY, RESUME)}
    return found


def left_outcome(deadly: bool) -> Outcome:
    """Of a trial whose tuner was gone. What was running when a tuner died may have killed it: a container or a Slurm step ends
    as a whole when its memory is full. The second time it is taken for the cause, so that the study can go on.

    Args:
        deadly: whether it is the second time.
    """
    why = "the tuner's process ended twice while it ran: it may have taken all of main memory"
    return Outcome(
        Kind.OOM_HOST if deadly else Kind.INTERRUPTED,
        reason=why if deadly else "the tuner's process ended meanwhile",
        evidence="found running",
        source=Source.DEATH,
    )


# of a trial whose tuner may live, cut off from the others, or came to an end of its own: that speaks against no candidate
LET_GO = Outcome(
    Kind.INTERRUPTED, reason="its tuner was not heard of any more", evidence="left behind", source=Source.STOP
)


def record_of(trial: optuna.trial.FrozenTrial, *, claims: bool = False) -> Record | None:
    """A trial's Record; None where it is none of ours, or but a claim.

    Args:
        claims: what somebody has claimed counts while it runs.
    """
    knobs = trial.user_attrs.get(CANDIDATE)
    if knobs is None and claims and not trial.state.is_finished():
        knobs = trial.user_attrs.get(CLAIM)
    if knobs is None:
        return None
    stored = trial.user_attrs.get(OUTCOME)
    if stored is None and trial.state.is_finished():
        stored = trial.user_attrs.get(LEFT)
    return Record(
        trial.number,
        Candidate(tuple(sorted(knobs.items()))),
        Outcome.from_json(stored) if stored else None,
        str(trial.user_attrs.get(ROLE, SEARCH)),
        str(trial.user_attrs.get("note", "")),
        trial.user_attrs.get(TUNER),
    )


class Records:
    """Records of a study's trials, each made once: a trial that has finished never changes."""

    def __init__(self) -> None:
        self._finished: dict[int, Record | None] = {}  # by number

    def of(self, trials: Iterable[optuna.trial.FrozenTrial]) -> list[Record]:
        """The Records of these trials, in their order, without those that are none of ours."""
        return [record for trial in trials if (record := self._record(trial)) is not None]

    def _record(self, trial: optuna.trial.FrozenTrial) -> Record | None:
        if trial.number in self._finished:
            return self._finished[trial.number]
        record = record_of(trial)
        if trial.state.is_finished():
            self._finished[trial.number] = record
        return record


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: reading thousands of trials makes a million objects, all of them kept, and the collector
    would walk through them again and again: half of the time it takes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
