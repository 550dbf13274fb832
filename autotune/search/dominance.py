"""Find candidates that need at least as much device memory as a failed one, by rules that hold for every model.

Some settings that look thriftier need more memory. The following cases were seen on measured tables or in DeepSpeed's
source and are therefore no rules:

- Stage 2 may need more than stage 1: with large buckets, or in 32 bits on one rank.
- On CPU ranks, whose host and device are one, offloading needs more memory. At stage 2, malloc may keep more for many
  small micro-batches than a few larger ones need (the table of the encoder's script).
- An offloaded optimizer stages a whole gradient on its way to the host. If many ranks share the optimizer states, the
  gradient is larger than the states.
- Stage 1 keeps gradients that are larger than its bucket in place, so a larger bucket may need less.
- Overlap uses a second bucket only at stages 1 and 2. On CPU ranks, peaks vary by about one bucket between
  measurements.
- A split optimizer keeps whole sub-groups on the device, so larger sub-groups may leave fewer there.
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
# Settings that save memory. Expandable segments have fewer holes than segments of fixed size.
_SPARES = {
    CHECKPOINTING: (True,),
    "offload_optimizer": ("cpu", "nvme"),
    "offload_param": ("cpu", "nvme"),
    EXPANDABLE: (True,),
}
# Bytes per parameter for master weights and Adam's states; other optimizers have at most as much. Bytes per element of
# a gradient on its way to the host.
_STATES, _STAGED = 12.0, 4.0


@dataclass(frozen=True)
class Rules:
    """Rules that hold for a job on a machine."""

    spared_by: tuple[str, ...] = OFFLOADING  # kinds of offloading that always save device memory
    counts_steps: bool = False  # True if stage 2 may need less with fewer accumulation steps
    overlap_doubles: bool = True  # True if the second bucket exceeds the variation of peaks

    @classmethod
    def of(cls, device: str, ranks: int = 1, trace: Trace | None = None) -> Rules:
        """Return the rules of a device, "cuda" or "cpu".

        Args:
            device: the device.
            ranks: number of ranks.
            trace: the model's trace; None if its sizes are unknown.
        """
        if device != "cuda":
            return cls((), counts_steps=True, overlap_doubles=False)
        states = _STATES * sum(trace.parameters) / ranks if trace else 0.0
        return cls(OFFLOADING if trace and states / 2 > _STAGED * trace.largest else ("offload_param",))


EVERY_RULE = Rules()


class Dominance:
    """Compare the memory need of one candidate with all others at once.

    Each stage has its own buffers, so candidates of different stages are not compared. Knobs that may raise or lower
    memory must be equal.
    """

    def __init__(self, candidates: Sequence[Candidate], rules: Rules = EVERY_RULE) -> None:
        self._index = {candidate: i for i, candidate in enumerate(candidates)}
        spares = {name: kinds for name, kinds in _SPARES.items() if name not in OFFLOADING or name in rules.spared_by}
        handled = {*MORE_IS_MORE, *spares, ACCUMULATION, "overlap_comm"}  # the stage stays among the other knobs
        handled |= {OFFLOAD_RATIO} if "offload_optimizer" in spares else set()
        self._rules = rules
        self._stage = np.array([c.stage for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        # -1 if the candidate lacks the knob: DeepSpeed's default or the user's config decides
        self._more = {name: np.array([float(c.get(name, -1)) for c in candidates]) for name in MORE_IS_MORE}
        # number of the saving setting; 0 if the candidate does not save
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
        """Return whether each candidate needs at least as much memory as the given one, (n,).

        All values are False if the given candidate is not in the list.
        """
        at = self._index.get(candidate)
        if at is None:
            return np.zeros(len(self._stage), dtype=bool)
        found = self._others == self._others[at]  # the other knobs include the stage
        # accumulation may need its own gradient buffer
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
        """Return whether each candidate offloads at most the share of the one at `at`, (n,).

        A split optimizer keeps whole sub-groups on the device, rounded down. Shares are therefore compared only between
        equal sub-group sizes.
        """
        groups, mine = self._more["sub_group_size"], self._leaves[at]
        comparable = (groups == groups[at]) | (mine == 1) | (self._leaves == 0)
        return np.asarray((self._leaves <= mine) & comparable)


class HostDominance:
    """Compare the host memory of candidates.

    A candidate needs at least as much under three conditions. The stage is the same, at least the same parts are
    offloaded to the same places, and the memory bill counts no fewer bytes. Micro-batches and buckets are on the device
    and do not matter.

    Args:
        candidates: the candidates.
        host: (n,) bytes in host memory; 0 if nothing is offloaded, which excludes the candidate from comparison.
    """

    def __init__(self, candidates: Sequence[Candidate], host: Floats) -> None:
        self._index = {candidate: i for i, candidate in enumerate(candidates)}
        self._host, self._stage = host, np.array([c.stage for c in candidates])
        self._where = [np.array([str(c.get(name, "none")) for c in candidates]) for name in OFFLOADING]

    def needs_no_less(self, candidate: Candidate) -> Flags:
        """Return whether each candidate needs at least as much host memory as the given one, (n,).

        All values are False if the given candidate offloads nothing.
        """
        at = self._index.get(candidate)
        if at is None or self._host[at] <= 0:
            return np.zeros(len(self._stage), dtype=bool)
        found = (self._stage == self._stage[at]) & (self._host >= self._host[at])
        for where in self._where:
            found &= (where == where[at]) | (where[at] == "none")
        return np.asarray(found)


def _leaves(candidate: Candidate) -> float:
    """Return the requested share of the optimizer that goes to the host."""
    return float(candidate.get(OFFLOAD_RATIO, 1.0)) if candidate.offload_optimizer != "none" else 0.0
