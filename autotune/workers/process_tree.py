"""End a group of ranks with all descendants, including those that survive their parent's death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from autotune.util.linux import BUILD_GRACE_SECONDS, descendants

KILL_GRACE_SECONDS = 2.0  # seconds between SIGTERM and SIGKILL
KILL_SECONDS = 10.0  # seconds that a process group may take to end after SIGKILL
REAP_SECONDS = 5.0  # seconds until a killed process is reaped
EXEC_SECONDS, _YOUNG_SECONDS = 0.5, 30.0  # longest `exec` on a busy machine; age up to which it may run


def end_ranks(
    pids: list[int], status: Callable[[int], int | None], strays: Callable[[], list[psutil.Process]]
) -> list[psutil.Process]:
    """End the ranks and all their descendants.

    The kernel may keep a process after SIGKILL, while it frees a hundred GiB of pinned memory or waits in a dead
    driver.

    Args:
        status: returns the exit code of a rank, and reaps it.
        strays: returns the processes that dead ranks left running.

    Returns:
        The processes that the kernel has not released; empty if nothing is left.
    """
    # Only living ranks are listed, because the pid of a reaped one may be reused.
    ranks = processes(pid for pid in pids if status(pid) is None)
    started = descendant_processes(*(rank.pid for rank in ranks))
    end_groups(pids, status)
    started += strays()
    for process in started:
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs([process for process in started if process.is_running()], timeout=KILL_GRACE_SECONDS)
    for process in (*ranks, *started):  # includes processes and ranks that left their process group
        with suppress(psutil.Error):
            if _runs(process):
                process.kill()
    until = time.monotonic() + REAP_SECONDS
    while any(status(pid) is None for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    psutil.wait_procs([process for process in started if process.is_running()], timeout=REAP_SECONDS)
    return [process for process in (*ranks, *started) if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the existing processes among these pids."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def descendant_processes(*pids: int) -> list[psutil.Process]:
    """Return all descendants of these processes with a single scan of /proc."""
    return processes(descendants(*pids))


def end_groups(pids: list[int], status: Callable[[int], int | None]) -> None:
    """Send SIGTERM to every rank's process group, and SIGKILL after the grace period."""
    for number, patience in ((signal.SIGTERM, KILL_GRACE_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for pid in pids:
                if status(pid) is not None:  # reaps the process of a cold start
                    _reap_group(pid)
            if not any(_group_lives(pid) for pid in pids):
                return
            time.sleep(0.01)


def _reap_group(pid: int) -> None:
    """Reap the remaining processes in an ended rank's process group.

    PID 1 of a container adopts orphans, and zombies would keep the group alive.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-pid, os.WNOHANG)[0]:
            pass


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_processes_with_variable(variable: str, value: str) -> None:
    """End every process started with `variable` at this value in its environment, and its new children.

    SIGTERM comes first, at which a compiler removes its temporary files, then SIGKILL.
    """
    found = processes_with_variable(variable, value)
    for process in found:
        with suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(found, timeout=BUILD_GRACE_SECONDS)
    for process in (*left, *processes_with_variable(variable, value)):
        with suppress(psutil.Error):
            process.kill()


def processes_with_variable(variable: str, value: str) -> list[psutil.Process]:
    """Return this user's processes that were started with `variable` at this value in their environment.

    Processes during `exec` have no environment yet, so they are polled for up to half a second.
    """
    found: list[psutil.Process] = []
    asked, until = list(psutil.process_iter()), time.monotonic() + EXEC_SECONDS
    while True:
        blank = []
        for process in asked:
            with suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get(variable) == value:
                    found.append(process)
                elif not environment and _is_starting(process):
                    blank.append(process)
        if not blank or time.monotonic() > until:
            return found
        asked = blank
        time.sleep(0.002)


def _is_starting(process: psutil.Process) -> bool:
    """Return True if the process may be in the middle of `exec`.

    Kernel threads, of which a busy machine creates many, never are. They have no environment and no executable.
    """
    return time.time() - process.create_time() < _YOUNG_SECONDS and bool(process.exe())
