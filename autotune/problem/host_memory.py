"""Main memory available to this process: the machine's, limited by every cgroup above the process.

The effective limit is set in the process's own cgroup or in any ancestor, not at the root of `/sys/fs/cgroup`. Examples are
Slurm's steps, systemd's slices and containers without a cgroup namespace. Without a limit the machine's memory counts. Swap never
counts: pinned memory cannot be swapped, and a step that swaps is too slow to be useful.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.util.linux import main_memory

PROC = Path("/proc/self")


@dataclass(frozen=True)
class _Controller:
    """File names of one version of cgroups: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst."""

    limits: tuple[str, ...]  # above `high` the kernel does not kill, but slows the group to a crawl
    used: str
    reclaimable: tuple[str, str]  # lines of memory.stat: cached files, which the kernel reclaims
    inherited: str  # line of memory.stat: the tightest limit above, including groups that a container does not see
    events: str  # file that counts the kernel's kills


_V1 = _Controller(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
    "hierarchical_memory_limit",
    "memory.oom_control",
)
_V2 = _Controller(
    ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"), "", "memory.events"
)
_VERSIONS = {"cgroup": _V1, "cgroup2": _V2}  # by file system


def host_total_bytes() -> int:
    """Return the bytes of the machine's main memory, or the tightest limit of a cgroup above this process."""
    machine = main_memory().total
    return min([machine, *(limit for limit, _ in _limited(machine))])


def host_available_bytes() -> int:
    """Return the bytes that this process may still take before the kernel kills it.

    They are the machine's available memory, or the least that a limited cgroup above this process has left. Cached files count as
    free, as they do in the machine's own figure.
    """
    machine = main_memory()
    return max(0, min([machine.available, *(limit - used for limit, used in _limited(machine.total))]))


def kernel_oom_kills() -> int:
    """Return the number of processes that the kernel killed for lack of memory.

    The counter is that of the process's own cgroup, else that of the machine.
    """
    events = (folder / _VERSIONS[filesystem].events for folder, filesystem in cgroup_folders("memory"))
    for file in (*events, Path("/proc/vmstat")):
        for line in _lines(file):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _limited(machine_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of every cgroup above this process with less memory than the machine.

    Cached files that the kernel would reclaim do not count as used.
    """
    for folder, filesystem in cgroup_folders("memory"):
        controller = _VERSIONS[filesystem]
        limits = [_number(line) for file in controller.limits for line in _lines(folder / file)]
        # Version 1 writes "no limit" as a number above any machine's memory, version 2 as a word.
        limit = min(limits, default=math.inf)
        # Reading memory.stat makes the kernel sum the counts of all CPUs, so that it is read only if needed.
        if controller.inherited or limit < machine_bytes:
            stat = dict(line.partition(" ")[::2] for line in _lines(folder / "memory.stat"))
            limit = min(limit, _number(stat.get(controller.inherited, "")))
        if limit < machine_bytes:
            used = sum(_number(line) for line in _lines(folder / controller.used))
            yield int(limit), int(used - sum(_number(stat.get(line, "0")) for line in controller.reclaimable))


@functools.cache
def cgroup_folders(controller: str) -> tuple[tuple[Path, str], ...]:
    """Return the folders of this process's cgroup and of all visible ancestors, with their file system (`cgroup`, `cgroup2`).

    They do not change during the life of a process.

    Args:
        controller: `memory` or `cpu`.
    """
    paths = _paths(controller)
    found: list[tuple[Path, str]] = []
    for filesystem, mount, root in _mounts(controller):
        path = paths.get(filesystem)
        if path is None:
            continue
        # Inside a container the mount shows only the hierarchy below `root`. A path outside of it is relative to the namespace's
        # root.
        inner = path[len(root) :] if root != "/" and path.startswith(root) else path
        own = mount if inner.startswith("/..") else mount / inner.strip("/")
        own = own if own.is_dir() else mount
        found += [(folder, filesystem) for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    return tuple(found)


def _paths(controller: str) -> dict[str, str]:
    """Return a mapping from the file system of each cgroup version to this process's path in the controller's hierarchy."""
    found = {}
    for line in _lines(PROC / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found["cgroup2"] = path
        elif controller in controllers.split(","):
            found["cgroup"] = path
    return found


def _mounts(controller: str) -> Iterator[tuple[str, Path, str]]:
    """Yield (file system, mount point, mounted part of the hierarchy). Source: proc(5), /proc/pid/mountinfo."""
    for line in _lines(PROC / "mountinfo"):
        mounted, _, kind = line.partition(" - ")
        filesystem, _, options = kind.split(" ", 2)
        root, mount = mounted.split(" ")[3:5]
        if filesystem == "cgroup2" or (filesystem == "cgroup" and controller in options.split(",")):
            yield filesystem, Path(mount), root


def _number(text: str) -> float:
    return int(text) if text.strip().isdigit() else math.inf


def _lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(encoding="utf-8").splitlines()
    return []
