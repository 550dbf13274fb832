"""Nothing is left: a group of ranks is ended with all that it has started, and what its parent's death leaves behind, too."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

KILL_GRACE_SECONDS = 2.0


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies: a killed tuner leaves no orphan."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """What a dead child leaves running becomes this process's child: a data loader's worker with a session of its own."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_ranks(pids: list[int], status: Callable[[int], int | None], server: int | None = None) -> None:
    """Ends the ranks and all they have started; back only when nothing of it is left.

    Args:
        status: of a rank; reaps it.
        server: the process that adopts what dead ranks leave running.
    """
    started = [process for pid in pids for process in _below(pid)]
    _kill_groups(pids, status)
    started += _below(server) if server is not None else []
    for process in started:  # what left its rank's process group
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
    psutil.wait_procs([process for process in started if process.is_running()], timeout=5)


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill_groups(pids: list[int], status: Callable[[int], int | None]) -> None:
    """SIGTERM to every rank's process group, SIGKILL after the grace."""
    for number, patience in ((signal.SIGTERM, KILL_GRACE_SECONDS), (signal.SIGKILL, 10.0)):
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for pid in pids:
                status(pid)  # reaps what a cold start left
            if not any(_group_lives(pid) for pid in pids):
                return
            time.sleep(0.01)


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
