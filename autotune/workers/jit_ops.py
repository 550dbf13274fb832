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
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.util.linux import boot_id, is_open, pid_is_alive, pids_working_in

# -- ops ---------------------------------------------------------------------------------------------------------------
#
# torch guards every build by a lock file and waits for it without limit. A killed build leaves its lock, and then every
# process that needs the op hangs: training, DeepSpeed's own tuner, `ds_report`.
#
# autotune's builds also hold a kernel lock, which ends with its holder, so only one of two tuners builds. The tuner
# that follows a killed build detects it, ends its remains and resumes it, since ninja keeps compiled files.

LIVELY_SECONDS = 120.0  # a folder with a more recent change may be building on another host with the same home
_LOOK_SECONDS = 0.1
_KILL_SECONDS = 5.0  # time for a killed compiler to be reaped

ProgressCallback = Callable[..., None]  # receives `op`, `state` (waiting, building, loading, done, failed) and details


def load_ops(names: list[str], report: ProgressCallback = lambda **said: None) -> dict[str, str]:
    """Load the DeepSpeed ops of the named builders, and build missing ones. Return the failed builders with reasons."""
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
            built = _load(name, builder, folder, report)
            report(op=name, state="done", built=built, seconds=time.monotonic() - began)
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failed[name] = why[:300].removesuffix(" None")  # DeepSpeed appends its error log, which may be None
            report(op=name, state="failed", seconds=time.monotonic() - began)
    return failed


