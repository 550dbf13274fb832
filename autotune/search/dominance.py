"""Which candidates need at least as much device memory as one that ran out, by rules that hold for every model.

Memory is not monotone in every setting that looks thriftier. What was seen, on real tables or in DeepSpeed's sources, and is
therefore no rule:

- Stage 2 may need more than stage 1: with large buckets, or in 32 bits on one rank.
- On CPU ranks, whose host and device are one, offloading needs more; and at stage 2 malloc may keep more of many small
  micro-batches than a few larger ones need (the table of the encoder's script).
- An offloaded optimizer has a whole gradient staged on its way out: more than its states are where many ranks share them.
- Stage 1 keeps gradients that are larger than its bucket in place, so that a larger bucket may need less.
- Overlap takes a second bucket at stages 1 and 2 alone; on CPU ranks peaks repeat no better than by that bucket.
- Of an optimizer that is split, whole sub-groups stay on the device: larger ones may leave fewer there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.predict.passes import Trace
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, EXPANDABLE, MICRO_BATCH, Candidate
from autotune.problem.knobs import OFFLOAD_RATIO, OFFLOADING

MORE_IS_MORE = (MICRO_BATCH, "reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
# settings that spare memory; segments that grow have fewer holes than those that were cut once
_SPARES = {
    CHECKPOINTING: (True,),
    "offload_optimizer": ("cpu", "nvme"),
    "offload_param": ("cpu", "nvme"),
    EXPANDABLE: (True,),
}
# Bytes a parameter of masters and Adam's states, of which fewer optimizers have less; and of a gradient on its way to the host
_STATES, _STAGED = 12.0, 4.0


@dataclass(frozen=True)
class Rules:
    """Which rules hold for a job on a machine."""

    spared_by: tuple[str, ...] = OFFLOADING  # the kinds of offloading that surely spare memory of the device
    counts_steps: bool = False  # whether stage 2 may need less where it accumulates less
    overlap_doubles: bool = True  # whether the second bucket of stages 1 and 2 is more than what peaks repeat within

    @classmethod
    def of(cls, device: str, ranks: int = 1, trace: Trace | None = None) -> Rules:
        """Those of a device, "cuda" or "cpu".

        Args:
            trace: of the model; None: nothing is known of its sizes.
        """
        if device != "cuda":
            return cls((), counts_steps=True, overlap_doubles=False)
        states = _STATES * sum(trace.parameters) / ranks if trace else 0.0
        return cls(OFFLOADING if trace and states / 2 > _STAGED * trace.largest else ("offload_param",))


EVERY_RULE = Rules()


class Dominance:
    """Compares one candidate with all others at once. Those of other stages are not compared, for each has buffers of its own.
    Knobs that may raise or lower memory must be equal.
    """

    def __init__(self, candidates: Sequence[Candidate], rules: Rules = EVERY_RULE) -> None:
        self._index = {candidate: i for i, candidate in enumerate(candidates)}
        spares = {name: kinds for name, kinds in _SPARES.items() if name not in OFFLOADING or name in rules.spared_by}
        handled = {*MORE_IS_MORE, *spares, ACCUMULATION, "overlap_comm"}  # not the stage
        handled |= {OFFLOAD_RATIO} if "offload_optimizer" in spares else set()
        self._rules = rules
        self._stage = np.array([c.stage for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        # what a candidate leaves open DeepSpeed or the user's own config decides
        self._more = {name: np.array([float(c.get(name, -1)) for c in candidates]) for name in MORE_IS_MORE}
        # how memory is spared; 0 where it is not
        self._spares = [
            np.array([kinds.index(c.get(name)) + 1 if c.get(name) in kinds else 0 for c in candidates])
            for name, kinds in spares.items()
        ]
        self._leaves = np.array([_leaves(c) for c in candidates])
        self._overlap = np.array([{True: 1.0, False: 0.0}.get(c.get("overlap_comm"), -1.0) for c in candidates])
        others: dict[tuple[object, ...], int] = {}
        self._others = np.array(
            [
                others.setdefault(tuple(item for item in c.knobs if item[0] not in handled), len(others))
                for c in candidates
            ]
        )

    def needs_no_less(self, candidate: Candidate) -> Flags:
        """(n,) whether each needs at least as much as the candidate, which must be one of them; all false if it is not."""
        at = self._index.get(candidate)
        if at is None:
            return np.zeros(len(self._stage), dtype=bool)
        found = self._others == self._others[at]  # the stage among them
        # accumulating may need a gradient buffer of its own
        found &= (self._accumulation == self._accumulation[at]) | (self._accumulation > 1)
        if self._rules.counts_steps and self._stage[at] == 2:
            found &= self._accumulation >= self._accumulation[at]
        for name, more in self._more.items():
            keeps = name == "reduce_bucket_size" and self._stage[at] == 1
            found &= more == more[at] if keeps or more[at] < 0 else more >= more[at]
        for spares in self._spares:
            found &= (spares == 0) | (spares == spares[at])
        found &= self._offloads_no_more(at)
        doubles = self._rules.overlap_doubles and self._stage[at] in (1, 2)
        found &= (self._overlap == self._overlap[at]) | (doubles & (self._overlap == 1.0))
        return np.asarray(found)

    def _offloads_no_more(self, at: int) -> Flags:
        """Of an optimizer that is split whole sub-groups stay, rounded down: shares are compared where sub-groups are equal."""
        groups, mine = self._more["sub_group_size"], self._leaves[at]
        comparable = (groups == groups[at]) | (mine == 1) | (self._leaves == 0)
        return np.asarray((self._leaves <= mine) & comparable)


class HostDominance:
    """The same of the host's memory: of one stage, those that offload all that a candidate does to where it does and, by the
    bill, no fewer bytes. Micro-batches and buckets of the device do not matter.

    Args:
        host: (n,) bytes; 0: nothing is offloaded, and the host's memory says nothing of the candidate.
    """

    def __init__(self, candidates: Sequence[Candidate], host: Floats) -> None:
        self._index = {candidate: i for i, candidate in enumerate(candidates)}
        self._host, self._stage = host, np.array([c.stage for c in candidates])
        self._where = [np.array([str(c.get(name, "none")) for c in candidates]) for name in OFFLOADING]

    def needs_no_less(self, candidate: Candidate) -> Flags:
        """(n,) whether each needs at least as much of the host as the candidate; all false where that offloads nothing."""
        at = self._index.get(candidate)
        if at is None or self._host[at] <= 0:
            return np.zeros(len(self._stage), dtype=bool)
        found = (self._stage == self._stage[at]) & (self._host >= self._host[at])
        for where in self._where:
            found &= (where == where[at]) | (where[at] == "none")
        return np.asarray(found)


def _leaves(candidate: Candidate) -> float:
    """The share of the optimizer that goes to the host, as it was asked for."""
    return float(candidate.get(OFFLOAD_RATIO, 1.0)) if candidate.offload_optimizer != "none" else 0.0
