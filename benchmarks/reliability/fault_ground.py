"""Where faults are planted: a folder that sees everything which a run starts and leaves, and the means to break it."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

TOKEN = "AUTOTUNE_FAULTS"  # a variable that every process of this run inherits
CLOCK = "AUTOTUNE_FAULTS_CLOCK"  # the file in which stands by how much the wall clock is wrong, in seconds
SITECUSTOMIZE = f"""import os, time
real, path = time.time, os.environ.get("{CLOCK}")
def shifted():
    try:
        with open(path) as file:
            return real() + float(file.read() or 0)
    except (OSError, ValueError):
        return real()
if path:
    time.time = shifted
"""
GOING_SECONDS = 5.0  # until what was ended is gone: the kernel takes memory back first
# DeepSpeed makes it where its own launcher has set LOCAL_SIZE, which no rank of these studies has, and never removes it
# (csrc/cpu/comm/shm.cpp of 0.19.8): it is left by another program of this machine, such as DeepSpeed's autotuner.
_OF_ITS_LAUNCHER = "deepspeed_allreduce_buffer_"


@dataclass
class Found:
    """What one episode has shown."""

    faults: list[dict[str, Any]] = field(default_factory=list)  # rows of a result
    violations: list[str] = field(default_factory=list)

    def add(self, kind: str, phase: str, outcome: str = "", rank: int = 0, share: float = 0.0) -> dict[str, Any]:
        """A fault that was planted; its row, whose `seconds` until work goes on may follow."""
        row = {"kind": kind, "phase": phase, "rank": rank, "share": share, "outcome": outcome, "seconds": None}
        self.faults.append(row)
        return row


# -- where ---------------------------------------------------------------------------------------------------------------


class Ground:
    """A folder for everything that a run makes: on a small file system of its own where this machine allows one."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="faults-"))
        words = ["mount", "-t", "tmpfs", "-o", "size=512m", "faults", str(self.root)]
        self.mounted = subprocess.run(words, capture_output=True).returncode == 0
        self.temporary = self.root / "tmp"
        self.temporary.mkdir()
        (self.root / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self.clock = self.root / "clock"
        self.clock.write_text("0")
        self._wrong_seconds, real = 0.0, time.time
        time.time = lambda: real() + self._wrong_seconds
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH")]))
        os.environ.update(
            {TOKEN: str(self.root), CLOCK: str(self.clock), "TMPDIR": str(self.temporary), "PYTHONPATH": path}
        )
        tempfile.tempdir = str(self.temporary)
        self._segments = set(os.listdir("/dev/shm"))
        means = {"host memory: cgroup": self._try_group, "database: read-only": self._try_read_only}
        self.forbidden = {kind for kind, attempt in means.items() if not allowed(attempt)}

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.root)], check=False)
        else:
            subprocess.run(["rm", "-rf", str(self.root)], check=False)
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def _try_group(self) -> None:
        limited_group("try", 8 * 2**20).rmdir()

    def _try_read_only(self) -> None:
        with read_only(self.clock):
            pass

    def shift_clock(self, seconds: float) -> None:
        """The wall clock of this process, and of those that it starts, is wrong by so much from now on."""
        self._wrong_seconds = seconds
        self.clock.write_text(str(seconds))

    # -- what is left ----------------------------------------------------------------------------------------------------

    def processes(self, besides: set[int]) -> list[psutil.Process]:
        """Living processes of this run, beside this one, those and their parents.

        A fork server's parent waits for the end of its namespace.
        """
        kept, found = {os.getpid(), *besides}, []
        for pid in besides:
            with contextlib.suppress(psutil.Error):
                kept.add(psutil.Process(pid).ppid())
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(TOKEN) == str(self.root) and process.pid not in kept
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def leftovers(self, besides: set[int], trials: Path | None = None, sockets: bool = True) -> list[str]:
        """What is left when nothing runs: processes, sockets, shared memory, files of a trial that are no logs.

        Args:
            besides: process ids of what may live.
            sockets: False after a tuner was killed: what it left goes with the next call.
        """
        until = time.monotonic() + GOING_SECONDS
        while (left := self._left(besides, trials, sockets)) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _left(self, besides: set[int], trials: Path | None, sockets: bool) -> list[str]:
        words = []
        for process in self.processes(besides):
            with contextlib.suppress(psutil.Error):  # it ends now
                words.append(f"process {process.pid} is left: {' '.join(process.cmdline()[3:6])}")
        words += [f"temporary {path.name} is left" for path in self.temporary.glob("autotune-*") if sockets]
        new = {name for name in set(os.listdir("/dev/shm")) - self._segments if not name.startswith(_OF_ITS_LAUNCHER)}
        in_use = {name for name in new if not used_by_others(name, str(self.root))}
        words += [f"shared memory {name} is left" for name in sorted(in_use)]
        if trials is not None and trials.is_dir():
            found = [*trials.glob("*/*"), *trials.parent.glob("scratch*")]
            words += [f"file {path.name} is left" for path in found if path.suffix != ".log"]
        return words


