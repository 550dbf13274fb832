"""What failed before anything of a study had worked: somebody may have mended the machine or the job since."""

from __future__ import annotations

from collections.abc import Collection

from autotune.problem.outcome import Outcome
from autotune.search.attributes import set_attribute
from autotune.search.records import Record
from autotune.search.study import StudyStore

_FORGIVEN = "forgiven"  # numbers of trials


def forgiven(store: StudyStore, known: Collection[tuple[Record, Outcome]]) -> set[int]:
    """Numbers of the trials that hung or crashed and speak against nobody any more, now and in every later call: all so far,
    where a call begins before anything has worked, and no other tuner is at the study just now.

    Args:
        known: the study's trials that have an end.
    """
    numbers: set[int] = set(store.attributes.get(_FORGIVEN, ()))
    if any(outcome.ok for _, outcome in known) or store.tuners.others():
        return numbers
    found = numbers | {record.number for record, outcome in known if outcome.kind.may_be_mended}
    if found != numbers:
        set_attribute(store.study, _FORGIVEN, sorted(found))
    return found
