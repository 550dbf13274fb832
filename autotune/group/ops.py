"""DeepSpeed's JIT ops: loaded, and built where this environment has not yet.

torch guards every build by a lock file and waits for it without end. A build that was killed leaves its lock behind, and
from then on every process that wants the op hangs: training, DeepSpeed's own tuner, `ds_report`. Builds of ours are held by
a lock of the kernel's besides, which ends with its holder: of two tuners one builds, and whoever comes after a build that
was killed knows that, ends what is left of it and goes on with it. ninja keeps what was compiled.
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

LIVELY_SECONDS = 120.0  # a folder that changed this lately may be building on another host with the same home
_LOOK_SECONDS = 0.1
_KILL_SECONDS = 5.0  # for a killed compiler to be gone

Tell = Callable[..., None]  # is told `op`, `state` (waiting, building, loading, done, failed) and what goes with it


def load_ops(names: list[str], tell: Tell = lambda **said: None) -> dict[str, str]:
    """Loads the DeepSpeed ops of the named builders, building what is not built; returns what failed and why."""
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
    """Whether DeepSpeed would load it: ranks on CPUs do without shared memory where it cannot be built for this machine."""
    return name != "ShareMemCommBuilder" or bool(builder.is_compatible(False))


def _load(name: str, builder: Any, folder: Path, tell: Tell) -> bool:
    """Loads an op; returns whether it, or another process meanwhile, has built it."""
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
        with suppress(OSError):  # a full disk: then nobody knows how long it took
            # a build that was gone on with says nothing of how long a whole one takes
            extensions.note_built(name, builder.name, None if going_on and seconds else took, folder)
    return _written_ns(library) != before


def _is_prebuilt(op: str) -> bool:
    """Return whether DeepSpeed loads the library that was compiled at its installation, by the condition of `OpBuilder.load`
    (deepspeed/ops/op_builder/builder.py). Ops that were compiled for another accelerator are built again."""
    from deepspeed import git_version_info
    from deepspeed.accelerator import get_accelerator

    compiled_for = getattr(git_version_info, "accelerator_name", "")
    return bool(git_version_info.installed_ops.get(op)) and compiled_for == get_accelerator()._name


def _written_ns(path: Path) -> int:
    """When the file was last written; 0 where it is not there."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


@contextmanager
def held(folder: Path, op: str, wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds an op's folder against other processes of autotune on this machine, with no lock of torch's left in it; gives whether
    a build was killed here.

    Args:
        wait: called once where another process holds it.
    """
    place, building, boot = folder / op, folder / f".{op}.building", boot_id()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder / f".{op}.lock", wait)
    try:
        # Whoever made the mark is gone, since the kernel has let go of its lock. A mark of another machine says nothing, and
        # stays: of machines that share a home locks need not reach from one to the other.
        mark = _mark(building)
        ours = descriptor is not None and mark in (None, "", boot)
        going_on = ours and mark is not None and not is_open(place / "lock")
        if going_on:
            _end_left(place)
            (place / "lock").unlink(missing_ok=True)
        wait_for_lock(place / "lock")
        # nobody builds any more: a mark that is as old is of a machine, or of a boot, that is gone
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
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile holds nothing
            os.close(descriptor)


def _mark(path: Path) -> str | None:
    """Which boot of which machine builds, or has; empty: of a version that did not say; None: none does."""
    with suppress(OSError):
        return path.read_text(errors="replace", encoding="utf-8")
    return None


def _lock(path: Path, wait: Callable[[], None]) -> int | None:
    """A descriptor that holds the file's lock; None where the file system has no such locks."""
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
    """Ends compilers that a killed build has left at work in its folder."""
    left = working_in(place)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while any(runs(pid) for pid in left) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def wait_for_lock(lock: Path, lively_seconds: float = LIVELY_SECONDS) -> None:
    """Returns when nobody builds behind `lock`, having removed the file if whoever made it is gone."""
    while lock.exists():
        if time.time() - _last_change(lock.parent) > lively_seconds and not is_open(lock):
            lock.unlink(missing_ok=True)
            print(f"removed {lock}: the build that made it is gone", flush=True)
            return
        time.sleep(0.2)


def _last_change(folder: Path) -> float:
    """Seconds since the epoch."""
    times = []
    for entry in folder.iterdir():
        try:
            times.append(entry.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times, default=0.0)
