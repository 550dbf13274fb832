"""Load DeepSpeed's JIT ops, and build those that this environment lacks.

torch guards every build by a lock file and waits for it without limit. A killed build leaves its lock, and then every
process that needs the op hangs: training, DeepSpeed's own tuner, `ds_report`.

autotune's builds also hold a kernel lock, which ends with its holder, so only one of two tuners builds. The tuner that
follows a killed build detects it, ends its remains and resumes it, since ninja keeps compiled files.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autotune.group import extensions
from autotune.linux import boot_id, is_open, runs, working_in

LIVELY_SECONDS = 120.0  # a folder with a more recent change may be building on another host with the same home
_LOOK_SECONDS = 0.1
_KILL_SECONDS = 5.0  # time for a killed compiler to be reaped

Tell = Callable[..., None]  # receives `op`, `state` (waiting, building, loading, done, failed) and details


def load_ops(names: list[str], tell: Tell = lambda **said: None) -> dict[str, str]:
    """Load the DeepSpeed ops of the named builders, and build missing ones. Return the failed builders with reasons."""
    from deepspeed.accelerator import get_accelerator

    folder = extensions.use_own_folder()
    failed = {}
    for name in names:
        began = time.monotonic()
        try:
            builder = get_accelerator().create_op_builder(name)
            if builder is None or not _wanted(name, builder):
                continue
            built = _load(name, builder, folder, tell)
            tell(op=name, state="done", built=built, seconds=time.monotonic() - began)
        except Exception as error:
            failed[name] = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            tell(op=name, state="failed", seconds=time.monotonic() - began)
    return failed


def _wanted(name: str, builder: Any) -> bool:
    """Return True if DeepSpeed would load the op: CPU ranks do without shared memory on unsupported machines."""
    return name != "ShareMemCommBuilder" or bool(builder.is_compatible(False))


def _load(name: str, builder: Any, folder: Path, tell: Tell) -> bool:
    """Load an op. Return True if this process, or another one during the wait, has built it."""
    if _is_prebuilt(builder.name):
        builder.load(verbose=False)
        return False
    library = folder / builder.name / f"{builder.name}.so"
    before = _written_ns(library)
    seconds = extensions.last_seconds(name, folder)
    with held(folder, builder.name, lambda: tell(op=name, state="waiting", last_seconds=seconds)) as going_on:
        ours = _written_ns(library)
        state = "loading" if ours else "building"
        tell(op=name, state=state, last_seconds=seconds, going_on=going_on)
        began = time.monotonic()
        builder.load(verbose=False)
        took = time.monotonic() - began if _written_ns(library) != ours else None
        with suppress(OSError):  # a full disk; the duration is then unknown
            # A resumed build does not show the duration of a whole one.
            extensions.note_built(name, builder.name, None if going_on and seconds else took, folder)
    return _written_ns(library) != before


def _is_prebuilt(op: str) -> bool:
    """Return True if DeepSpeed loads the library compiled at its installation.

    The condition is that of `OpBuilder.load` (deepspeed/ops/op_builder/builder.py). Ops compiled for another
    accelerator are built again.
    """
    from deepspeed import git_version_info
    from deepspeed.accelerator import get_accelerator

    compiled_for = getattr(git_version_info, "accelerator_name", "")
    return bool(git_version_info.installed_ops.get(op)) and compiled_for == get_accelerator()._name


def _written_ns(path: Path) -> int:
    """Return the time of the file's last write, or 0 if it is missing."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


@contextmanager
def held(folder: Path, op: str, wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold an op's folder against other autotune processes on this machine, without a stale lock of torch.

    Args:
        wait: called once if another process holds the folder.

    Yields:
        True if a build was killed here.
    """
    place, building, boot = folder / op, folder / f".{op}.building", boot_id()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder / f".{op}.lock", wait)
    try:
        # The writer of the mark has ended, because the kernel has released its lock. A mark of another machine proves
        # nothing and stays: locks may not work between machines that share a home.
        mark = _mark(building)
        ours = descriptor is not None and mark in (None, "", boot)
        going_on = ours and mark is not None and not is_open(place / "lock")
        if going_on:
            _end_left(place)
            (place / "lock").unlink(missing_ok=True)
        wait_for_lock(place / "lock")
        # No build runs any more, so a mark this old belongs to a former machine or boot.
        ours = ours or (descriptor is not None and time.time() - _written_ns(building) / 1e9 > LIVELY_SECONDS)
        extensions.drop_torn(place, 0.0 if ours else LIVELY_SECONDS)
        if ours:
            with suppress(OSError):
                building.write_text(boot, encoding="utf-8")
        yield going_on
    finally:
        if ours:
            building.unlink(missing_ok=True)
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked in between must not keep the lock
            os.close(descriptor)


def _mark(path: Path) -> str | None:
    """Return the boot id of the building machine, an empty string from old versions, or None without a build."""
    with suppress(OSError):
        return path.read_text(errors="replace", encoding="utf-8")
    return None


def _lock(path: Path, wait: Callable[[], None]) -> int | None:
    """Return a descriptor that holds the file's lock, or None if the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if not waited:
                wait()
            waited = True
            time.sleep(_LOOK_SECONDS)
        except OSError:
            os.close(descriptor)
            return None


def _end_left(place: Path) -> None:
    """Kill compilers that a killed build left running in its folder."""
    left = working_in(place)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while any(runs(pid) for pid in left) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def wait_for_lock(lock: Path, lively_seconds: float = LIVELY_SECONDS) -> None:
    """Wait until no process builds behind `lock`, and remove the file if its creator has ended."""
    while lock.exists():
        if time.time() - _last_change(lock.parent) > lively_seconds and not is_open(lock):
            lock.unlink(missing_ok=True)
            print(f"removed {lock}: the build that made it is gone", flush=True)
            return
        time.sleep(0.2)


def _last_change(folder: Path) -> float:
    """Return the last change of a file in the folder, in seconds since the epoch."""
    times = []
    for entry in folder.iterdir():
        try:
            times.append(entry.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times, default=0.0)
