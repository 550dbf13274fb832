"""CPUs that this process may use: the machine's, limited by CPU affinity and cgroup quotas.

`os.cpu_count()` ignores both limits: in a container of 8 CPUs on a machine of 128 it returns 128.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")  # mount point under systemd, Docker and Kubernetes


def usable_cpus() -> int:
    """Return the number of CPUs whose time this process can have, at least 1."""
    shares = [share for folder in _folders() if (share := _share(folder)) is not None]
    return max(1, int(min([float(len(os.sched_getaffinity(0))), *shares])))


def threads_per_rank(ranks: int) -> int:
    """Return the CPU threads of each of `ranks` ranks of this machine: OMP_NUM_THREADS if set, else an equal share of the CPUs.

    torchrun and `accelerate launch` give each of several ranks one thread unless that variable is set. Every printed command
    therefore sets it.
    """
    own = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list sets the threads of nested levels
    if own.isdigit() and int(own) > 0:
        return int(own)
    return max(1, usable_cpus() // ranks)


def threads_of_0_1(ranks: int) -> int:
    """Return the CPU threads of a rank under version 0.1, whose studies do not record them."""
    return max(1, min(8, (os.cpu_count() or 1) // ranks))


def _folders() -> Iterator[Path]:
    """Yield the folders of this process's CPU cgroup and of all visible ancestors.

    In a container the file may name a path of the host, which does not exist inside. Then the mount is the container's own
    cgroup.
    """
    lines = []
    with suppress(OSError):
        lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = CGROUPS / controllers  # version 2 names no controllers and is mounted at the top
        own = mount / path.strip("/")
        for folder in (own, *own.parents) if own.is_dir() else (mount,):
            if folder.is_relative_to(mount):
                yield folder


def _share(folder: Path) -> float | None:
    """Return the quota of a cgroup in CPUs, or None.

    Source: Linux, admin-guide/cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst (`cpu.cfs_quota_us`, -1 for none).
    """
    with suppress(OSError, ValueError):
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip() for name in ("quota", "period")
            )
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None
