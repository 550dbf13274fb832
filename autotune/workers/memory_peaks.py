"""Memory peaks of a group's ranks, sampled by the tuner, and their merge over nodes. A rank imports this module, too."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.util.units import MIB

FOREIGN_BYTES = 256 * MIB  # minimum growth of other processes that counts as GPU contention


@dataclass
class MemoryPeaks:
    """Highest values since the last reset, in bytes. Lists have one entry per rank."""

    used: list[int] = field(default_factory=list)  # bytes of the rank's process; 0 if not visible
    grown: dict[int, int] = field(default_factory=dict)  # rank -> growth of its whole GPU since before the launch
    foreign: int = 0  # growth of other processes on a device since the study began
    neighbours: str = ""  # description of these processes for people
    lost: str = ""  # description of a GPU that is gone
    host_low: int = 2**62  # least main memory available to this process and its ranks
    oom_kills: int = 0  # kernel's OOM kills since the group started

    @property
    def worst(self) -> int:
        """Bytes of the rank with the highest usage, or its GPU's growth if its process is hidden."""
        return max(self.used, default=0) or max(self.grown.values(), default=0)


def merged(parts: list[MemoryPeaks]) -> MemoryPeaks:
    """Merge the peaks of all nodes, in node order. An OOM on any node counts for the group."""
    if len(parts) == 1:
        return parts[0]
    whole = MemoryPeaks()
    for part in parts:
        before = len(whole.used)
        whole.grown |= {before + rank: bytes_ for rank, bytes_ in part.grown.items()}
        whole.used += part.used
        if part.foreign > whole.foreign:
            whole.foreign, whole.neighbours = part.foreign, part.neighbours
        whole.lost = whole.lost or part.lost
        whole.host_low = min(whole.host_low, part.host_low)
        whole.oom_kills += part.oom_kills
    return whole
