"""DeepSpeed's JIT ops: build folders, builds, and loading."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.util.inquiry import version
from autotune.util.linux import boot_id, is_open, pid_is_alive, pids_working_in

# -- ops ---------------------------------------------------------------------------------------------------------------
#
# torch guards every build by a lock file and waits for it without limit. A killed build leaves its lock, and then every
# process that needs the op hangs: training, DeepSpeed's own tuner, `ds_report`. An op may build others first (AsyncIO
# builds pin_memory), so the locks of all ops of a folder are one matter.
#
# autotune's builds also hold one kernel lock on the folder, which ends with its holder. The process that follows a killed
# build ends its remains, removes its locks and resumes it, since ninja keeps compiled files.

# seconds; a lock without a change or a compiler for this time is stale, also on another host with this home
IDLE_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_KILL_SECONDS = 5.0  # time for a killed compiler to be reaped
_SHOWN_SECONDS = 10.0  # between two reports of a wait

ProgressCallback = Callable[..., None]  # receives `op`, `state` (waiting, building, loading, done, failed) and details
NOT_BUILT = "not built"  # reason of an op that only a process outside of PID namespaces may build


def load_ops(names: list[str], report: ProgressCallback = lambda **said: None, *, build: bool = True) -> dict[str, str]:
    """Load the DeepSpeed ops of the named builders, and build missing ones. Return the failed builders with reasons.

    Args:
        build: if False, the reason of a missing op is NOT_BUILT, and so is that of all ops of a folder with an unfinished build.
            A process in a PID namespace sees no compilers of others, so it cannot know which lock is stale.
    """
    from deepspeed.accelerator import get_accelerator

    folder = use_own_folder()
    failed = {}
    for name in names:
        began = time.monotonic()
        try:
            builder = get_accelerator().create_op_builder(name)
            # CPU ranks do without shared memory on unsupported machines
            if builder is None or (name == "ShareMemCommBuilder" and not builder.is_compatible(False)):
                continue
            library = folder / builder.name / f"{builder.name}.so"
            if not build and not _is_prebuilt(builder.name) and not library.exists():
                failed[name] = NOT_BUILT
                continue
            built = _load(name, builder, folder, report, build=build)
            report(op=name, state="done", built=built, seconds=time.monotonic() - began)
        except Exception as error:
            if isinstance(error, UserError) and not build:  # the process that builds finds the reason
                failed[name] = NOT_BUILT
                continue
            failed[name] = failure_reason(error)
            report(op=name, state="failed", seconds=time.monotonic() - began)
    return failed


_FAILURE = re.compile(r"^.*(?:\berror: |: cannot find |No such file or directory|command not found).*$", re.MULTILINE)


def failure_reason(error: BaseException) -> str:
    """Return why an op cannot be built, in one line: the first error of a compiler or linker, else of the text."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if found := _FAILURE.search(text, len(first)):
        first = f"{first.partition(': [')[0]}: {found[0].strip()}"
    return first[:300].removesuffix(" None")  # DeepSpeed appends its error log, which may be None


def _load(name: str, builder: Any, folder: Path, report: ProgressCallback, *, build: bool) -> bool:
    """Load an op. Return True if this process, or another one during the wait, has built it."""
    if _is_prebuilt(builder.name):
        builder.load(verbose=False)
        return False
    library = folder / builder.name / f"{builder.name}.so"
    before = _written_ns(library)

    def waiting(seconds: float) -> None:
        report(op=name, state="waiting", seconds=seconds)

    with hold_build_lock(folder, waiting, build=build):
        state = "loading" if library.exists() else "building"
        report(op=name, state=state)
        builder.load(verbose=False)
        with suppress(OSError):  # a full disk: the next training asks again
            (folder / f"{name}.op").write_text(builder.name, encoding="utf-8")
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


_held = threading.local()  # `folders`: those that this thread holds, since an op may build another one


