"""Two studies on one GPU: the second is told who has it."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.workers import gpu_locks
from autotune.workers.gpu_locks import lock_file, lock_gpus, lock_holder
from tests.conftest import wait_until
from tests.fake_driver import Card, Driver


@pytest.fixture
def machine(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    driver.show(Card("A", 24), Card("A", 24))
    return driver


def on(gpus: str, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    return detect("cuda", None)


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_gpu_has_one_holder_at_a_time(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, both = (on(gpus, monkeypatch) for gpus in ("0", "1", "1,0"))
    with lock_gpus(first, "study a", silent):
        with pytest.raises(UserError) as caught, lock_gpus(both, "study b", silent):
            raise AssertionError("not reached")
        said = re.escape(f"{first.gpus[0]} is in use by autotune (study a, pid {os.getpid()}, since ")
        assert re.fullmatch(
            said + r"[-: \d]{19}\): wait for it, or choose other GPUs with CUDA_VISIBLE_DEVICES", str(caught.value)
        )
        assert lock_holder(first.gpus[0]).startswith("study a, pid")
        assert lock_holder(second.gpus[0]) == "", "what was taken before the refusal is given back"
        with lock_gpus(second, "a name that is shorter", silent):
            assert lock_holder(second.gpus[0]).startswith("a name that is shorter, pid")
    with lock_gpus(both, "b", silent):
        assert lock_holder(first.gpus[0]).startswith("b, pid"), "nothing of the holder before"
    assert lock_holder(first.gpus[0]) == ""


def test_who_looks_at_a_lock_is_no_holder(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`autotune doctor` beside a study that starts: it has the lock for a moment."""
    hardware = on("0", monkeypatch)
    with lock_gpus(hardware, "a", silent):
        pass
    looking = os.open(lock_file(hardware.gpus[0]), os.O_RDWR)
    assert gpu_locks._lock(looking)
    monkeypatch.setattr(gpu_locks, "_PATIENCE_SECONDS", 60.0)
    threading.Timer(0.05, os.close, [looking]).start()
    with lock_gpus(hardware, "b", silent):
        assert lock_holder(hardware.gpus[0]).startswith("b, pid")


def test_what_is_no_gpu_of_this_machine_is_not_held(machine: Driver) -> None:
    for hardware in (detect("cpu", 1), named_hardware("rtx3090", 2)):
        with lock_gpus(hardware, "a", silent), lock_gpus(hardware, "b", silent):
            assert hardware.gpus == ()


def test_the_kernel_lets_it_go_when_the_holder_dies(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = on("0", monkeypatch)
    code = (
        "import sys, time; from autotune.workers.gpu_locks import lock_gpus; from autotune.problem.hardware import detect\n"
        "with lock_gpus(detect('cuda', None), 'study of another process', print):\n"
        "    print('held', flush=True); time.sleep(3600)"
    )
    env = {**os.environ, **machine.environment}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"study of another process, pid {other.pid}, since"),
            lock_gpus(hardware, "own", silent),
        ):
            raise AssertionError("not reached")
        other.send_signal(signal.SIGKILL)
        other.wait()
    wait_until(lambda: not lock_holder(hardware.gpus[0]), "the lock")
    with lock_gpus(hardware, "own", silent):
        assert lock_holder(hardware.gpus[0]).startswith("own")


def test_ranks_do_not_inherit_it(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = on("0", monkeypatch)
    with lock_gpus(hardware, "a", silent):
        child = subprocess.Popen(["sleep", "3600"], close_fds=False)
    try:
        assert lock_holder(hardware.gpus[0]) == ""
    finally:
        child.kill()
        child.wait()


def test_any_user_may_take_the_turn(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = on("0", monkeypatch)
    before = os.umask(0o077)
    try:
        with lock_gpus(hardware, "a", silent):
            pass
    finally:
        os.umask(before)
    assert lock_file(hardware.gpus[0]).stat().st_mode & 0o777 == 0o666
    assert lock_file(hardware.gpus[0]).parent == Path("/tmp")


def test_where_it_cannot_be_written_the_study_goes_on_and_says_so(
    machine: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "gone")
    said: list[str] = []
    hardware = on("0", monkeypatch)
    with lock_gpus(hardware, "a", said.append):
        assert said == [
            f"{lock_file(hardware.gpus[0])} cannot be held (No such file or directory): "
            "another study may take the same GPU"
        ]
    assert lock_holder(hardware.gpus[0]) == ""


def _link(path: Path, other: Path) -> None:
    path.symlink_to(other)


def _hard_link(path: Path, other: Path) -> None:
    path.hardlink_to(other)


def _fifo(path: Path, other: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, other: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _content(path: Path, other: Path) -> None:
    path.write_text("a thesis")


def _device(path: Path, other: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("plant", [_link, _hard_link, _fifo, _socket, _content, _device])
def test_a_planted_lock_file_is_neither_followed_nor_changed(
    plant: Callable[[Path, Path], None], machine: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path)
    hardware = on("0", monkeypatch)
    path, other = lock_file(hardware.gpus[0]), tmp_path / "thesis"
    other.write_text("a thesis")
    plant(path, other)
    said: list[str] = []
    with lock_gpus(hardware, "a", said.append):
        assert said == [
            f"{path} cannot be held (it is no lock file of autotune: remove it): another study may take the same GPU"
        ]
        assert lock_holder(hardware.gpus[0]) == ""
    assert other.read_text() == "a thesis"
    assert not path.is_file() or path.read_text() in ("a thesis", "")


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
    with lock_gpus(on("0", monkeypatch), "study first", silent):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"is in use by autotune (study first, pid {os.getpid()}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "s").exists()
