"""`make gpu-acceptance` without a GPU: every step is rehearsed on a CPU rank. `tests/fake_driver` answers for NVML."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from autotune.errors import UserError
from autotune.util.units import GIB, MIB
from benchmarks.common import HERE, RESULTS, WIDTH
from benchmarks.gpu import ground, machine, ooms, runner
from benchmarks.gpu.steps import BY_NAME, FIRST, STEPS
from tests.fake_driver import CUDA_LOG, Card, Driver, build, cuda_calls
from tests.workers import failures

Results = dict[str, Any]
# steps that take seconds; the others are whole calls of `autotune run`, groups of ranks, or build ops
CHEAP = ("facts",)
GPU = {"name": "NVIDIA H200", "device": "cuda"}


def call(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "gpu" / "gpu_acceptance.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Of a step, rehearsed once: the folder of its results, and what was printed."""

    @cache
    def rehearse(step: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(step)
        done = call("--rehearse", "--only", step, "--json", str(folder / "gpu.json"))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return folder, done.stdout

    return rehearse


def steps() -> Iterator[Any]:
    for step in BY_NAME:
        yield pytest.param(step, marks=[pytest.mark.slow] * (step not in CHEAP))


@pytest.mark.slow
@pytest.mark.parametrize("step", steps())
def test_every_step_is_rehearsed_to_its_end(rehearsed: Callable[[str], tuple[Path, str]], step: str) -> None:
    folder, out = rehearsed(step)
    found: Results = json.loads((folder / "gpu.json").read_text())["steps"][step]
    assert found["error"] is None
    assert found["rows"]
    assert found["hardware"]["device"] == "cpu"
    assert found["hardware"]["torch"]
    assert max(len(line) for line in out.splitlines() if line.startswith(tuple("┏┃┡│└"))) <= WIDTH
    assert out.startswith(f"{step}: ") or f"\n{step}: " in out


def test_every_step_has_a_module_and_fits_a_lent_machine() -> None:
    modules = {path.stem for path in (HERE / "gpu").glob("*.py") if "\ndef run(ground: Ground)" in path.read_text()}
    assert modules == set(BY_NAME)
    for step in STEPS:
        assert 0 < step.least_seconds <= step.limit_seconds <= 600 - 60
        assert 0 < step.expected_seconds <= step.limit_seconds
    assert list(BY_NAME)[: len(FIRST)] == list(FIRST), "what is worth most comes first"


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rehearse", "--only", "oms", "--json", "x.json"), "no step oms; expected some of facts,"),
        (("--rehearse",), "--rehearse measures nothing: give --json FILE"),
        (("--rehearse", "--json", str(RESULTS / "gpu-none.json")), "--rehearse measures nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(options: tuple[str, ...], said: str) -> None:
    done = call(*options)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_later_call_adds_its_steps_and_a_step_out_of_time_keeps_its_rows(
    rehearsed: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    shutil.copy(rehearsed("ooms")[0] / path.name, path)
    earlier = json.loads(path.read_text())
    earlier["steps"]["trials"] = {"rows": [{"what": "a trial"}], "error": None}  # left the list since then
    path.write_text(json.dumps(earlier))
    second = call("--rehearse", "--only", "costs", "--limit", "1", "--json", str(path))
    assert second.returncode == 1
    found = json.loads(path.read_text())["steps"]
    assert list(found) == ["costs", "ooms", "trials"], "in the order of worth, then those that left the list"
    assert found["ooms"]["error"] is None
    assert found["trials"]["rows"] == [{"what": "a trial"}]
    assert "ended after 1 s" in found["costs"]["error"]
    assert "not as expected: costs" in second.stdout
    for process in psutil.process_iter(["cmdline"]):
        assert str(path.with_suffix("")) not in (process.info["cmdline"] or []), "the step's process is gone"


@pytest.mark.parametrize(
    ("earlier", "said"),
    [
        ("no json", "holds no results of these steps"),
        ('[{"a": 1}]', "holds no results of these steps"),
        (json.dumps({"rehearsal": False, "hardware": {"name": "NVIDIA A100"}, "steps": {}}), "this is NVIDIA H200"),
        (json.dumps({"rehearsal": True, "hardware": {"name": "NVIDIA H200"}, "steps": {}}), "a rehearsal on"),
    ],
)
def test_results_of_two_machines_are_never_mixed(tmp_path: Path, earlier: str, said: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(earlier)
    with pytest.raises(UserError, match="name another file") as caught:
        runner.opened_results(path, GPU, rehearse=False)
    assert said in str(caught.value)
    assert path.read_text() == earlier


def spec(tmp_path: Path, step: str) -> dict[str, Any]:
    folder, beside = str(tmp_path / "folder"), str(tmp_path / "gpu")
    path = str(tmp_path / "step.json")
    return {"step": step, "path": path, "folder": folder, "beside": beside, "rehearse": True, "seconds": 60.0}


def test_a_step_that_raises_leaves_its_rows_and_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ground: ground.Ground) -> Iterator[dict[str, Any]]:
        yield {"what": 1}
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ooms, "run", run)
    monkeypatch.setattr(runner, "die_with_parent", lambda parent: None)
    code = runner.run_step(spec(tmp_path, "ooms"))
    found = json.loads((tmp_path / "step.json").read_text())
    assert code == 1
    assert found["rows"] == [{"what": 1}]
    assert found["error"].strip().endswith("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert runner.failed(found)
    assert runner.verdict(found).startswith("1 rows; RuntimeError")


# -- what a CPU cannot show ------------------------------------------------------------------------------------------------


def test_the_machine_asks_torch_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that is stood in for is one of torch's."""
    import torch

    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    of_cpu = machine.host_speed(torch, "cpu")
    assert all(microseconds > 0 for microseconds in of_cpu.values())
    monkeypatch.setattr(machine, "host_speed", lambda torch, device: of_cpu)
    found = machine.child({"device": "cuda"})
    assert (found["name"], found["compute_capability"], found["nccl"]) == ("NVIDIA H200", "9.0", "2.29.3")
    assert machine.child({"device": "cpu"})["device"] == "cpu"


@pytest.mark.slow
def test_provoked_failures_can_be_added_to_the_recorded_ones(rehearsed: Callable[[str], tuple[Path, str]]) -> None:
    folder, _ = rehearsed("ooms")
    found = yaml.safe_load((folder / "gpu-failures.yaml").read_text())
    known = {"source", "kind", "exception", "text", "frames", "numbers", "phase", "file"}
    assert found
    for failure in found:
        assert set(failure) <= known
        assert failure["source"].startswith("measured: ")
        assert failures.kind(failure).is_oom
        message = failures.error(failure)
        assert message["numbers"]["host_available_bytes"] > MIB
        assert failure["text"].strip() in message["traceback"]
        assert failures.evidence(failure).errors == [message]


@pytest.mark.slow
def test_the_machine_is_described_without_torch_or_cuda(driver: Driver, tmp_path: Path) -> None:
    """Every call names its card; waking CUDA for that would cost seconds of few minutes."""
    build(tmp_path, "libcuda.so.1")
    driver.show(Card("NVIDIA H200", 141, capability=(9, 0)))
    code = "import json, sys, benchmarks.gpu.runner; from benchmarks.gpu.machine import describe; found = describe('cuda');"
    code += "assert 'torch' not in sys.modules; print(json.dumps(found))"
    libraries = os.pathsep.join([str(tmp_path), driver.environment["LD_LIBRARY_PATH"]])
    env = {**os.environ, **driver.environment, "LD_LIBRARY_PATH": libraries, CUDA_LOG: str(tmp_path / "log")}
    env["PYTHONPATH"] = str(HERE.parent)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["name"], found["compute_capability"], found["driver"]) == ("NVIDIA H200", "9.0", driver.version)
    assert found["torch"]
    assert cuda_calls(tmp_path / "log") == []
