"""Life seen from outside: what processes compute, read and write."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune.workers.host_workers import LivenessCheck

BUSY = {
    "computes": "while True: pass",
    "writes": "f = open('/dev/null', 'wb', 0)\nimport time\nwhile True: f.write(bytes(2**20)); time.sleep(0.05)",
    "has a child that computes": "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', "
    "'import os\\nparent = os.getppid()\\nwhile os.getppid() == parent: pass'])\ntime.sleep(600)",
}


@contextmanager
def running(code: str) -> Iterator[int]:
    """A process whose interpreter has come up."""
    up = ["-c", f"print(flush=True)\n{code}"]
    with subprocess.Popen([sys.executable, *up], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def seen_alive(vitals: LivenessCheck, pid: int, waiting: tuple[int, ...] = (), looks: int = 10) -> bool:
    return any(vitals.made_progress([pid], waiting) for _ in range(looks) if time.sleep(0.3) is None)


@pytest.mark.few(1)
@pytest.mark.parametrize("code", BUSY.values(), ids=BUSY)
def test_what_gets_on_is_alive(code: str) -> None:
    with running(code) as pid:
        assert seen_alive(LivenessCheck(), pid, (pid,) * (code != BUSY["computes"]))


@pytest.mark.slow
def test_what_sleeps_is_not_and_neither_is_what_is_gone() -> None:
    with running("import time; time.sleep(600)") as pid:
        vitals = LivenessCheck()
        assert not vitals.made_progress([pid]), "the first look only begins to compare"
        assert not seen_alive(vitals, pid, looks=4)
    assert not seen_alive(vitals, pid, looks=2)


def test_spinning_in_a_collective_is_no_life_but_a_busy_device_is() -> None:
    with running("while True: pass") as pid:
        assert not seen_alive(LivenessCheck(), pid, (pid,), looks=4)
        assert seen_alive(LivenessCheck(busy=lambda: True), pid, (pid,), looks=2)
