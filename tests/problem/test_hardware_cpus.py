"""How many CPUs a process may compute on, and what each rank gets of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.problem import host_memory
from autotune.problem.hardware import threads_per_rank, usable_cpus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """16 CPUs, and cgroups of both versions in a folder of the test's."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    mounts = {"": "cgroup2 cgroup rw", "cpu,cpuacct": "cgroup cgroup rw,cpu,cpuacct"}
    top = tmp_path / "mounted"
    lines = [f"35 31 0:32 / {top / at} rw - {kind}\n" for at, kind in mounts.items()]
    (tmp_path / "mountinfo").write_text("".join(lines))
    host_memory.cgroup_folders.cache_clear()
    yield tmp_path
    host_memory.cgroup_folders.cache_clear()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_affinity_counts_and_not_the_machine(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cpus() == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert usable_cpus() == 1
    assert threads_per_rank(4) == 1


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000", "a/cpu.max": "400000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),  # a container's own root
        ("0::/outside\n", {"cpu.max": "300000 100000"}, 3),  # a path that only the machine outside has
        (
            "5:cpu,cpuacct:/job\n3:memory:/job\n0::/\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "600000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            6,
        ),
        (
            "5:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            16,
        ),
        ("0::/a\n", {"a/cpu.max": "what is this"}, 16),
        ("", {}, 16),
    ],
)
def test_a_cgroups_quota_counts_and_every_one_above_it(
    machine: Path, own: str, files: dict[str, str], expected: int
) -> None:
    write(machine / "cgroup", own)
    for name, text in files.items():
        write(machine / "mounted" / name, text)
    (machine / "mounted").mkdir(exist_ok=True)
    assert usable_cpus() == expected


def test_without_cgroups_the_affinity_decides(machine: Path) -> None:
    assert usable_cpus() == 16


@pytest.mark.parametrize(("own", "ranks", "expected"), [(None, 1, 16), ("6", 3, 6), ("4,2", 3, 4), ("0", 4, 4)])
def test_the_users_own_number_stands_before_an_equal_share(
    machine: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, ranks: int, expected: int
) -> None:
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    assert threads_per_rank(ranks) == expected
