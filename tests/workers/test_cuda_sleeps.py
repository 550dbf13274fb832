"""cuInit is called in ranks only: the tuner, the tracer and the fork server run above a CUDA driver that logs each call.

A process that was forked from one that has called cuInit cannot use CUDA, so the fork server must not.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.workers.fork_server import PRELOADED
from autotune.workers.launchers import ForkLauncher, trial_environment
from tests import fake_driver
from tests.fake_driver import CUDA_LOG, Card, CudaCall, Driver, cuda_calls

SUCCESS, NOT_INITIALIZED = 0, 3  # CUresult
CHECKS_THE_FORK = "in _driver_answers"  # the fork server's child that tries CUDA


@dataclass
class Cuda:
    """A machine with one card, whose CUDA driver logs."""

    folder: Path
    driver: Driver
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "cuda.log"

    @property
    def environment(self) -> dict[str, str]:
        libraries = os.pathsep.join([str(self.folder), self.driver.environment["LD_LIBRARY_PATH"]])
        return {**self.driver.environment, "LD_LIBRARY_PATH": libraries, CUDA_LOG: str(self.log)}

    def calls(self) -> list[CudaCall]:
        return cuda_calls(self.log)


@pytest.fixture
def cuda(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake_driver.build(tmp_path, "libcuda.so.1")
    driver.show(Card("NVIDIA H100 80GB HBM3", 80, capability=(9, 0)))
    made = Cuda(tmp_path, driver)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def own_pid(pid: int) -> int:
    """Return the id that a process has in its own PID namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


@dataclass
class Forked:
    """A fork server for GPU ranks, and what came of it. Process ids are those of their namespace."""

    server: int  # pid
    threads: int  # that it has left for ranks to inherit their locks
    fork_safe: bool
    rank: int  # pid
    said: int  # the rank's result of cuInit


@pytest.fixture
def forked(cuda: Cuda, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Forked]:
    # two threads a rank: NumPy's OpenBLAS starts some when it is imported
    env = {**trial_environment("cuda", 2), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    launcher = ForkLauncher(env, tmp_path / "server.log", model_type="llama", modules=request.param)
    with closing(launcher), socket.socket(socket.AF_UNIX) as listener:
        address = str(tmp_path / "s")
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(120)
        launcher.open()
        told = launcher.load_ops([], lambda message: None)
        rank = launcher.launch("tests.workers.cuda_rank", address, 0)
        with listener.accept()[0] as sock:
            sock.settimeout(120)
            said, inside = int(sock.recv(16)), own_pid(rank)
        # OpenBLAS ends its own before a fork (pthread_atfork(3))
        threads = len(os.listdir(f"/proc/{launcher.server}/task"))
        yield Forked(own_pid(launcher.server), threads, told["fork_safe"], inside, said)


@pytest.mark.slow
@pytest.mark.parametrize("forked", [[]], ids=["preloaded"], indirect=True)
def test_the_fork_server_preloads_all_modules_and_leaves_cuda_to_its_ranks(cuda: Cuda, forked: Forked) -> None:
    assert "deepspeed.runtime.zero.muon.muon_optimizer" in PRELOADED
    assert forked.fork_safe
    assert forked.said == SUCCESS
    assert forked.threads == 1
    calls = cuda.calls()
    assert forked.server not in [call.pid for call in calls], calls
    checked, own = calls
    assert CHECKS_THE_FORK in checked.stack
    assert own.pid == forked.rank
    assert "in become" in own.stack


@pytest.mark.slow
@pytest.mark.parametrize("forked", [["tests.workers.waking"]], ids=["waking"], indirect=True)
def test_a_preloaded_module_that_wakes_cuda_or_starts_a_thread_is_found(cuda: Cuda, forked: Forked) -> None:
    """What the other tests look for can be seen."""
    assert forked.threads == 2
    assert not forked.fork_safe
    assert forked.said == NOT_INITIALIZED
    first = cuda.calls()[0]
    assert first.pid == forked.server
    assert "tests/workers/waking.py" in first.stack


@pytest.mark.slow
def test_tuner_and_tracer_leave_cuda_to_ranks(cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole call. torch of this environment may know no CUDA: then the ranks fail, which is not what is asked here."""
    command = [sys.executable, "-m", "autotune", "run", "--model", "tiny-llama", "--device", "cuda", "--gpus", "1"]
    command += "--seq-len 32 --global-batch-size 2 --max-trials 1 --budget 90s --space space.yaml --study s".split()
    builds_no_op = "knobs: {zero_stage: [0], train_micro_batch_size_per_gpu: [1]}"
    (tmp_path / "space.yaml").write_text(builds_no_op)
    cuda.log = tmp_path / "runs" / "s" / "cuda.log"  # a contained fork server writes there alone
    os.makedirs(cuda.log.parent)
    monkeypatch.setenv(CUDA_LOG, str(cuda.log))
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    said = done.stdout + done.stderr
    assert "NVIDIA H100" in said
    assert list((tmp_path / "cache").rglob("*.json")), "a trace was made"
    calls = cuda.calls()
    assert any(CHECKS_THE_FORK in call.stack for call in calls), said[-3000:]
    for call in calls:
        assert CHECKS_THE_FORK in call.stack or "in become" in call.stack, call.stack
