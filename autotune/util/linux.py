"""/proc, prctl, and cleanup of descendant processes."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

# -- linux -------------------------------------------------------------------------------------------------------------
#
# Kernel interface for memory and processes, in the standard library alone.
#
# The tuner uses psutil for more than this. Ranks, the fork server and the tracer run in the user's training
# environment, which need not have psutil, and use this module.

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # signals that give notice, and kill a process without a handler
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_DEAD = ("Z", "X")  # states of a process that has ended: proc_pid_stat(5)
_MEMORY_BLOCKS = Path("/sys/devices/system/memory")
_PAGE_TABLE_SHARE = 1 / 64  # share of all memory: the kernel describes a page of 4096 bytes by 64
_LEAST_GROWTH = 0.1  # share of the plugged memory; the kernel and the firmware keep up to this
_LONGEST_NAME = 15  # bytes of a name that the kernel keeps


class MainMemory(NamedTuple):
    """The machine's memory in bytes, regardless of cgroups."""

    total: int
    available: int  # without swapping; includes page cache that the kernel can reclaim


def main_memory() -> MainMemory:
    """Return the sizes in /proc/meminfo, plus plugged memory that the kernel has not yet put to use.

    MemTotal of some virtual machines starts small and grows: their kernel initialises pages on demand, or a balloon returns them.
    Memory blocks in sysfs show all of it from the start. Nothing is cached, so that a later call sees memory that was plugged in
    since.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    sizes = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    total, available = int(sizes["MemTotal:"]) * 1024, int(sizes["MemAvailable:"]) * 1024
    growth = _growth_bytes(total)
    return MainMemory(total + growth, available + growth)


def _growth_bytes(total_bytes: int) -> int:
    """Return the bytes by which MemTotal can grow without new hardware.

    The result is 0 if sysfs does not show more, or if /proc/meminfo is a container's own file (lxcfs).
    """
    plugged = 0
    with suppress(OSError, ValueError):
        if os.stat("/proc/meminfo").st_dev == os.stat("/proc").st_dev:
            # the folder's number of links changes with its blocks
            plugged = _plugged_bytes(_MEMORY_BLOCKS, os.stat(_MEMORY_BLOCKS).st_nlink)
    growth = int(plugged * (1 - _PAGE_TABLE_SHARE)) - total_bytes
    return growth if growth > _LEAST_GROWTH * plugged else 0


@functools.lru_cache(maxsize=4)
def _plugged_bytes(folder: Path, links: int) -> int:
    """Return the size of all memory blocks that are online (Linux, Documentation/ABI/testing/sysfs-devices-memory)."""
    block_bytes = int((folder / "block_size_bytes").read_text(encoding="utf-8"), 16)
    return block_bytes * sum(
        state.read_text(encoding="utf-8").strip() == "online" for state in folder.glob("memory*/state")
    )


def boot_id() -> str:
    """Return an id of this boot of this machine, equal in all its containers; empty if the kernel gives none."""
    with suppress(OSError):
        return _text("/proc/sys/kernel/random/boot_id").strip()
    return ""


def runs(pid: int) -> bool:
    """Check that a process exists and has not ended."""
    try:
        return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] not in _DEAD
    except (OSError, IndexError):
        return False


def catches(pid: int, number: signal.Signals) -> bool:
    """Check that a running process has a handler for the signal: proc_pid_status(5), `SigCgt`."""
    with suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def started_at(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot; 0 if it is gone.

    Together with the process id it identifies a process, since ids are reused.
    """
    try:
        state, *fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return 0 if state in _DEAD else int(fields[18])  # field 22: proc_pid_stat(5)
    except (OSError, IndexError, ValueError):
        return 0


def name_of(pid: int) -> str | None:
    """Return a process's name, in full if its command line has it; None if it is gone or another user's."""
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n")
        if len(name) >= _LONGEST_NAME:  # cut by the kernel, perhaps in the middle of a character
            longer = os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])
            name = longer if longer.startswith(name) else name
    except OSError:
        return None
    return name.decode(errors="replace")


def is_open(file: Path) -> bool:
    """Check that a visible process of this machine has the file open."""
    path = os.path.realpath(file)
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # gone, or another user's
            for descriptor in folder.iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) == path:
                        return True
    return False


