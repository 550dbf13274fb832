"""Find settings that failed engines have in common: hangs, signals and host OOM.

A single failure excludes only its engine. If several engines fail, their shared settings are excluded, and nothing
wider. A wider exclusion requires more failed engines, and no candidate in it may have worked. If all failed engines
offload the optimizer or the parameters, the host or an op may be the cause. Candidates without offloading then stay
open.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Flags
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.knobs import FIRST_ORDER

LEAST_FAILED = 2  # failed engines that agree in all of these knobs; one more for each knob in which they differ
_KNOBS = tuple(name for name in FIRST_ORDER if name not in (MICRO_BATCH, ACCUMULATION))


class Places:
    """First-order settings of engines, and the failed ones among them."""

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
        self._failed: dict[int, int] = {}  # engine -> place of one of its candidates

    def work(self, at: int) -> None:
        """Record that the candidate at this place has worked."""
        self._worked[at] = True

    def fail(self, at: int, engine: int) -> Flags:
        """Record a failure of the candidate at this place.

        Returns:
            (n,) candidates with the settings that this failure shares with others and that no working candidate has.
        """
        self._failed.setdefault(engine, at)
        places = list(self._failed.values())
        failed, blamed = self._settings[places], np.zeros(len(self._worked), dtype=bool)
        width = self._settings.shape[1]
        for size in range(width + 1):
            for shared in map(list, itertools.combinations(range(width), size)):
                sharing = (failed[:, shared] == self._settings[at, shared]).all(axis=1)
                same = failed[sharing]
                # the failures share more than `shared`, so a narrower cause explains them
                common = (same == same[0]).all(axis=0)
                if len(same) < LEAST_FAILED + width - size or int(common.sum()) > size:
                    continue
                alike = (self._settings[:, shared] == self._settings[at, shared]).all(axis=1)
                if self._offloads[places][sharing].all():
                    alike &= self._offloads
                if not (alike & self._worked).any():
                    blamed |= alike
        return blamed