def allowed(attempt: Callable[[], None]) -> bool:
    """Whether this machine lets it be done."""
    try:
        attempt()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def used_by_others(name: str, token: str) -> bool:
    """Whether a shared-memory segment is mapped by a process that is none of this run's, or is gone meanwhile. It is told by its
    inode: glibc makes a semaphore under another name, which its maker's map keeps, and links it to its own."""
    try:
        inode = str((Path("/dev/shm") / name).stat().st_ino)
    except OSError:
        return True
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            lines = [
                line.split(maxsplit=5)
                for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
            ]
            maps = any(words[4] == inode and words[5:] and words[5].startswith("/dev/shm/") for words in lines)
            if maps and process.environ().get(TOKEN) != token:
                return True
    return False


# -- means ---------------------------------------------------------------------------------------------------------------


def limited_group(name: str, most_bytes: int) -> Path:
    """A new cgroup, of either version, whose memory is limited.

    Raises:
        OSError: this machine does not allow one.
    """
    first = Path("/sys/fs/cgroup/memory")
    folder, file = (first, "memory.limit_in_bytes") if first.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = folder / f"autotune-faults-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / file).write_text(str(most_bytes))
    except OSError:
        group.rmdir()
        raise
    return group


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """A file that not even root can write, in a folder where nothing can be made.

    Raises:
        CalledProcessError: this machine does not allow it.
    """
    both = [str(path), str(path.parent)]  # a connection that is open may write the file all the same
    try:
        subprocess.run(["chattr", "+i", *both], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["chattr", "-i", *both], check=False, capture_output=True)


@contextlib.contextmanager
def away(path: Path) -> Iterator[None]:
    """A file that is gone for a while; what is made in its place goes."""
    elsewhere = path.with_name(f"{path.name}.away")
    path.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.replace(path)


@contextlib.contextmanager
def full(ground: Ground, path: Path) -> Iterator[None]:
    """No byte can be written any more: the file system is full, or this process may not let a file grow."""
    if ground.mounted:
        filler = ground.root / "filler"
        with filler.open("wb", buffering=0) as file:
            for block in (b"x" * 2**20, b"x" * 4096):
                with contextlib.suppress(OSError):
                    while file.write(block):
                        pass
        try:
            yield
        finally:
            filler.unlink()
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def locked(path: Path, seconds: float | None) -> Iterator[None]:
    """Another process writes, for so long, or until the end where that is None."""
    if path.suffix == ".journal":
        lock = Path(f"{path}.lock")
        lock.touch(exist_ok=False)
        timer = threading.Timer(seconds or 2.0, lambda: lock.unlink(missing_ok=True))
        timer.start()
        try:
            yield
        finally:
            timer.join()
        return
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    connection.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(seconds if seconds is not None else 600.0, connection.close)
    timer.start()
    try:
        yield
    finally:
        if seconds is not None:
            timer.join()
        timer.cancel()
        connection.close()


def gone(group: Path) -> None:
    """Removes a cgroup: what is in it goes back where it came from, or is ending."""
    until = time.monotonic() + GOING_SECONDS
    while group.exists() and time.monotonic() < until:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()
        time.sleep(0.02)
