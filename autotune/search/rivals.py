"""What a winner is compared with: the trials of the space that the latest call searched."""

from __future__ import annotations

from collections.abc import Collection

from autotune.problem.candidate import Candidate
from autotune.search.attributes import set_attribute
from autotune.search.records import Record
from autotune.search.study import StudyStore

_ASIDE = "set aside"  # numbers of trials


def set_aside(store: StudyStore, candidates: Collection[Candidate]) -> str:
    """Stores which measured candidates the present call's space does not have; returns a line for people, empty where it has
    them all."""
    numbers = [record.number for record in store.records() if record.candidate in candidates]
    if numbers != store.attributes.get(_ASIDE, []):
        set_attribute(store.study, _ASIDE, numbers)
    if not candidates:
        return ""
    they = "1 measured candidate is" if len(candidates) == 1 else f"{len(candidates)} measured candidates are"
    return f"{they} not in this call's space: what they taught counts, and they cannot win"


def rivals(store: StudyStore) -> list[Record]:
    """The study's trials without those that were set aside."""
    aside = set(store.attributes.get(_ASIDE, ()))
    return [record for record in store.records() if record.number not in aside]
