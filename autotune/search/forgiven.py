"""Retry failures from before a study's first success, because the user may have fixed the machine or the job since."""

from __future__ import annotations

from collections.abc import Collection

from autotune.problem.outcome import Outcome
from autotune.search.attributes import set_attribute
from autotune.search.records import Record
from autotune.search.study import StudyStore

_FORGIVEN = "forgiven"  # trial numbers


def forgiven(store: StudyStore, known: Collection[tuple[Record, Outcome]]) -> set[int]:
    """Return the numbers of retryable trials, whose hangs and crashes no longer exclude candidates.

    A call adds all retryable failures so far if no trial has succeeded and no peer tuner is active. Later calls keep
    the list.

    Args:
        store: the study.
        known: the study's ended trials.
    """
    numbers: set[int] = set(store.attributes.get(_FORGIVEN, ()))
    if any(outcome.ok for _, outcome in known) or store.tuners.others():
        return numbers
    found = numbers | {record.number for record, outcome in known if outcome.kind.may_be_mended}
    if found != numbers:
        set_attribute(store.study, _FORGIVEN, sorted(found))
    return found
