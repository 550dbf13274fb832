"""Two studies on one GPU: the second is told who has it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.workers.gpu_locks import lock_gpus, lock_holder
from tests.conftest import wait_until
from tests.fake_driver import Card, Driver


@pytest.fixture
def machine(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    driver.show(Card("A", 24), Card("A", 24))
    return driver


def on(gpus: str, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    return detect("cuda", None)


def test_a_gpu_has_one_holder_at_a_time(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, both = (on(gpus, monkeypatch) for gpus in ("0", "1", "1,0"))
    with lock_gpus(first, "study a"):
        with pytest.raises(UserError) as caught, lock_gpus(both, "study b"):
            raise AssertionError("not reached")
        who = f"study a, pid {os.getpid()}"
        remedy = "wait for it, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        assert str(caught.value) == f"{first.gpus[0]} is in use by autotune ({who}): {remedy}"
        assert lock_holder(first.gpus[0]).startswith("study a, pid")
        assert lock_holder(second.gpus[0]) == "", "what was taken before the refusal is given back"
        with lock_gpus(second, "a name that is shorter"):
            assert lock_holder(second.gpus[0]).startswith("a name that is shorter, pid")
    with lock_gpus(both, "b"):
        assert lock_holder(first.gpus[0]).startswith("b, pid"), "nothing of the holder before"
    assert lock_holder(first.gpus[0]) == ""


def test_what_is_no_gpu_of_this_machine_is_not_held(machine: Driver) -> None:
    for hardware in (detect("cpu", 1), named_hardware("rtx3090", 2)):
        with lock_gpus(hardware, "a"), lock_gpus(hardware, "b"):
            assert hardware.gpus == ()


def test_the_kernel_lets_it_go_when_the_holder_dies(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = on("0", monkeypatch)
    code = (
        "import sys, time; from autotune.workers.gpu_locks import lock_gpus; from autotune.problem.hardware import detect\n"
        "with lock_gpus(detect('cuda', None), 'study of another process'):\n"
        "    print('held', flush=True); time.sleep(3600)"
    )
    env = {**os.environ, **machine.environment}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"study of another process, pid {other.pid}\)"),
            lock_gpus(hardware, "own"),
        ):
            raise AssertionError("not reached")
        other.send_signal(signal.SIGKILL)
        other.wait()
    wait_until(lambda: not lock_holder(hardware.gpus[0]), "the lock")
    with lock_gpus(hardware, "own"):
        assert lock_holder(hardware.gpus[0]).startswith("own")


def test_ranks_do_not_inherit_it(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = on("0", monkeypatch)
    with lock_gpus(hardware, "a"):
        child = subprocess.Popen(["sleep", "3600"], close_fds=False)
    try:
        assert lock_holder(hardware.gpus[0]) == ""
    finally:
        child.kill()
        child.wait()


def test_a_long_name_leaves_room_for_the_pid(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = on("0", monkeypatch)
    with lock_gpus(hardware, f"study ü{'x' * 120}\nline"):
        holder = lock_holder(hardware.gpus[0])
    assert holder.startswith("study üxxx")
    assert holder.endswith(f"x, pid {os.getpid()}")


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [["run", "--gpus", "1", "--study", "s"], ["launch", "--global-batch-size", "8"]])
def test_a_second_study_ends_in_one_line(
    machine: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    """The command itself, in a process that finds the driver by the loader's path."""
    (tmp_path / "train.py").write_text("raise SystemExit('never run')")
    script = ["--", "train.py"] if words[0] == "launch" else []
    command = [sys.executable, "-m", "autotune", *words, "--model", "tiny-llama", "--seq-len", "32", *script]
    env = {**os.environ, **machine.environment, "CUDA_VISIBLE_DEVICES": "0"}
    with lock_gpus(on("0", monkeypatch), "study first"):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"is in use by autotune (study first, pid {os.getpid()}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "s").exists()
