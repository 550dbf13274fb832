"""Calls of `autotune run` in processes of their own, for what kills and hinders them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "autotune"]
RUN = ["--device", "cpu", "--gpus", "2", "--model", "tiny-llama", "--seq-len", "32", "--space", "faults.yaml"]
RUN += ["--study", "s", "--budget", "5m", "--exhaustive", "--no-references"]
WAIT_SECONDS = 120.0  # for a process to come as far as it is struck


def wait_for(true: Callable[[], Any], seconds: float = WAIT_SECONDS) -> bool:
    """Whether it became true in time."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def last_line(folder: Path) -> str:
    lines = (folder / "call.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def start(folder: Path, *options: str, **env: str) -> subprocess.Popen[bytes]:
    words = [*COMMAND, "run", *RUN, *options]
    with (folder / "call.log").open("ab") as log:
        return subprocess.Popen(
            words, cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True
        )


def trial_folders(folder: Path) -> int:
    return len(list(folder.glob("runs/s/trials/*")))
