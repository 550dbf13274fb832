"""What the kernel itself tells of memory and processes, and what it is asked to do for ours.

The tuner asks psutil for more than this. Ranks, the fork server and the tracer run in the environment that people train in,
which need not have psutil: they ask here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # say something, and end whatever does not expect them
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_DEAD = ("Z", "X")  # states of a process that has ended: proc_pid_stat(5)
_MEMORY_BLOCKS = Path("/sys/devices/system/memory")
_PAGE_TABLE_SHARE = 1 / 64  # of all memory: the kernel describes a page of 4096 bytes by 64
_LEAST_GROWTH = 0.1  # share of the plugged memory; less is what the kernel and the firmware keep
_LONGEST_NAME = 15  # bytes of a name that the kernel keeps


class MainMemory(NamedTuple):
    """The machine's, in bytes, whatever a cgroup leaves of it."""

    total: int
    available: int  # without swapping, page cache that would be given back included


def main_memory() -> MainMemory:
    """Return what /proc/meminfo shows, and what the kernel has not yet put to use of the memory that is plugged in.

    MemTotal of some virtual machines starts small and grows: their kernel initialises pages when they are needed, or a
    balloon gives them back. Memory blocks in sysfs show all of it from the start. Nothing is cached: a later call sees
    memory that was plugged in meanwhile.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    sizes = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    total, available = int(sizes["MemTotal:"]) * 1024, int(sizes["MemAvailable:"]) * 1024
    growth = _growth_bytes(total)
    return MainMemory(total + growth, available + growth)


def _growth_bytes(total_bytes: int) -> int:
    """Return by how much MemTotal can grow without new hardware; 0 if sysfs does not show more, or if /proc/meminfo is a
    container's own file (lxcfs)."""
    plugged = 0
    with suppress(OSError, ValueError):
        if os.stat("/proc/meminfo").st_dev == os.stat("/proc").st_dev:
            # the number of links of the folder changes with its blocks
            plugged = _plugged_bytes(_MEMORY_BLOCKS, os.stat(_MEMORY_BLOCKS).st_nlink)
    growth = int(plugged * (1 - _PAGE_TABLE_SHARE)) - total_bytes
    return growth if growth > _LEAST_GROWTH * plugged else 0


@functools.lru_cache(maxsize=4)
def _plugged_bytes(folder: Path, links: int) -> int:
    """Return the size of all memory blocks that are online (Linux, Documentation/ABI/testing/sysfs-devices-memory)."""
    block_bytes = int((folder / "block_size_bytes").read_text(), 16)
    return block_bytes * sum(state.read_text().strip() == "online" for state in folder.glob("memory*/state"))


def boot_id() -> str:
    """Names this boot of this machine, alike in all its containers; empty where the kernel does not say."""
    with suppress(OSError):
        return _text("/proc/sys/kernel/random/boot_id").strip()
    return ""


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] not in _DEAD
    except (OSError, IndexError):
        return False


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process that is there has a handler for the signal: proc_pid_status(5), `SigCgt`."""
    with suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def started_at(pid: int) -> int:
    """When a process that is there began, in clock ticks since the machine did; 0 where it is gone. With its id it names a
    process, since ids are given again."""
    try:
        state, *fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return 0 if state in _DEAD else int(fields[18])  # the 22nd of all: proc_pid_stat(5)
    except (OSError, IndexError, ValueError):
        return 0


def name_of(pid: int) -> str | None:
    """A process's name, in full where its command line has it; None where it is gone or another's."""
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n")
        if len(name) >= _LONGEST_NAME:  # cut, perhaps in the middle of a character
            longer = os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])
            name = longer if longer.startswith(name) else name
    except OSError:
        return None
    return name.decode(errors="replace")


def is_open(file: Path) -> bool:
    """Whether a process of this machine that we may look into has the file open."""
    path = os.path.realpath(file)
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # gone, or another user's
            for descriptor in folder.iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) == path:
                        return True
    return False


def descendants(*pids: int) -> list[int]:
    """The process ids of what these processes have started and that runs still, and of what these have; /proc is read once."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        with suppress(OSError, IndexError, ValueError):
            state, parent = _text(f"/proc/{one}/stat").rpartition(")")[2].split()[:2]
            if state not in _DEAD:
                children.setdefault(int(parent), []).append(one)
    found = [child for pid in dict.fromkeys(pids) for child in children.get(pid, ())]
    for one in found:  # which grows meanwhile
        found += children.get(one, ())
    return found


def working_in(folder: Path) -> list[int]:
    """The process ids of what has the folder as its working directory, this process aside."""
    path, found = os.path.realpath(folder), []
    for pid in _pids():
        with suppress(OSError):  # gone, or another user's
            if pid != os.getpid() and os.readlink(f"/proc/{pid}/cwd") == path:
                found.append(pid)
    return found


def _text(file: str) -> str:
    """A name of 15 bytes may end in the middle of a character."""
    return Path(file).read_text(errors="replace", encoding="utf-8")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process a signal when its parent dies: a killed tuner leaves no orphan. It gets the signal now where
    the parent is dead already, of which the kernel tells nobody: it was killed while this process began. To the kernel the thread
    that has started this process is the parent (prctl(2)): one that starts ranks or a fork server has to outlive them.

    Args:
        parent: the process id of what has started this process, directly or by a script that stands for an interpreter.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, number)
    if os.getppid() != parent and not runs(parent):
        os.kill(os.getpid(), number)


def outlive_notices() -> None:
    """SIGUSR1 and SIGUSR2 end this process no more, until it has a handler for them: Slurm's `--signal=USR1@600` and `scancel
    --signal=USR1` may send them to every process of a step.

    The kernel is told, and Python is not: `signal.getsignal` goes on to say that nobody has taken the signal, by which Lightning
    and others decide whether to set the handler that they save upon.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in NOTICES:
        libc.signal(number, int(signal.SIG_IGN))


def adopt_orphans() -> None:
    """What a dead child leaves running becomes this process's child: a data loader's worker with a session of its own."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_SUBREAPER, 1)


def own_memory() -> None:
    """Copies, all at once and in order, what this process shares with the one that it was forked from. Copied page by page as it
    happens to be written to, it lies scattered over the machine's memory, and training is 3 to 5 % slower than in a process that
    has imported all itself (`docs/architecture.md`). Linux before 5.14 leaves it as it is."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError, ValueError):
        for low, high in _shared_with_parent():
            libc.madvise(low, high - low, _POPULATE_WRITE)


def _shared_with_parent() -> list[tuple[int, int]]:
    """Addresses of private memory of which most is not yet this process's own: proc_pid_smaps(5). What was never touched stays
    so, since it would count as memory that is used."""
    found, low, high = [], 0, 0
    for line in _text("/proc/self/smaps").splitlines():
        first, second, *_ = line.split()
        if not first.endswith(":"):
            low, high = (int(address, 16) for address in first.split("-")) if second == "rw-p" else (0, 0)
        elif first == "Shared_Dirty:" and int(second) * 1024 > (high - low) / 2 > 0:
            found.append((low, high))
    return found
