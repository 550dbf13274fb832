"""Check that the nodes of a job are alike. All differences are reported in one line before anything starts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import UserError
from autotune.problem.hardware import Hardware

MOST_CLOCK_SECONDS = 30.0  # seconds of clock difference; caches, leases and checkpoints depend on times


def check_alike(names: Sequence[str], greetings: Sequence[Mapping[str, Any]], version: str, protocol: int) -> None:
    """Check that every node has the tuner's version of this package.

    Raises:
        UserError: a node has another version.
    """
    for name, said in zip(names, greetings, strict=True):
        if (said["version"], said["protocol"]) != (version, protocol):
            raise UserError(
                f"node {name} has autotune {said['version']}, and this machine {version}: install the same on every node"
            )


def check_versions_and_clocks(
    names: Sequence[str], surveys: Sequence[Mapping[str, Any]], ours: Mapping[str, str | None], now: Sequence[float]
) -> None:
    """Check that all nodes have the same driver and devices, this machine's packages, and a matching clock.

    Args:
        names: the nodes' names.
        surveys: the nodes' surveys.
        ours: versions on this machine, which predicts and writes configs.
        now: this machine's clock at the arrival of each survey, in seconds since the epoch.

    Raises:
        UserError: nodes differ; one line with all differences.
    """
    differing = []
    devices = [{**one["versions"], "device": one["hardware"]["name"]} for one in surveys]
    for what in sorted({key for one in devices for key in one}):
        found = [one.get(what) for one in devices]
        usual = ours[what] if what in ours else Counter(found).most_common(1)[0][0]
        whose = "this machine has" if what in ours else "the others have"
        others = [f"{name} has {value or 'none'}" for name, value in zip(names, found, strict=True) if value != usual]
        if others:
            differing.append(f"{what}: {', '.join(others)} where {whose} {usual or 'none'}")
    for name, one, here in zip(names, surveys, now, strict=True):
        apart = float(one["clock"]) - here
        if abs(apart) > MOST_CLOCK_SECONDS:
            differing.append(f"clock: {name}'s is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}")
    if differing:
        raise UserError(f"the nodes differ: {'; '.join(differing)}; make them alike, or --exclude those that are not")


def combined(parts: Sequence[Hardware], threads: int) -> Hardware:
    """Return the hardware of all nodes together. The node with the least memory determines the capacity.

    Args:
        parts: the hardware of each node.
        threads: CPU threads per rank.
    """
    first = parts[0]
    free = min(part.memory_bytes - part.taken_bytes for part in parts)
    memory = min(part.memory_bytes for part in parts)
    return dataclasses.replace(
        first,
        count=sum(part.count for part in parts),
        nodes=len(parts),
        memory_bytes=memory,
        taken_bytes=max(0, memory - free),
        host_memory_bytes=min(part.host_memory_bytes for part in parts),
        gpus=tuple(gpu for part in parts for gpu in part.gpus),
        threads=threads,
    )
