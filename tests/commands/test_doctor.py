import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from autotune.commands import doctor, run
from autotune.problem import host_memory
from autotune.problem.hardware import detect, named_hardware
from autotune.util.interpreter import OWN, interpreter_at
from autotune.util.linux import MainMemory
from autotune.util.units import GIB, MIB
from autotune.workers.gpu_locks import lock_gpus
from tests.cli_call import call
from tests.fake_driver import GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, NO_PROCESS, Card, Driver, Slice
from tests.network import mount
from tests.util.test_interpreter import stand_in

RTX_3090 = "NVIDIA GeForce RTX 3090"
FACTS = {
    "errors": {"AsyncIOBuilder": "libaio is missing"},
    "torch": {"version": "2.13.0", "cuda": "13.0", "available": True},
    "versions": {"deepspeed": "0.19.8"},
    "CPUAdamBuilder": True,
    "FusedAdamBuilder": True,
}


def by_name(findings) -> dict[str, doctor.Finding]:  # type: ignore[no-untyped-def]
    return {finding.what: finding for finding in findings}


@pytest.mark.slow
def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for op in ("FusedAdamBuilder", "AsyncIOBuilder"):  # minutes of building, and nothing else here needs them
        monkeypatch.delitem(doctor._OPS, op)
    code, out, _ = call(monkeypatch, capsys, "doctor", "--nvme-path", str(tmp_path), "--json")
    findings = {one["what"]: one for one in json.loads(out)["findings"]}
    assert findings["torch"]["level"] == "good"
    assert findings["DeepSpeed op CPUAdam"]["level"] == "good"
    assert {"main memory", "shared memory", "disk", "nvme path", "libraries"} <= set(findings)
    assert code == 0


def test_a_library_that_is_missing_or_does_not_match() -> None:
    good = by_name(doctor.judge_libraries(FACTS, "cuda"))
    assert good["DeepSpeed op AsyncIO"].level == "warn"
    assert "libaio" in good["DeepSpeed op AsyncIO"].fix
    blind = {**FACTS, "torch": {**FACTS["torch"], "available": False}}
    found = by_name(doctor.judge_libraries(blind, "cuda"))
    assert found["torch"].level == "bad"
    assert "no GPU" in found["torch"].found
    assert by_name(doctor.judge_libraries({"errors": {"torch": "no module"}}, "cpu"))["torch"].level == "bad"
    broken = {"errors": {"versions": "no deepspeed"}, "torch": FACTS["torch"]}
    assert by_name(doctor.judge_libraries(broken, "cpu"))["libraries"].level == "bad"


@pytest.mark.parametrize(
    ("trouble", "fix"),
    [
        ("The NVIDIA driver on your system is too old (found version 12020)", "install the torch wheel"),
        ("CUDA out of memory", "end other processes"),
    ],
)
def test_a_gpu_that_torch_counts_and_cannot_start_is_no_good_finding(trouble: str, fix: str) -> None:
    facts = {**FACTS, "errors": {**FACTS["errors"], "context": trouble}}
    found = by_name(doctor.judge_libraries(facts, "cuda"))["torch"]
    assert (found.level, found.found) == ("bad", f"2.13.0, CUDA 13.0, cannot use GPU 0: {trouble}")
    assert found.fix.startswith(fix)
    assert by_name(doctor.judge_libraries(facts, "cpu"))["torch"].level == "good"


