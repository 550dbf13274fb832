"""Nothing is left: a group of ranks is ended with all that it has started, and what its parent's death leaves behind, too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from autotune.group.along import BUILD_GRACE_SECONDS
from autotune.linux import descendants

KILL_GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 10.0  # for a process group after SIGKILL
REAP_SECONDS = 5.0  # for a killed process to be gone
EXEC_SECONDS, _YOUNG_SECONDS = 0.5, 30.0  # how long `exec` may take on a busy machine, of a process that is so young


def end_ranks(
    pids: list[int], status: Callable[[int], int | None], strays: Callable[[], list[psutil.Process]]
) -> list[psutil.Process]:
    """Ends the ranks and all they have started; returns when nothing of it is left, or with what the kernel does not let go:
    a process that frees a hundred GiB of pinned memory, or sits in a dead driver, is in no hurry after SIGKILL.

    Args:
        status: of a rank; reaps it.
        strays: what dead ranks have left running.
    """
    # of those that live: the number of one that was waited for may be somebody else's by now
    ranks = processes(pid for pid in pids if status(pid) is None)
    started = below(*(rank.pid for rank in ranks))
    _kill_groups(pids, status)
    started += strays()
    for process in started:
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs([process for process in started if process.is_running()], timeout=KILL_GRACE_SECONDS)
    for process in (*ranks, *started):  # what left its process group, ranks among them
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
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
    """Those that are there."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def below(*pids: int) -> list[psutil.Process]:
    """Everything that descends from these processes; /proc is read once, however many they are."""
    return processes(descendants(*pids))


def _kill_groups(pids: list[int], status: Callable[[int], int | None]) -> None:
    """SIGTERM to every rank's process group, SIGKILL after the grace."""
    for number, patience in ((signal.SIGTERM, KILL_GRACE_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for pid in pids:
                if status(pid) is not None:  # which reaps what a cold start left
                    _reap_group(pid)
            if not any(_group_lives(pid) for pid in pids):
                return
            time.sleep(0.01)


def _reap_group(pid: int) -> None:
    """Reaps what an ended rank has left in its process group to this process: PID 1 of a container adopts orphans, and
    zombies would keep the group alive."""
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


def end_marked(variable: str, value: str) -> None:
    """Ends every process that was started with `variable` at this value in its environment, and what it starts meanwhile:
    SIGTERM, upon which a compiler removes its temporary files, then SIGKILL."""
    found = marked(variable, value)
    for process in found:
        with suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(found, timeout=BUILD_GRACE_SECONDS)
    for process in (*left, *marked(variable, value)):
        with suppress(psutil.Error):
            process.kill()


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Processes of this user that were started with `variable` at this value in their environment. Those in the middle of
    `exec` have none yet: they are asked again, half a second in all."""
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
    """Whether it may be in the middle of `exec`. Threads of the kernel never are, of which a busy machine makes many: they have
    no environment either, and no executable."""
    return time.time() - process.create_time() < _YOUNG_SECONDS and bool(process.exe())
