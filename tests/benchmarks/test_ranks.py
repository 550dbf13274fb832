"""Trainings without autotune: where torchrun's ranks meet, and how a command that hangs is ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.util.linux import pid_is_alive
from benchmarks.trials import ranks
from tests.conftest import wait_until

_HANGS = """
import subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(own.pid))
print("about to hang", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_with_its_ranks(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(RuntimeError, match=r"not done in 5 s\nabout to hang"):
        ranks.run_limited([sys.executable, "-c", _HANGS, str(pid)], 5)
    wait_until(lambda: not pid_is_alive(int(pid.read_text())), "the end of a process in a session of its own")


@pytest.mark.slow
def test_ranks_of_torchrun_meet_at_the_loopback_address(tmp_path: Path) -> None:
    """The host's name need not resolve."""
    script = tmp_path / "rank.py"
    script.write_text("import os; print('MET AT', os.environ['MASTER_ADDR'])")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*ranks.torchrun_words(1), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert "MET AT 127.0.0.1" in done.stdout, done.stderr[-2000:]