def _load(name: str, builder: Any, folder: Path, report: ProgressCallback) -> bool:
    """Load an op. Return True if this process, or another one during the wait, has built it."""
    if _is_prebuilt(builder.name):
        builder.load(verbose=False)
        return False
    library = folder / builder.name / f"{builder.name}.so"
    before, seconds = _written_ns(library), last_seconds(name, folder)

    def wait() -> None:
        report(op=name, state="waiting", last_seconds=seconds)

    with hold_build_lock(folder, builder.name, wait) as going_on:
        ours = _written_ns(library)
        report(op=name, state="loading" if ours else "building", last_seconds=seconds, going_on=going_on)
        began = time.monotonic()
        builder.load(verbose=False)
        took = time.monotonic() - began if _written_ns(library) != ours else None
        with suppress(OSError):  # a full disk; the duration is then unknown
            # A resumed build does not show the duration of a whole one.
            note_built(name, builder.name, None if going_on and seconds else took, folder)
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
def hold_build_lock(folder: Path, op: str, wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold an op's folder against other autotune processes on this machine, without a stale lock of torch.

    Args:
        wait: called once if another process holds the folder.

    Yields:
        True if a build was killed here.

    Raises:
        UserError: a link leads out of the folder, and the build would write through it.
    """
    place, building, boot = folder / op, folder / f".{op}.building", boot_id()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    _check_no_links_out(folder, [place, building, folder / f".{op}.lock"])
    descriptor = _lock(folder / f".{op}.lock", wait)
    try:
        # The writer of the mark has ended, because the kernel has released its lock. A mark of another machine proves
        # nothing and stays: locks may not work between machines that share a home.
        mark: str | None = None  # boot id of the building machine, empty from old versions; None without a build
        with suppress(OSError):
            mark = building.read_text(errors="replace", encoding="utf-8")
        ours = descriptor is not None and mark in (None, "", boot)
        going_on = ours and mark is not None and not is_open(place / "lock")
        if going_on:
            _end_left(place)
            (place / "lock").unlink(missing_ok=True)
        wait_for_lock(place / "lock")
        # No build runs any more, so a mark this old belongs to a former machine or boot.
        ours = ours or (descriptor is not None and time.time() - _written_ns(building) / 1e9 > LIVELY_SECONDS)
        remove_incomplete(place, 0.0 if ours else LIVELY_SECONDS)
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


def _check_no_links_out(folder: Path, written: list[Path]) -> None:
    """Check that files that a build writes lie in this folder. Trials may write here, and leave a link to any file."""
    root = os.path.realpath(folder)
    inner = (path for one in written if not one.is_symlink() for path in one.rglob("*"))
    for path in (*written, *inner):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise UserError(f"{path} is a link out of {folder}, and a build would write through it: remove it")


def _lock(path: Path, wait: Callable[[], None]) -> int | None:
    """Return a descriptor that holds the file's lock, or None if the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _end_left(place: Path) -> None:
    """Kill compilers that a killed build left running in its folder."""
    left = pids_working_in(place)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while any(pid_is_alive(pid) for pid in left) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def wait_for_lock(lock: Path) -> None:
    """Wait until no process builds behind `lock`, and remove the file if its creator has ended."""
    while lock.exists():
        if time.time() - _last_change(lock.parent) > LIVELY_SECONDS and not is_open(lock):
            lock.unlink(missing_ok=True)
            print(f"removed {lock}: the build that made it is gone", flush=True)
            return
        time.sleep(0.2)


def _last_change(folder: Path) -> float:
    """Return the last change of a file in the folder, in seconds since the epoch."""
    return max((_written_ns(entry) / 1e9 for entry in folder.iterdir()), default=0.0)


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
            _adopt_all(folder)
        return folder
    return Path(os.environ[FOLDER])


def own_folder(device: str) -> Path:
    """Return this environment's folder, which may not exist.

    Args:
        device: `cuda` or `cpu`. DeepSpeed builds some ops differently if no GPU is used.
    """
    versions = f"torch{_version('torch')}-deepspeed{_version('deepspeed')}"
    name = f"autotune-py{_python()}-{versions}{device and '-'}{device}"
    key = hashlib.sha256(json.dumps([name, *_made_with()]).encode()).hexdigest()[:10]
    return _torch_root() / f"{name}-{key}"


def is_built(builder: str, folder: Path) -> bool:
    """Return True if this builder's op (`CPUAdamBuilder`) seems built in the folder, as far as detectable without torch."""
    op = _record(folder / f"{builder}.json").get("op")
    return bool(op) and is_complete(folder / str(op) / f"{op}.so")


def is_complete(library: Path) -> bool:
    """Return True if a library exists and was not truncated by a power cut."""
    with suppress(OSError):
        return not _is_incomplete(library)
    return False


def remove_incomplete(place: Path, still_seconds: float = 0.0) -> None:
    """Remove compiled files that a power cut truncated, because ninja checks only times and would keep them.

    Args:
        still_seconds: minimum age of a file's last write, if other processes may be building.
    """
    for pattern in ("*.o", "*.so"):
        for path in place.glob(pattern):
            with suppress(OSError):
                if _is_incomplete(path) and time.time() - path.stat().st_mtime >= still_seconds:
                    path.unlink()


def _is_incomplete(path: Path) -> bool:
    """Return True if only zeros, or fewer bytes than an ELF header declares (64 bit: `man 5 elf`), reached the disk.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if len(header) < 64 or not any(header):
        return True
    if not header.startswith(b"\x7fELF"):
        return False  # a compiler's own format
    (sections,) = struct.unpack_from("=Q", header, 0x28)
    each, count = struct.unpack_from("=HH", header, 0x3A)
    return bool(size < sections + each * count)


def last_seconds(builder: str, folder: Path) -> float | None:
    """Return the duration of the last build, here or in another environment, or None without one."""
    others = list(_torch_root().glob(f"*/{builder}.json"))
    with suppress(OSError):
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (folder / f"{builder}.json", *others):
        if seconds := _record(path).get("seconds"):
            return float(seconds)
    return None


def note_built(builder: str, op: str, seconds: float | None, folder: Path) -> None:
    """Record that an op is built here, and its duration; None keeps the recorded duration.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f"{builder}.json"
    known = _record(path)
    record = {"op": op, "seconds": known.get("seconds") if seconds is None else round(seconds, 1)}
    if record == known:
        return
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(name, path)


def _record(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


# -- identity of an environment ------------------------------------------------------------------------------------------


def _torch_root() -> Path:
    """Return torch's root folder, like its `get_default_build_root`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"


def _python() -> str:
    return f"{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-missing"


def _made_with() -> list[str]:
    """Return the inputs of a build besides versions: paths, CUDA, compilers and processors.

    Builds use `-march=native`, and machines may share a home.
    """
    torch = _package_folder("torch")
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or shutil.which("nvcc") or ""
    said = ""
    with suppress(OSError):
        said = (torch / "version.py").read_text(encoding="utf-8") if torch else ""
    with suppress(OSError):
        cuda = os.path.realpath(cuda) if cuda else ""
    named = (os.environ.get("CXX") or "c++", os.environ.get("CC", "cc"))
    compilers = [os.path.realpath(shutil.which(name) or name) for name in named]
    folders = [os.path.realpath(sys.prefix), str(torch), str(_package_folder("deepspeed"))]
    return [*folders, said, cuda, *compilers, *_chips()]


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


# -- earlier builds of torch for this environment ------------------------------------------------------------------------


def _adopt_all(folder: Path) -> None:
    """Copy builds of this environment from torch's default folder.

    ninja keeps times and commands next to its outputs, so it finds nothing to do or only the rest.
    """
    torch = _package_folder("torch")
    if torch is None:
        return
    for built in _torch_root().glob(f"py{_python()}_*/*/*.so"):
        source, ours = built.parent, folder / built.parent.name
        if built.stem == source.name and not ours.exists():
            with suppress(OSError, shutil.Error):
                _adopt(source, ours, torch)


def _adopt(source: Path, ours: Path, torch: Path) -> None:
    before = _state(source)
    if before is None or f"-isystem {torch}/include " not in (source / "build.ninja").read_text(encoding="utf-8"):
        return
    # ninja compares times and paths, so it would miss a package replaced in place by files with older times.
    installed = max(_installed_ns(package) for package in ("torch", "deepspeed"))
    if (source / f"{source.name}.so").stat().st_mtime_ns <= installed:
        return
    copy = Path(tempfile.mkdtemp(dir=ours.parent, prefix=f".{ours.name}."))
    try:
        shutil.copytree(source, copy, dirs_exist_ok=True)
        if _state(source) == before:  # no build has started there since
            os.rename(copy, ours)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _state(source: Path) -> list[tuple[str, int]] | None:
    """Return names and times of a folder's files, or None if a build holds it."""
    if (source / "lock").exists():
        return None
    return sorted((path.name, path.stat().st_mtime_ns) for path in source.iterdir())


def _installed_ns(package: str) -> int:
    """Return the time at which the package was installed."""
    folder = _package_folder(package)
    if folder is None:
        return sys.maxsize  # prevents any adoption
    status = (folder / "__init__.py").stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)