def descendants(*pids: int) -> list[int]:
    """Return the ids of all running descendants of these processes; /proc is read once."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        with suppress(OSError, IndexError, ValueError):
            state, parent = _text(f"/proc/{one}/stat").rpartition(")")[2].split()[:2]
            if state not in _DEAD:
                children.setdefault(int(parent), []).append(one)
    found = [child for pid in dict.fromkeys(pids) for child in children.get(pid, ())]
    for one in found:  # the list grows during the loop
        found += children.get(one, ())
    return found


def working_in(folder: Path) -> list[int]:
    """Return the ids of other processes whose working directory is the folder."""
    path, found = os.path.realpath(folder), []
    for pid in _pids():
        with suppress(OSError):  # gone, or another user's
            if pid != os.getpid() and os.readlink(f"/proc/{pid}/cwd") == path:
                found.append(pid)
    return found


def _text(file: str) -> str:
    """Read a file whose 15-byte names may end in the middle of a character."""
    return Path(file).read_text(errors="replace", encoding="utf-8")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent dies, so that a killed tuner leaves no orphan.

    If the parent is already dead, the signal is sent now: the kernel does not report a death that precedes this call. The parent
    is the thread that started this process (prctl(2)), so that a thread that starts ranks or a fork server has to outlive them.

    Args:
        parent: the process id of the starter of this process, direct or through a wrapper script of an interpreter.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, number)
    if os.getppid() != parent and not runs(parent):
        os.kill(os.getpid(), number)


def outlive_notices() -> None:
    """Ignore SIGUSR1 and SIGUSR2 until this process has a handler for them.

    Slurm's `--signal=USR1@600` and `scancel --signal=USR1` may send them to every process of a step. The kernel's setting
    changes, but not Python's: `signal.getsignal` still returns the default. Lightning and other libraries check that before they
    install the handler that saves a checkpoint.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in NOTICES:
        libc.signal(number, int(signal.SIG_IGN))


def adopt_orphans() -> None:
    """Adopt the running children of a dead child, such as a data loader's worker with its own session."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_SUBREAPER, 1)


def own_memory() -> None:
    """Copy the memory shared with the fork's parent, all at once and in order.

    Pages that are copied one by one, on write, end up scattered over physical memory. Training is then 3 to 5 % slower than in a
    process that imported everything itself (`docs/architecture.md`). Linux before 5.14 does not support this.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError, ValueError):
        for low, high in _shared_with_parent():
            libc.madvise(low, high - low, _POPULATE_WRITE)


def _shared_with_parent() -> list[tuple[int, int]]:
    """Return address ranges of private memory that is mostly still shared: proc_pid_smaps(5).

    Untouched memory is left out, since copying it would count as used memory.
    """
    found, low, high = [], 0, 0
    for line in _text("/proc/self/smaps").splitlines():
        first, second, *_ = line.split()
        if not first.endswith(":"):
            low, high = (int(address, 16) for address in first.split("-")) if second == "rw-p" else (0, 0)
        elif first == "Shared_Dirty:" and int(second) * 1024 > (high - low) / 2 > 0:
            found.append((low, high))
    return found


# -- descendant cleanup ------------------------------------------------------------------------------------------------
#
# Kill all descendants (compilers) when a build process is terminated.
#
# Compilers would otherwise run to their end. The module runs in ranks too, so it uses `autotune.util.linux`.

BUILD_GRACE_SECONDS = 0.2  # seconds between SIGTERM, at which a compiler removes its temporary files, and SIGKILL
_LOOK_SECONDS = 0.02


@contextmanager
def taking_all_along() -> Iterator[None]:
    """Terminate this process with all its descendants at SIGTERM, or when the parent dies."""
    adopt_orphans()  # descendants of a dead child are found too
    before = signal.signal(signal.SIGTERM, _leave_with_all)
    die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_with_all(number: int, frame: object) -> None:
    started = descendants(os.getpid())
    _tell(started, signal.SIGTERM)
    until = time.monotonic() + BUILD_GRACE_SECONDS
    while any(runs(pid) for pid in started) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    while left := descendants(os.getpid()):
        _tell(left, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    os._exit(128 + number)


def _tell(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
