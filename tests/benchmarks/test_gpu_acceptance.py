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
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.util.units import GIB, MIB
from autotune.workers.memory_monitor import Meter
from autotune.workers.memory_peaks import MemoryPeaks
from benchmarks.common import HERE, RESULTS, WIDTH
from benchmarks.gpu import gpu_acceptance, ground, machine, ooms, provoke, rows, runner
from benchmarks.gpu.costs import Switched
from benchmarks.gpu.steps import BY_NAME, FIRST, STEPS, Step, chosen
from tests.conftest import has_cuda
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


def test_steps_run_in_the_order_of_worth() -> None:
    assert [step.name for step in chosen(["fidelity", "study", "facts"], "--only")] == ["facts", "study", "fidelity"]


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_list_names_every_step_and_runs_none() -> None:
    done = call("--list")
    assert done.returncode == 0
    assert all(step in done.stdout for step in BY_NAME)


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
def test_where_there_is_no_gpu_it_says_so_in_one_line() -> None:
    if has_cuda():
        pytest.skip("there is one: `make gpu-acceptance`")
    done = call("--only", "ooms")
    assert done.returncode == 2
    assert "no GPU found" in done.stderr
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


def test_results_are_called_by_the_gpu() -> None:
    assert (
        gpu_acceptance.result_name({"name": "NVIDIA GeForce RTX 4090 (24 GB)"}) == "gpu-nvidia-geforce-rtx-4090-24-gb"
    )


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


_SLOW_STEP = """
import time
def run(ground):
    yield {"what": "measured"}
    time.sleep(600)
"""


@pytest.fixture
def slow_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """A step that measures one row and hangs, in a copy of the package."""
    copy = tmp_path / "copy" / "benchmarks"
    shutil.copytree(HERE / "gpu", copy / "gpu")
    shutil.copytree(HERE / "trials", copy / "trials")
    for name in ("__init__.py", "common.py"):
        shutil.copy(HERE / name, copy / name)
    (copy / "gpu" / "slow.py").write_text(_SLOW_STEP)
    monkeypatch.setattr(runner, "HERE", copy)
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    return Step("slow", 300, 30, 60, "hangs")