@contextmanager
def hold_build_lock(
    folder: Path, waiting: Callable[[float], None] = lambda seconds: None, *, build: bool = True
) -> Iterator[None]:
    """Hold the folder of ops against other autotune processes on this machine, without stale locks of torch.

    Args:
        waiting: called every ten seconds of a wait for another process, with the seconds so far.
        build: if False, an unfinished build is an error, and its locks stay.

    Raises:
        UserError: another process holds a lock and builds nothing, or a build is unfinished and not `build`.
    """
    held: set[Path] = vars(_held).setdefault("folders", set())
    if folder in held:
        yield
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    wait, building = _Wait(folder, waiting), folder / ".building"
    descriptor = _lock(folder / ".lock", wait)
    if not build and (building.exists() or [*folder.glob("*/lock")]):
        _unlock(descriptor)
        raise UserError(f"{folder} has an unfinished build")
    held.add(folder)
    try:
        mark: str | None = None  # boot id of the building machine; None without a build
        with suppress(OSError):
            mark = building.read_text(errors="replace", encoding="utf-8")
        # The writer of the mark has ended, because the kernel has released its lock. A mark of another machine proves
        # nothing: locks may not work between machines that share a home.
        killed = descriptor is not None and mark in ("", boot_id())
        if killed:
            _end_left(folder)
        _remove_stale_locks(folder, wait, killed=killed)
        with suppress(OSError):
            building.write_text(boot_id(), encoding="utf-8")
        link_without_space(folder)
        yield
    finally:
        held.discard(folder)
        with suppress(OSError):
            building.unlink()
        _unlock(descriptor)


class _Wait:
    """Wait for another process that builds in a folder, as long as it does."""

    def __init__(self, folder: Path, waiting: Callable[[float], None]) -> None:
        self._folder, self._waiting = folder, waiting
        self._began = self._busy_at = time.monotonic()
        self._shown_at = -_SHOWN_SECONDS

    def look(self, lock: Path) -> None:
        """Sleep for a moment, and report the wait.

        Raises:
            UserError: no compiler works, and no file changes.
        """
        now = time.monotonic()
        if now - self._shown_at >= _SHOWN_SECONDS:
            self._waiting(now - self._began if self._shown_at >= 0 else 0.0)
            self._shown_at = now
            if _idle_seconds(self._folder) < IDLE_SECONDS or _compilers(self._folder):
                self._busy_at = now
        if now - self._busy_at > IDLE_SECONDS:
            raise UserError(
                f"{lock} is held by a process that has run no compiler for {IDLE_SECONDS:.0f} s: end that process "
                f"(`fuser {lock}` names it)"
            )
        time.sleep(_LOOK_SECONDS)


def _remove_stale_locks(folder: Path, wait: _Wait, *, killed: bool) -> None:
    """Remove torch's locks whose creators have ended, and wait for those that build.

    Args:
        killed: a build of this machine was killed, so that a lock which no process has open is its.
    """
    for lock in folder.glob("*/lock"):
        while lock.exists():
            if not is_open(lock) and (killed or _idle_seconds(folder) > IDLE_SECONDS):
                lock.unlink(missing_ok=True)
                print(f"removed {lock}: the build that made it is gone", flush=True)
                break
            wait.look(lock)


