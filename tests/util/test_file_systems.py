from pathlib import Path

import psutil
import pytest

from autotune.util.file_systems import FileSystem, file_system_of
from tests.network import mount


def test_the_innermost_mount_counts_also_for_what_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(monkeypatch, ("nfs4", tmp_path / "home"), ("ext4", tmp_path / "home" / "scratch"))
    assert file_system_of(tmp_path / "home" / "runs" / "s") == FileSystem("nfs4", tmp_path / "home")
    assert file_system_of(tmp_path / "home" / "scratch" / "runs").kind == "ext4"
    assert file_system_of(tmp_path / "home2").kind == file_system_of(tmp_path).kind, "a name that begins alike"


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, ("lustre", tmp_path / "lustre"))
    (tmp_path / "lustre").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "lustre")
    monkeypatch.chdir(tmp_path)
    assert file_system_of(Path("runs/s")).kind == "lustre"


def test_of_two_mounts_on_one_place_the_last_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, ("autofs", tmp_path), ("nfs", tmp_path))
    assert file_system_of(tmp_path / "a").kind == "nfs"


@pytest.mark.parametrize("kind", ["nfs", "cifs", "fuse.sshfs"])
def test_those_of_a_network(kind: str) -> None:
    assert FileSystem(kind, Path("/")).on_network


@pytest.mark.parametrize("kind", ["ext4", "overlay", "fuse.fuse-overlayfs"])
def test_those_of_this_machine(kind: str) -> None:
    assert not FileSystem(kind, Path("/")).on_network


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(all: bool = False) -> None:
        raise PermissionError("/proc is hidden")

    monkeypatch.setattr(psutil, "disk_partitions", refuse)
    found = file_system_of(tmp_path)
    assert found.kind == "unknown"
    assert not found.on_network