@pytest.mark.slow
def test_a_row_is_in_the_file_while_its_step_still_runs_and_the_call_ends_in_time(
    tmp_path: Path, slow_step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be taken back at any moment."""
    monkeypatch.setattr(runner, "BY_NAME", {"slow": slow_step, "facts": BY_NAME["facts"]})
    path, seen = tmp_path / "first.json", []
    own_write = runner.write_atomically

    def write(target: Path, content: str) -> None:
        own_write(target, content)
        seen.append(json.loads(path.read_text())["steps"]["slow"])

    monkeypatch.setattr(runner, "write_atomically", write)
    call = runner.Call(path, tmp_path / "work", seconds=32.0, step_seconds=15.0, rehearse=True)
    results = runner.run_steps([slow_step, BY_NAME["facts"]], call, lambda step, found: None)
    assert [row["what"] for row in seen[0]["rows"]] == ["measured"]
    assert seen[0]["error"] == runner.UNFINISHED
    assert results["steps"]["slow"]["error"].startswith("ended after 15 s")
    assert results["steps"]["slow"]["rows"] == [{"what": "measured"}]
    late = runner.Call(path, tmp_path / "work", seconds=5.0, rehearse=True)
    results = runner.run_steps([BY_NAME["facts"]], late, lambda step, found: None)
    assert results["steps"]["facts"]["error"].startswith("not begun: 5 s of the call are left, it needs 20 s")
    assert results["steps"]["slow"]["rows"], "an earlier call's rows stay"


# -- what a CPU cannot show ------------------------------------------------------------------------------------------------


def test_driver_versions_come_from_nvml(driver: Driver) -> None:
    driver.cards = [Card("NVIDIA H200", 141)]
    driver.write()
    assert machine.of_driver() == {"driver": driver.version, "driver_cuda": driver.cuda}


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


class DeviceOfNumbers:
    """torch, as far as `Room` knows it: a GPU whose allocator takes memory as c10's does."""

    class OutOfMemoryError(RuntimeError):
        pass

    uint8 = "uint8"

    def __init__(self, total: int) -> None:
        self.total, self.taken, self.small, self.share = total, 600 * MIB, 0, 1.0
        self.cuda = self

    def zeros(self, size: int, device: str) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return self.total - self.taken, self.total

    def set_per_process_memory_fraction(self, share: float) -> None:
        self.share = share

    def empty(self, size: int, dtype: str, device: str) -> int:
        if size <= MIB:
            self.small = (self.small + 1) % 2
            needed = 2 * MIB if self.small else 0
        else:
            needed = size if size >= 10 * MIB else 20 * MIB
        if self.taken + needed > self.total * self.share:
            raise self.OutOfMemoryError("CUDA out of memory.")
        self.taken += needed
        return size


@pytest.mark.parametrize("left", [0, provoke.LEFT_BYTES])
@pytest.mark.parametrize("odd", [0, 3 * MIB, 19 * MIB])
def test_a_device_is_filled_to_what_is_to_be_left(left: int, odd: int) -> None:
    torch = DeviceOfNumbers(24 * GIB + odd)
    provoke.Room(torch, "cuda").fill(left)
    free, _ = torch.mem_get_info()
    assert left - 2 * MIB <= free < left + 2 * MIB


def test_memory_is_hoarded_up_to_the_cap() -> None:
    torch = DeviceOfNumbers(24 * GIB)
    with pytest.raises(torch.OutOfMemoryError):
        provoke.cap(provoke.Room(torch, "cuda"))
    assert GIB < torch.taken <= 2 * GIB


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


def test_a_verdict_on_a_child_that_died_silently(tmp_path: Path) -> None:
    where = ground.Ground(tmp_path, tmp_path / "gpu")
    died = ground.Child(-6, None, "terminate called\nRuntimeError: CUDA error: out of memory\n")
    assert ooms.judged(died, where)["verdict"] == OutcomeKind.OOM_DEVICE
    assert ooms.judged(ground.Child(0, None, ""), where) == {"exception": "none: it did not fail"}


def test_the_meter_can_be_switched_to_100_hz() -> None:
    class Counting(Meter):
        interval_seconds = 0.25
        closely = samples = 0

        def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
            self.samples += 1

        def sample_faster(self) -> None:
            self.closely += 1

    counting = Counting()
    meter = Switched(counting)
    for meter.hasty, expected in ((False, 0.25), (True, 0.01)):
        meter.sample([], MemoryPeaks())
        assert meter.interval_seconds == expected
    assert (counting.samples, counting.closely) == (2, 1)


@pytest.mark.slow
def test_the_machine_is_described_without_torch_or_cuda(driver: Driver, tmp_path: Path) -> None:
    """Every call names its card; waking CUDA for that would cost seconds of few minutes."""
    build(tmp_path, "libcuda.so.1")
    driver.cards = [Card("NVIDIA H200", 141, capability=(9, 0))]
    driver.write()
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


def test_a_trial_that_failed_is_a_row_with_its_reason() -> None:
    outcome = Outcome(
        OutcomeKind.OOM_DEVICE, Phase.BACKWARD, reason="short of 2 GiB", evidence="exception", seconds=4.0
    )
    row = rows.as_row(outcome)
    assert (row["outcome"], row["why"]) == ("oom_device", "short of 2 GiB")
    assert row["whole"] == outcome.to_json()
    measured = Measurement(0.5, 0.1, 3, 8.0, 256.0, 3 * GIB, torch_reserved_bytes=2 * GIB, overhead_bytes=GIB)
    row = rows.as_row(Outcome(OutcomeKind.OK, Phase.STEP, measured))
    assert (row["peak GiB"], row["reserved GiB"], row["overhead GiB"]) == (3.0, 2.0, 1.0)
