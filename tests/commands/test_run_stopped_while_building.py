"""`autotune run` and `autotune launch`, stopped while DeepSpeed's ops are built: real signals, real processes."""

import os
import pty
import signal
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import psutil
import pytest

from tests.compilers import SlowCompiler
from tests.conftest import SCRIPTS, wait_until

AUTOTUNE = [sys.executable, "-m", "autotune"]
ON_CPU = ["--device", "cpu", "--gpus", "1"]
MODEL = ["run", "--model", "tiny-llama", *ON_CPU, "--seq-len", "32"]


@pytest.fixture
def compiler(tmp_path: Path) -> SlowCompiler:
    made = SlowCompiler(tmp_path / "compiler", sysconfig.get_path("include"))
    made.slow.touch()
    return made


def stopped(compiler: SlowCompiler, folder: Path, number: signal.Signals, *words: str) -> tuple[int, str]:
    """Exit code and output of a command that has the signal while compilers work."""
    process = subprocess.Popen(
        [*AUTOTUNE, *words],
        cwd=folder,
        env=compiler.environment(folder / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: compiler.at_work, "a compiler works")
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert not compiler.at_work
    assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return process.returncode, out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ends_with_its_compilers(tmp_path: Path, compiler: SlowCompiler, number: signal.Signals) -> None:
    code, out = stopped(compiler, tmp_path, number, *MODEL)
    assert code == 130
    assert "building DeepSpeed's ShareMemComm" in out
    assert out.strip().splitlines()[-1] == "autotune: stopped before anything was measured"


@pytest.mark.slow
def test_a_launch_builds_first_and_is_stopped(tmp_path: Path, compiler: SlowCompiler) -> None:
    given = ["launch", "--model", "tiny-llama", *ON_CPU, "--seq-len", "32", "--global-batch-size", "2"]
    code, out = stopped(compiler, tmp_path, signal.SIGTERM, *given, "--", str(SCRIPTS / "plain.py"))
    assert code == 128 + signal.SIGTERM
    assert "building DeepSpeed's ShareMemComm" in out
    assert "Traceback" not in out


@pytest.mark.slow
def test_the_live_view_says_what_is_built(tmp_path: Path, compiler: SlowCompiler) -> None:
    ours, theirs = pty.openpty()
    env = {**compiler.environment(tmp_path / "home"), "TERM": "xterm", "COLUMNS": "140", "LINES": "30"}
    process = subprocess.Popen([*AUTOTUNE, *MODEL], cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                seen.extend(os.read(ours, 4096))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_until(lambda: b"ShareMemComm" in seen and b"so far" in seen, "the view shows it")
    finally:
        process.terminate()
        process.wait(60)
    reader.join(60)
    assert not compiler.at_work
