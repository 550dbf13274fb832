"""Failures that engines of one stage, one kind of offloading or the like have in common: hangs, signals, a host that is full.

One such failure says something of its engine alone. What several of them share is blamed, and nothing wider than that; the more
is to be ruled out, the more engines must have failed, and none of it may have worked. Failures of engines that all offload, be
it the optimizer or the parameters, may be the host's or an op's: they say nothing of those that offload nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Flags
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.knobs import FIRST_ORDER

LEAST_FAILED = 2  # engines alike in all of these knobs; one more for each in which they are not
_KNOBS = tuple(name for name in FIRST_ORDER if name not in (MICRO_BATCH, ACCUMULATION))


class Places:
    """The first-order settings of engines, and which of them failed."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        columns = []
        for name in _KNOBS:
            values = [candidate.get(name) for candidate in candidates]
            kinds = {value: i for i, value in enumerate(dict.fromkeys(values))}
            if len(kinds) > 1:
                columns.append([kinds[value] for value in values])
        self._settings = np.array(columns, dtype=np.intp).T.reshape(len(candidates), len(columns))
        self._offloads = np.array([bool(c.offloaded) for c in candidates])
        self._worked = np.zeros(len(candidates), dtype=bool)
        self._failed: dict[int, int] = {}  # engine: the place of one of its candidates

    def work(self, at: int) -> None:
        """The candidate at this place has worked."""
        self._worked[at] = True

    def fail(self, at: int, engine: int) -> Flags:
        """The candidate at this place has failed: (n,) what failures have in common with it and nothing that worked has."""
        self._failed.setdefault(engine, at)
        places = list(self._failed.values())
        failed, blamed = self._settings[places], np.zeros(len(self._worked), dtype=bool)
        width = self._settings.shape[1]
        for size in range(width + 1):
            for shared in map(list, itertools.combinations(range(width), size)):
                sharing = (failed[:, shared] == self._settings[at, shared]).all(axis=1)
                same = failed[sharing]
                common = (same == same[0]).all(axis=0)  # of a narrower cause this one says nothing
                if len(same) < LEAST_FAILED + width - size or int(common.sum()) > size:
                    continue
                alike = (self._settings[:, shared] == self._settings[at, shared]).all(axis=1)
                if self._offloads[places][sharing].all():
                    alike &= self._offloads
                if not (alike & self._worked).any():
                    blamed |= alike
        return blamed
