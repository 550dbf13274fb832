"""Folder in which this environment's DeepSpeed ops are built. Standard library only, for ranks and their parent.

torch keeps run-time builds in one folder per user and Python, and rebuilds an op if a path or version has changed. Two
environments in alternation would rebuild every op at every start. Each environment therefore has a folder next to
torch's. A `TORCH_EXTENSIONS_DIR` set by the user is respected.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

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
    return bool(op) and is_whole(folder / str(op) / f"{op}.so")


def is_whole(library: Path) -> bool:
    """Return True if a library exists and was not truncated by a power cut."""
    with suppress(OSError):
        return not _is_torn(library)
    return False


def drop_torn(place: Path, still_seconds: float = 0.0) -> None:
    """Remove compiled files that a power cut truncated, because ninja checks only times and would keep them.

    Args:
        still_seconds: minimum age of a file's last write, if other processes may be building.
    """
    for pattern in ("*.o", "*.so"):
        for path in place.glob(pattern):
            with suppress(OSError):
                if _is_torn(path) and time.time() - path.stat().st_mtime >= still_seconds:
                    path.unlink()


def _is_torn(path: Path) -> bool:
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
    record = {"op": op, "seconds": _record(path).get("seconds") if seconds is None else round(seconds, 1)}
    if record == _record(path):
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
    compilers = [os.path.realpath(shutil.which(name) or name) for name in (_cxx(), os.environ.get("CC", "cc"))]
    return [
        os.path.realpath(sys.prefix),
        str(torch),
        str(_package_folder("deepspeed")),
        said,
        cuda,
        *compilers,
        *_chips(),
    ]


def _cxx() -> str:
    return os.environ.get("CXX") or "c++"


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
