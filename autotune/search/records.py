"""Records of a study's trials: candidate, reason and outcome."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import optuna

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Source

AS_IS = "the script as it is"  # note of the trial of the script's own config
SEARCH, VERIFY, RESUME = "search", "verify", "resume"  # roles of trials; RESUME continues from a checkpoint
TRAINING = "training"  # recorded by `autotune.recovery.callback`

# Names of trial attributes.
CANDIDATE, ROLE, OUTCOME, TUNER = "candidate", "role", "outcome", "tuner"
CLAIM = "claim"  # candidate of a tuner's unconfirmed claim
LEFT = "left"  # outcome of a trial that another tuner closed


@dataclass(frozen=True)
class Record:
    """A trial of the study as stored."""

    number: int
    candidate: Candidate
    outcome: Outcome | None  # None while the trial runs
    role: str  # SEARCH, VERIFY, RESUME or TRAINING
    note: str = ""  # reason for the trial
    tuner: str | None = None  # tuner's name; None in studies of version 0.1


def resumed_peak_bytes(records: list[Record], candidate: Candidate) -> int | None:
    """Return the peak of a rank in the candidate's latest resume trial, in bytes; None unless that trial succeeded."""
    found = [r.outcome for r in records if r.role == RESUME and r.candidate == candidate and r.outcome]
    return found[-1].peak_bytes if found and found[-1].ok else None


def found_running(records: list[Record]) -> set[tuple[Candidate, str]]:
    """Return (candidate, role) of trials during which a tuner died and that have not ended since."""
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
    """Return the outcome of a trial whose tuner died.

    The trial may have killed its tuner: a container or a Slurm step is killed as a whole when its memory is full. After
    a second death the trial is taken for the cause, so that the study can continue.

    Args:
        deadly: True after the second death.
    """
    why = "the tuner's process ended twice while it ran: it may have taken all of main memory"
    return Outcome(
        Kind.OOM_HOST if deadly else Kind.INTERRUPTED,
        reason=why if deadly else "the tuner's process ended meanwhile",
        evidence="found running",
        source=Source.DEATH,
    )


# Outcome of a trial whose tuner lost its lease or ended normally. The candidate is not at fault.
LET_GO = Outcome(
    Kind.INTERRUPTED, reason="its tuner was not heard of any more", evidence="left behind", source=Source.STOP
)


def record_of(trial: optuna.trial.FrozenTrial, *, claims: bool = False) -> Record | None:
    """Return a trial's Record; None for a trial of another program or an unconfirmed claim.

    Args:
        trial: the trial.
        claims: include unconfirmed claims of running trials.
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
    """Cache of the records of a study's trials. Finished trials are parsed once, because they never change."""

    def __init__(self) -> None:
        self._finished: dict[int, Record | None] = {}  # by trial number

    def of(self, trials: Iterable[optuna.trial.FrozenTrial]) -> list[Record]:
        """Return the records of these trials in order, without trials of other programs."""
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
    """Disable garbage collection while thousands of trials are read.

    Reading creates about a million objects that are all kept. Repeated scans by the collector double the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
