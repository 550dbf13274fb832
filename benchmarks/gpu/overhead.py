"""What a process takes of a GPU outside torch's allocator, as everyone who could know counts it: CUDA's total - free -
reserved, NVML's two memory calls, NVML's list of processes, and our ranks' own `overhead_bytes`.

With one rank, and with two on one GPU: NCCL refuses that on one host, so each says that it is another (NCCL_HOSTID), and
they speak over sockets. That is no figure of NVLink or of peer access.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from autotune.util.units import GIB, MIB
from benchmarks.gpu.ground import EXPECTED, Ground, Row, end_child, start_child


def run(ground: Ground) -> Iterator[Row]:
    for world in (1, 2):
        store = str(ground.folder / f"store-{world}")
        ranks = []
        for rank in range(world):
            spec = {"device": ground.device, "rank": rank, "world": world, "store": store}
            env = {"NCCL_HOSTID": uuid.uuid4().hex} if world > 1 else {}
            ranks.append(start_child("overhead_rank", spec, {**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
        for rank, process in enumerate(ranks):
            child = end_child(process, 100)
            of = {"ranks": world, "rank": rank}
            if child.result is None:
                yield {**of, "moment": "none", "why": child.stderr[-1500:], EXPECTED: False}
            for moment in child.result or []:
                yield {**of, **in_gib(moment), EXPECTED: agrees(moment, world)}


def agrees(moment: Row, world: int) -> bool | None:
    """Whether our own figure and what torch has reserved are all that the device has lost, within 5 % or 64 MiB; None where
    another rank has some of that, or somebody does not tell."""
    grown, ours = moment.get("device less free by"), moment.get("ours")
    if world > 1 or grown is None or ours is None or "reserved" not in moment:
        return None
    return bool(abs(ours + moment["reserved"] - grown) <= max(64 * MIB, 0.05 * grown))


def in_gib(moment: Row) -> Row:
    return {
        (key if key == "moment" else f"{key} GiB"): value / GIB if isinstance(value, int) else value
        for key, value in moment.items()
    }
