"""Facts about a Python environment, found without importing its packages.

`interpreter.py` runs this file in the ranks' environment, `PATH -c … inquiry.py`, and calls it in the tuner's own. The file needs
only the standard library, not even its own package.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

# Packages whose versions affect the available choices and speed.
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "liger_kernel", "ninja")


def version(package: str) -> str | None:
    """Return the version of an installed distribution.

    torch's version comes from its own text, since torch built from source need not be installed.
    """
    found = _installed(package, tuple(sys.path), metadata.version)
    return _in_torchs_text("__version__") if found is None and package == "torch" else found


@functools.cache
def _installed(package: str, path: tuple[str, ...], look_up: Callable[[str], str]) -> str | None:
    """Look up a package once for each path: predictions call this hundreds of times, and each lookup parses a file."""
    try:
        return look_up(package)
    except metadata.PackageNotFoundError:
        return None


def cuda() -> str | None:
    """Return the CUDA version for which torch is built, like `12.8`, or None."""
    return _in_torchs_text("cuda")


def nccl() -> str | None:
    """Return the version of the NCCL that was installed with torch."""
    return version(f"nvidia-nccl-cu{major}") if (major := (cuda() or "").partition(".")[0]) else None


def origin(module: str) -> str | None:
    """Return the file of a module as `python -m` would find it, current folder included, or None.

    No package is imported on the way, unlike `importlib.util.find_spec`: a package's code would run in the tuner.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    top, *inner = module.split(".")
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return None
    name, folders = top, list((found and found.submodule_search_locations) or [])
    for part in inner:
        name = f"{name}.{part}"
        specs = (finder.find_spec(name) for finder in map(pkgutil.get_importer, folders) if finder is not None)
        found = next((spec for spec in specs if spec and spec.has_location), None)
        folders = [folder for one in folders if os.path.isdir(folder := os.path.join(one, part))]
    return os.path.abspath(found.origin) if found and found.origin and found.has_location else None


def has(module: str) -> bool:
    """Check that a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _in_torchs_text(name: str) -> str | None:
    """Return the value of a name in torch's `version.py`, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    said = re.search(rf"^{name}\b.*=\s*['\"](.+)['\"]", text, re.MULTILINE)
    return said[1] if said else None


def facts() -> dict[str, Any]:
    """Return all facts, as JSON data."""
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "versions": {package: found for package in PACKAGES if (found := version(package))},
        "cuda": cuda(),
        "nccl": nccl(),
    }


if __name__ == "__main__":
    question, *words = sys.argv[1:]
    answer: Any = facts() if question == "facts" else {"origin": origin, "has": has}[question](*words)
    print(json.dumps(answer))