@pytest.mark.slow
def test_the_examination_reports_torch_of_cuda_and_starts_cuda_where_torch_counts_a_gpu() -> None:
    torch = "import torch; torch.version.cuda = '13.0'\n"
    count = "import sys; sys.argv[1:] = []; from autotune.rank import devices; devices.available = lambda: True\n"
    code = (
        torch
        + count
        + doctor._EXAMINATION.replace("    import transformers\n", "").replace("    import deepspeed\n", "")
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    facts = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
    found = json.loads(facts.removeprefix("FACTS"))
    assert found["torch"]["cuda"] == "13.0", found["errors"]
    assert "cuda" in found["errors"]["context"]  # this torch has none


def test_an_op_that_cannot_be_built_has_the_compilers_words() -> None:
    facts = {**FACTS, "errors": {**FACTS["errors"], "FusedAdamBuilder": "fatal error: cusparse.h: No such file"}}
    del facts["FusedAdamBuilder"]
    found = by_name(doctor.judge_libraries(facts, "cuda"))["DeepSpeed op FusedAdam"]
    assert found.found == "cannot be built: fatal error: cusparse.h: No such file"
    assert found.fix.startswith("set CUDA_HOME to a complete toolkit")


def test_a_deepspeed_newer_than_what_is_known_of_it() -> None:
    good = by_name(doctor.judge_libraries(FACTS, "cuda"))["libraries"]
    newer = {**FACTS, "versions": {**FACTS["versions"], "deepspeed": "1.0.0"}}
    found = by_name(doctor.judge_libraries(newer, "cuda"))["libraries"]
    assert (good.level, found.level) == ("good", "warn")
    assert "1.0.0 is newer" in found.found
    faults = by_name(doctor.judge_libraries(FACTS, "cuda"))["faults of deepspeed 0.19.8"]
    assert faults.found.startswith("stage 0 in fp16; ")


@pytest.mark.timeout(300)  # the compiler holds the output open for longer
def test_a_probe_that_dies_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(doctor, "APART", "")
    monkeypatch.setattr(doctor, "_EXAMINATION", "import sys; print('DOING this'); sys.exit('Segmentation fault')")
    assert "Segmentation fault" in by_name(doctor._libraries(heard.append, OWN))["libraries"].found
    assert heard == ["this"], "each step is said as it begins"

    assert doctor._IDLE_SECONDS == 120.0
    monkeypatch.setattr(doctor, "_IDLE_SECONDS", 1.0)
    compiles = "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
    monkeypatch.setattr(doctor, "_EXAMINATION", compiles)
    found = by_name(doctor._libraries(heard.append, OWN))["libraries"]
    assert found.level == "bad"
    assert "no compiler and nothing else worked for 1 s" in found.found
    assert heard == ["this"], "nothing is said again while a step lasts"


def found_of(driver: Driver, *cards: Card) -> dict[str, doctor.Finding]:
    driver.cards = list(cards)
    driver.write()
    return by_name(doctor._gpus())


def test_gpus_in_use_and_unknown(driver: Driver) -> None:
    found = found_of(
        driver, Card(RTX_3090, 24), Card("Voodoo 2", 1), Card(RTX_3090, 24, processes={NO_PROCESS: 9 * 1024})
    )
    assert found["driver"].found == "580.95.05, CUDA up to 13.0"
    assert [found[f"GPU {i}"].level for i in range(3)] == ["good", "warn", "warn"]
    assert found["GPU 0"].found == (
        f"{RTX_3090}, 24.00 GiB, of which a process can have 23.69 GiB; the driver keeps 320.0 MiB"
    )
    assert "not in autotune's table" in found["GPU 1"].found
    assert found["GPU 2"].found.endswith(f"9.00 GiB in use by a process (pid {NO_PROCESS}) 9.00 GiB")
    assert "end the other processes" in found["GPU 2"].fix


def test_a_desktop_is_said_and_no_trouble(driver: Driver) -> None:
    finding = found_of(driver, Card(RTX_3090, 24, graphics={1: 900}))["GPU 0"]
    assert finding.level == "good"
    assert "a process can have 22.81 GiB" in finding.found
    assert "900.0 MiB in use" in finding.found


def test_a_slice_and_a_card_that_is_gone(driver: Driver) -> None:
    lost = Card(RTX_3090, 24, error=GPU_IS_LOST)
    sliced = Card("A100", 40, capability=(8, 0), mig=True, slices=[Slice("A100 MIG 1g.5gb", 4.75)])
    finding = found_of(driver, sliced)["GPU 0 slice 0"]
    assert (finding.level, "4.75 GiB" in finding.found, "one rank only" in finding.cost) == ("warn", True, True)
    finding = found_of(driver, Card(RTX_3090, 24), lost)["GPU 1"]
    assert (finding.level, finding.found) == ("bad", "does not answer: GPU is lost")


def test_an_architecture_list_that_deepspeed_cannot_read_is_named(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = Card("H100", 80, capability=(9, 0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    finding = found_of(driver, hopper)["GPU architectures"]
    assert finding.level == "warn"
    assert "cannot read 9.0a" in finding.cost
    assert "set TORCH_CUDA_ARCH_LIST=9.0 for your training" in finding.fix
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    assert "GPU architectures" not in found_of(driver, hopper)


def test_gpus_that_are_hidden_from_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert found_of(driver, Card(RTX_3090, 24))["GPU"].found == "CUDA_VISIBLE_DEVICES=0,0 names none of the 1 GPUs"


def test_a_gpu_that_another_study_holds(driver: Driver) -> None:
    driver.show(Card(RTX_3090, 24))
    with lock_gpus(detect("cuda", None), "study other"):
        finding = by_name(doctor._gpus())["GPU 0"]
    assert finding.level == "warn"
    assert "held by autotune (study other, pid " in finding.found
    assert by_name(doctor._gpus())["GPU 0"].level == "good"


@pytest.mark.parametrize(
    ("failing", "level", "what", "found"),
    [
        (
            {"nvmlInitWithFlags": LIB_RM_VERSION_MISMATCH},
            "bad",
            "driver",
            "RM has detected an NVML/RM version mismatch",
        ),
        ({"nvmlSystemGetDriverVersion": 999}, "bad", "driver", "NVIDIA's driver does not answer: Unknown Error"),
    ],
)
def test_a_driver_that_does_not_answer(
    driver: Driver, failing: dict[str, int], level: str, what: str, found: str
) -> None:
    driver.failing = failing
    finding = found_of(driver, Card(RTX_3090, 24))[what]
    assert finding.level == level
    assert found in finding.found


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    (finding,) = doctor._gpus()
    assert (finding.level, finding.found) == ("warn", "NVML finds no driver")


def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "main_memory", lambda: MainMemory(available=GIB, total=64 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=8 * MIB))
    found = by_name(doctor._memory())
    assert found["main memory"].level == "warn"
    assert found["shared memory"].level == "bad"
    # what Docker gives a container: NCCL among two ranks can live with it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=64 * MIB))
    assert by_name(doctor._memory())["shared memory"].level == "warn"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=8 * MIB))
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


def test_in_which_python_ranks_run(tmp_path: Path) -> None:
    (own,) = doctor._python(OWN)
    assert (own.level, sys.executable in own.found, "beside" in own.found) == ("good", True, False)
    python = stand_in(tmp_path / "bin/python", versions={"torch": "1.13.1"})
    (found,) = doctor._python(interpreter_at(str(python), "--python"))
    assert found.level == "bad"
    assert found.found == f"3.12.1 ({python}), apart from autotune's own ({sys.executable})"
    assert "torch 1.13.1 (expected 2.6 or newer)" in found.cost


def test_an_environment_without_transformers_can_train_scripts() -> None:
    found = by_name(
        doctor.judge_libraries({**FACTS, "errors": {"transformers": "No module named 'transformers'"}}, "cuda")
    )
    assert (found["libraries"].level, found["transformers"].level) == ("good", "warn")


def test_too_small_a_shared_memory_is_said_before_ranks_of_several_gpus_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=60 * MIB))
    done: list[object] = []
    executor = types.SimpleNamespace(open=done.append, check=done.append, hardware=named_hardware("rtx4090", 2))
    run._open(executor, done.append)
    assert done[1] == (
        "60.0 MiB free in /dev/shm: ranks die by SIGBUS or NCCL fails; docker run --shm-size=8g (or --ipc=host)"
    )
