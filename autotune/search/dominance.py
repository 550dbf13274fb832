"""Which candidates need at least as much device memory as one that ran out, by rules that hold for every model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Flags
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, EXPANDABLE, MICRO_BATCH, Candidate

MORE_IS_MORE = (MICRO_BATCH, "reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
# settings that spare memory; segments that grow have fewer holes than those that were cut once
_SPARES = {
    CHECKPOINTING: (True,),
    "offload_optimizer": ("cpu", "nvme"),
    "offload_param": ("cpu", "nvme"),
    EXPANDABLE: (True,),
}
_HANDLED = {*MORE_IS_MORE, *_SPARES, ACCUMULATION, "overlap_comm", "zero_stage"}


class Dominance:
    """Compares one candidate with all others at once.

    Stage 1 keeps whole what stage 2 partitions, so it needs no less; other stages have buffers of their own and are not
    compared. Knobs that may raise or lower memory must be equal.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._index = {candidate: i for i, candidate in enumerate(candidates)}
        self._stage = np.array([c.stage for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        self._more = [np.array([float(c.get(name, -1)) for c in candidates]) for name in MORE_IS_MORE]
        # how memory is spared; 0 where it is not
        self._spares = [
            np.array([kinds.index(c.get(name)) + 1 if c.get(name) in kinds else 0 for c in candidates])
            for name, kinds in _SPARES.items()
        ]
        self._overlap = np.array([{True: 1.0, False: 0.0}.get(c.get("overlap_comm"), -1.0) for c in candidates])
        others: dict[tuple[object, ...], int] = {}
        self._others = np.array(
            [
                others.setdefault(tuple(item for item in c.knobs if item[0] not in _HANDLED), len(others))
                for c in candidates
            ]
        )

    def needs_no_less(self, candidate: Candidate) -> Flags:
        """(n,) whether each needs at least as much as the candidate, which must be one of them; all false if it is not."""
        at = self._index.get(candidate)
        if at is None:
            return np.zeros(len(self._stage), dtype=bool)
        same_stage = self._stage == self._stage[at]
        found = same_stage | ((self._stage == 1) & (self._stage[at] == 2))
        found &= self._others == self._others[at]
        # accumulating may need a gradient buffer of its own
        found &= (self._accumulation == self._accumulation[at]) | (self._accumulation > 1)
        for more in self._more:
            found &= more >= more[at]
        for spares in self._spares:
            found &= (spares == 0) | (spares == spares[at])
        found &= (self._overlap == self._overlap[at]) | (self._overlap == 1.0)
        return np.asarray(found)
