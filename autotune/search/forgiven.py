"""What failed before anything of a study had worked: somebody may have mended the machine or the job since."""

from __future__ import annotations

from autotune.search.attributes import set_attribute
from autotune.search.study import StudyStore

_FORGIVEN = "forgiven"  # numbers of trials


def forgiven(store: StudyStore) -> set[int]:
    """Numbers of the trials that hung or crashed and speak against nobody any more, now and in every later call: all so far,
    where a call begins before anything has worked, and no other tuner is at the study just now."""
    numbers, known = set(store.attributes.get(_FORGIVEN, ())), store.records()
    if not any(one.outcome and one.outcome.ok for one in known) and not store.tuners.others():
        found = numbers | {one.number for one in known if one.outcome and one.outcome.kind.may_be_mended}
        if found != numbers:
            set_attribute(store.study, _FORGIVEN, sorted(found))
        return found
    return numbers
