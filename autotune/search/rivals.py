"""Select the trials that a winner is compared with: those of the space of the latest call."""

from __future__ import annotations

from collections.abc import Collection

from autotune.problem.candidate import Candidate
from autotune.search.attributes import set_attribute
from autotune.search.records import Record
from autotune.search.study import StudyStore

_ASIDE = "set aside"  # trial numbers


def set_aside(store: StudyStore, candidates: Collection[Candidate]) -> str:
    """Store the trials of measured candidates outside this call's space.

    Returns:
        A line for the user; empty if there are none.
    """
    numbers = [record.number for record in store.records() if record.candidate in candidates]
    if numbers != store.attributes.get(_ASIDE, []):
        set_attribute(store.study, _ASIDE, numbers)
    if not candidates:
        return ""
    they = "1 measured candidate is" if len(candidates) == 1 else f"{len(candidates)} measured candidates are"
    return f"{they} not in this call's space: what they taught counts, and they cannot win"


def rivals(store: StudyStore) -> list[Record]:
    """Return the study's trials without those outside the latest call's space."""
    aside = set(store.attributes.get(_ASIDE, ()))
    return [record for record in store.records() if record.number not in aside]