def _lock(path: Path, wait: _Wait) -> int | None:
    """Return a descriptor that holds the file's lock, or None if the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                wait.look(path)
    except OSError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked in between must not keep the lock
        os.close(descriptor)


def _op_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.is_dir() and not path.is_symlink()]


def _compilers(folder: Path) -> list[int]:
    """Return the processes that work in the folders of ops."""
    return [pid for place in _op_folders(folder) for pid in pids_working_in(place)]


def _end_left(folder: Path) -> None:
    """Kill compilers that a killed build left running."""
    left = _compilers(folder)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while any(pid_is_alive(pid) for pid in left) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def _idle_seconds(folder: Path) -> float:
    """Return the seconds since the last change of a file in the folders of ops."""
    changes = [_written_ns(entry) for place in _op_folders(folder) for entry in place.iterdir()]
    return time.time() - max(changes, default=0) / 1e9


_TORCH = "torch"  # link in the folder of ops


def link_without_space(folder: Path) -> None:
    """Give the linker torch's libraries by a path without a space, in this process.

    torch writes its path unquoted after `-L` (`_prepare_ldflags` in torch/utils/cpp_extension.py). All processes use the
    same link in the folder of ops, because ninja builds again if a command has changed.

    Raises:
        UserError: the folder's path has a space, too.
    """
    torch = _package_folder("torch")
    if torch is None or " " not in str(torch):
        return
    link = folder / _TORCH
    if " " in str(link):
        raise UserError(
            f"torch cannot link ops: its path has a space, and so has {folder}. Set {FOLDER} to a path without a space "
            f"({torch})"
        )
    if not link.is_symlink() or os.readlink(link) != str(torch):
        link.unlink(missing_ok=True)
        with suppress(FileExistsError):  # another rank has made it
            link.symlink_to(torch)
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = str(link / "lib")


# -- extension folders -------------------------------------------------------------------------------------------------
#
# torch keeps run-time builds in one folder per user and Python, and rebuilds an op if a path or version has changed.
# Two environments in alternation would rebuild every op at every start. Each environment therefore has a folder next to
# torch's. A `TORCH_EXTENSIONS_DIR` set by the user is respected.

FOLDER = "TORCH_EXTENSIONS_DIR"  # torch's variable
_GPUS = Path("/proc/driver/nvidia/gpus")


def use_own_folder() -> Path:
    """Set and return this process's extension folder for torch: the environment's own unless one is set."""
    if FOLDER not in os.environ:
        folder = own_folder(os.environ.get("DS_ACCELERATOR", ""))
        with suppress(OSError):  # if the home is not writable, torch reports it at the build
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[FOLDER] = str(folder)
        return folder
    return Path(os.environ[FOLDER])


def own_folder(device: str) -> Path:
    """Return this environment's folder, which may not exist.

    Args:
        device: `cuda` or `cpu`. DeepSpeed builds some ops differently if no GPU is used.
    """
    python = f"{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    versions = f"torch{version('torch')}-deepspeed{version('deepspeed')}"
    name = f"autotune-py{python}-{versions}{device and '-'}{device}"
    key = hashlib.sha256(json.dumps([name, *_made_with()]).encode()).hexdigest()[:10]
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()  # like torch's `get_default_build_root`
    return root / "torch_extensions" / f"{name}-{key}"


def is_built(builder: str, folder: Path) -> bool:
    """Return True if this builder's op (`CPUAdamBuilder`) seems built in the folder, as far as detectable without torch."""
    with suppress(OSError):
        op = (folder / f"{builder}.op").read_text(encoding="utf-8")
        return (folder / op / f"{op}.so").exists()
    return False


def _made_with() -> list[str]:
    """Return the inputs of a build besides versions: paths, the build of torch, CUDA and processors.

    Builds use `-march=native`, and machines may share a home.
    """
    torch = _package_folder("torch")
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or shutil.which("nvcc") or ""
    build = ""
    with suppress(OSError):
        build = (torch / "version.py").read_text(encoding="utf-8") if torch else ""
    folders = [os.path.realpath(sys.prefix), str(torch), str(_package_folder("deepspeed"))]
    return [*folders, build, os.path.realpath(cuda), *_chips()]


def _chips() -> list[str]:
    """Return the instruction sets of this machine's processors, and the models of its GPUs."""
    found = [platform.machine()]
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found += sorted(set(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)))[:1]
    models = set()
    for path in _GPUS.glob("*/information"):
        with suppress(OSError):
            models |= set(re.findall(r"^Model:\s*(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    return [*found, *sorted(models)]


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
