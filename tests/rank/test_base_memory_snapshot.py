"""What a rank counts when something has failed. A stand-in for torch plays the drivers: whole, ruined, silent, asleep."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.rank import base
from autotune.util.units import GIB, MIB


class Cuda:
    """Of torch.cuda what is asked here; this process is on GPU 3."""

    def __init__(self, initialized: bool = True, share: float = 1.0) -> None:
        self.initialized, self.share = initialized, share
        self.asked: list[str] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device(self) -> int:
        self.asked.append("current_device")
        return 3

    def set_device(self, index: int) -> None:
        self.asked.append(f"set_device {index}")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked.append(f"mem_get_info {index}")
        return 2 * GIB, 80 * GIB

    def memory_stats(self, index: int) -> dict[str, int]:
        self.asked.append(f"memory_stats {index}")
        return {
            "allocated_bytes.all.current": 1 * GIB,
            "allocated_bytes.all.peak": 2 * GIB,
            "reserved_bytes.all.current": 3 * GIB,
            "reserved_bytes.all.peak": 4 * GIB,
        }

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.share

    def host_memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.current": 5 * GIB}


def counted_by(cuda: Any) -> dict[str, int]:
    """What is collected where torch.cuda is this. The true torch is back before anything else asks for it: pytest-randomly
    seeds it before a test's fixtures are undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        return base.collect("cuda")


COUNTED = {
    "free_bytes": 2 * GIB,
    "total_bytes": 80 * GIB,
    "allocated_bytes": 1 * GIB,
    "allocated_peak_bytes": 2 * GIB,
    "reserved_bytes": 3 * GIB,
    "reserved_peak_bytes": 4 * GIB,
    "pinned_bytes": 5 * GIB,
}


def test_what_a_gpus_rank_counts() -> None:
    cuda = Cuda()
    counted = counted_by(cuda)
    assert counted.pop("host_available_bytes") > 0
    assert counted == COUNTED
    assert cuda.asked == ["current_device", "set_device 3", "mem_get_info 3", "memory_stats 3"], (
        "the driver before torch"
    )
    assert counted_by(Cuda(share=0.25))["allowed_bytes"] == 20 * GIB, "under a cap"


def test_a_rank_that_has_not_woken_cuda_does_not_wake_it() -> None:
    cuda = Cuda(initialized=False)
    assert set(counted_by(cuda)) == {"host_available_bytes"}
    assert cuda.asked == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # an import of it would fail
        patch.delitem(sys.modules, "torch")
        assert set(base.collect("cuda")) == {"host_available_bytes"}
        assert "torch" not in sys.modules, "nor is torch imported"


@pytest.mark.parametrize(
    "broken", ["mem_get_info", "memory_stats", "get_per_process_memory_fraction", "host_memory_stats"]
)
def test_what_one_question_raises_costs_only_its_answer(broken: str) -> None:
    """After a device-side assert every call of the driver's raises; an older torch lacks some."""

    def ruined(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda = Cuda()
    setattr(cuda, broken, ruined)
    lost = {
        "mem_get_info": {"free_bytes", "total_bytes"},
        "memory_stats": {"allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes"},
        "get_per_process_memory_fraction": set(),
        "host_memory_stats": {"pinned_bytes"},
    }
    counted = counted_by(cuda)
    assert {name: value for name, value in counted.items() if name != "host_available_bytes"} == {
        name: value for name, value in COUNTED.items() if name not in lost[broken]
    }


@pytest.fixture
def silence() -> Iterator[Callable[..., None]]:
    """A driver's call that does not return."""
    end = threading.Event()

    def wait(*_: object) -> None:
        end.wait()
        raise RuntimeError("over")

    yield wait
    end.set()


def test_a_driver_that_does_not_answer_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch, silence: Callable[..., None]
) -> None:
    monkeypatch.setattr(base, "PATIENCE_SECONDS", 0.05)
    cuda = Cuda()
    monkeypatch.setattr(cuda, "mem_get_info", silence)
    assert set(counted_by(cuda)) == {"host_available_bytes"}
    assert "memory_stats 3" not in cuda.asked, "torch's lock may be held by who hangs"


def test_a_machine_that_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert set(counted_by(Cuda())) == {"host_available_bytes"}


def test_what_a_cpu_rank_counts() -> None:
    counted = base.collect("cpu", 512 * MIB)
    assert set(counted) == {"host_available_bytes", "reserved_bytes", "allowed_bytes"}
    assert counted["allowed_bytes"] == 512 * MIB
    assert MIB < counted["reserved_bytes"] < 2**40
    assert set(base.collect("cpu")) == {"host_available_bytes", "reserved_bytes"}
    assert set(base.collect("tpu")) == {"host_available_bytes"}


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.statvfs, {"f_bavail": 100, "f_frsize": 4096, "f_files": 10, "f_favail": 5}
    (tmp_path / "out").mkdir()

    def statvfs(folder: str) -> object:
        return SimpleNamespace(**full) if folder.endswith("out") else real(folder)

    monkeypatch.setattr(os, "statvfs", statvfs)
    folders = [str(tmp_path / "nowhere"), str(tmp_path), str(tmp_path / "out")]
    assert base.full_disk(folders) == str(tmp_path / "out")
    full["f_bavail"] = 10**6
    assert base.full_disk(folders) == ""
    full["f_favail"] = 0
    assert base.full_disk(folders) == str(tmp_path / "out")
    full["f_files"] = 0  # as btrfs says, which has no such limit
    assert base.full_disk(folders) == ""
