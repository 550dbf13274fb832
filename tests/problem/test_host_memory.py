"""Main memory under cgroups: as files of both versions say it, and a real group where this machine lets us make one."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from autotune.problem import host_memory
from autotune.problem.host_memory import host_available_bytes, host_total_bytes, kernel_oom_kills
from autotune.util.linux import MainMemory
from autotune.util.units import GIB, MIB

FREE, TOTAL = 48 * GIB, 64 * GIB


class Machine:
    """The files of /proc/self and of one mounted hierarchy of cgroups, below a folder."""

    def __init__(self, root: Path, version: int, path: str, shown: str = "/", mount: str = "cgroup") -> None:
        self.version, self.mount = version, root / mount
        self.mount.mkdir(parents=True)
        proc = root / "proc"
        proc.mkdir()
        line = f"0::{path}" if version == 2 else f"9:cpu:/\n4:memory:{path}\n0::/elsewhere"
        (proc / "cgroup").write_text(f"{line}\n")
        kind = "cgroup2 cgroup rw,nsdelegate" if version == 2 else "cgroup cgroup rw,memory"
        (proc / "mountinfo").write_text(
            f"22 1 8:1 / / rw - ext4 /dev/sda rw\n35 31 0:32 {shown} {self.mount} rw,relatime shared:9 - {kind}\n"
        )

    def group(self, path: str, limit: str, used: int = 0, cached: int = 0, **extra: str) -> None:
        """A cgroup with a limit as its file has it, bytes used, and of them bytes of cached files."""
        folder = self.mount / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            ("memory.max", "memory.current") if self.version == 2 else (*host_memory._V1.limits, host_memory._V1.used)
        )
        total = "" if self.version == 2 else "total_"
        stat = f"cache 1\n{total}inactive_file {cached // 4}\n{total}active_file {cached - cached // 4}\n"
        for name, text in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
            (folder / name).write_text(f"{text}\n")
        for name, text in extra.items():
            (folder / name.replace("memory_", "memory.", 1)).write_text(text)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine of 64 GiB of which 48 are available, in no group; what was found before is forgotten."""
    monkeypatch.setattr(host_memory, "main_memory", lambda: MainMemory(total=TOTAL, available=FREE))
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    host_memory.cgroup_folders.cache_clear()
    yield
    host_memory.cgroup_folders.cache_clear()


def test_a_machine_without_cgroups_gives_all_that_it_has() -> None:
    assert (host_total_bytes(), host_available_bytes()) == (TOTAL, FREE)


NO_LIMIT = {1: str(2**63 - 4096), 2: "max"}


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_the_own_group_or_of_any_above_counts(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version, "/slurm/job_7/step_0")
    machine.group("/slurm/job_7/step_0", NO_LIMIT[version], 3 * GIB)
    machine.group("/slurm/job_7", str(16 * GIB), 6 * GIB, cached=2 * GIB)
    machine.group("/slurm", str(32 * GIB), 31 * GIB)
    machine.group("/", NO_LIMIT[version], 40 * GIB)
    assert host_total_bytes() == 16 * GIB
    assert host_available_bytes() == GIB, "/slurm is as good as full, though its limit is the wider one"
    machine.group("/slurm", str(32 * GIB), 20 * GIB)
    assert host_available_bytes() == 12 * GIB, "cached files are given back"
    machine.group("/slurm/job_7", str(16 * GIB), 17 * GIB)
    assert host_available_bytes() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_beside_says_nothing(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version, "/mine")
    machine.group("/mine", str(20 * GIB), GIB)
    machine.group("/other", str(4 * GIB), GIB)
    assert (host_total_bytes(), host_available_bytes()) == (20 * GIB, 19 * GIB)


def test_the_machine_decides_where_it_has_less_than_the_group_may_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, "/user.slice")
    machine.group("/user.slice", str(60 * GIB), 2 * GIB)
    assert (host_total_bytes(), host_available_bytes()) == (60 * GIB, FREE)


def test_a_slice_that_is_throttled_is_limited_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, "/user.slice")
    machine.group("/user.slice", "max", GIB, memory_high=f"{8 * GIB}\n")
    assert host_available_bytes() == 7 * GIB


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/4f", "/docker/4f"),  # none: the mount shows only the container's part
        ("/../4f", "/"),  # the process was moved to another part
        ("/docker/4f", "/"),  # the path is the machine's and the mount shows no such folder
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_inside_a_container(tmp_path: Path, version: int, path: str, shown: str) -> None:
    machine = Machine(tmp_path, version, path, shown)
    machine.group("/", str(10 * GIB), 4 * GIB)
    assert (host_total_bytes(), host_available_bytes()) == (10 * GIB, 6 * GIB)


def test_a_limit_above_what_a_container_sees(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, "/")
    machine.group("/", NO_LIMIT[1], GIB, memory_stat=f"hierarchical_memory_limit {9 * GIB}\ntotal_inactive_file 0\n")
    assert (host_total_bytes(), host_available_bytes()) == (9 * GIB, 8 * GIB)


def test_files_that_are_missing_or_unreadable_limit_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, "/a/b")
    machine.group("/a/b", "many", GIB)
    (machine.mount / "a/b/memory.stat").unlink()
    assert (host_total_bytes(), host_available_bytes()) == (TOTAL, FREE)


@pytest.mark.parametrize(("version", "file"), [(1, "memory.oom_control"), (2, "memory.events")])
def test_the_kernels_kills_are_those_of_the_own_group(tmp_path: Path, version: int, file: str) -> None:
    machine = Machine(tmp_path, version, "/job/step")
    for path, kills in (("/job", 9), ("/job/step", 2)):
        machine.group(path, str(GIB))
        (machine.mount / path.strip("/") / file).write_text(f"oom 3\noom_kill {kills}\n")
    assert kernel_oom_kills() == 2


# -- for real ------------------------------------------------------------------------------------------------------------

ASK = "from autotune.problem.host_memory import *; print(host_total_bytes(), host_available_bytes())"


@pytest.fixture
def limited_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real cgroup of 512 MiB below this process's own; skipped where this machine does not let us make one."""
    monkeypatch.undo()
    host_memory.cgroup_folders.cache_clear()
    for folder, filesystem in host_memory.cgroup_folders("memory"):
        made = folder / f"autotune-test-{uuid.uuid4().hex[:8]}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / host_memory._VERSIONS[filesystem].limits[0]).write_text(str(512 * MIB))
        except OSError:  # no memory controller was delegated to us
            made.rmdir()
            continue
        yield made
        with suppress(OSError):
            made.rmdir()
        return
    pytest.skip("no cgroup with a memory controller can be made here (needs root, or a delegated cgroup)")


def test_a_process_in_a_limited_group_knows_it(limited_group: Path) -> None:
    def enter() -> None:
        (limited_group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", ASK], preexec_fn=enter, capture_output=True, text=True, check=True, timeout=60
    )
    total, available = map(int, done.stdout.split())
    assert total == 512 * MIB
    assert 256 * MIB < available < 512 * MIB, "what the interpreter holds is used"
