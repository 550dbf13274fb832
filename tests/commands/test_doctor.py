import contextlib
import json
import shutil
import subprocess
import types
from pathlib import Path

import psutil
import pytest

from autotune.commands import doctor
from autotune.units import GIB, MIB
from tests.cli_call import call
from tests.network import mount
from tests.problem.test_hardware import FakeNvml

FACTS = {
    "errors": {"AsyncIOBuilder": "libaio is missing"},
    "torch": {"version": "2.13.0", "cuda": "13.0", "available": True, "nccl": [2, 27, 5]},
    "versions": {"deepspeed": "0.19.8"},
    "CPUAdamBuilder": True,
    "FusedAdamBuilder": True,
}


def by_name(findings) -> dict[str, doctor.Finding]:  # type: ignore[no-untyped-def]
    return {finding.what: finding for finding in findings}


def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for op in ("FusedAdamBuilder", "AsyncIOBuilder"):  # minutes of building, and nothing else here needs them
        monkeypatch.delitem(doctor._OPS, op)
    code, out, _ = call(monkeypatch, capsys, "doctor", "--nvme-path", str(tmp_path), "--json")
    findings = {one["what"]: one for one in json.loads(out)}
    assert findings["torch"]["level"] == "good"
    assert findings["DeepSpeed op CPUAdam"]["level"] == "good"
    assert {"main memory", "shared memory", "disk", "nvme path", "libraries"} <= set(findings)
    assert code == 0


def test_a_library_that_is_missing_or_does_not_match() -> None:
    good = by_name(doctor.judge_libraries(FACTS, "cuda"))
    assert good["NCCL"].found == "2.27.5"
    assert good["DeepSpeed op AsyncIO"].level == "warn"
    assert "libaio" in good["DeepSpeed op AsyncIO"].fix
    blind = {**FACTS, "torch": {**FACTS["torch"], "available": False, "nccl": None}}
    found = by_name(doctor.judge_libraries(blind, "cuda"))
    assert found["torch"].level == found["NCCL"].level == "bad"
    assert "sees no GPU" in found["torch"].found
    assert by_name(doctor.judge_libraries({"errors": {"torch": "no module"}}, "cpu"))["torch"].level == "bad"
    broken = {"errors": {"versions": "no deepspeed"}, "torch": FACTS["torch"]}
    assert by_name(doctor.judge_libraries(broken, "cpu"))["libraries"].level == "bad"


def test_a_deepspeed_newer_than_what_is_known_of_it() -> None:
    good = by_name(doctor.judge_libraries(FACTS, "cuda"))["libraries"]
    newer = {**FACTS, "versions": {**FACTS["versions"], "deepspeed": "1.0.0"}}
    found = by_name(doctor.judge_libraries(newer, "cuda"))["libraries"]
    assert (good.level, found.level) == ("good", "warn")
    assert "1.0.0 is newer" in found.cost


def test_a_probe_that_dies_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = types.SimpleNamespace(stdout="", stderr="Segmentation fault")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: dead)
    assert "Segmentation fault" in by_name(doctor._libraries())["libraries"].found

    def hang(*a: object, **k: object) -> None:
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert by_name(doctor._libraries())["libraries"].level == "bad"


def test_gpus_in_use_and_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(("NVIDIA GeForce RTX 3090", 24), ("Voodoo 2", 1))
    fake.nvmlSystemGetDriverVersion = lambda: "580.1"  # type: ignore[attr-defined]
    fake.nvmlSystemGetCudaDriverVersion = lambda: 13000  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "nvml", lambda: contextlib.nullcontext(fake))
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0", "1"])
    found = by_name(doctor._gpus())
    assert found["driver"].found == "580.1, CUDA up to 13.0"
    assert (found["GPU 0"].level, found["GPU 1"].level) == ("good", "warn")
    fake.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=24 * GIB, used=9 * GIB)  # type: ignore
    assert "nvidia-smi" in by_name(doctor._gpus())["GPU 0"].fix


def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=GIB, total=64 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=8 * MIB))
    found = by_name(doctor._memory())
    assert found["main memory"].level == "warn"
    assert found["shared memory"].level == "bad"
    assert by_name(doctor._disk(tmp_path / "none"))["nvme path"].level == "bad"
    assert by_name(doctor._disk(None))["disk"].level == "warn"


def test_where_runs_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    mount(monkeypatch, ("nfs4", tmp_path / "home"), ("xfs", tmp_path / "scratch"))
    on_nfs = by_name(doctor._disk(tmp_path / "home"))
    assert on_nfs["disk"].level == "warn"
    assert f"nfs4, mounted at {tmp_path / 'home'}" in on_nfs["disk"].found
    assert "study.journal" in on_nfs["disk"].cost
    assert "local NVMe" in on_nfs["nvme path"].fix
    (tmp_path / "home" / "runs").symlink_to(tmp_path / "scratch")
    local = by_name(doctor._disk(tmp_path / "scratch"))
    assert local["disk"].level == local["nvme path"].level == "good"
    assert "xfs" in local["disk"].found
