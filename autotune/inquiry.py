"""What a Python environment has, looked up without importing any of it.

`interpreter.py` runs this file in the environment where ranks are to run, `PATH -c … inquiry.py`, and calls it in the tuner's
own. It needs nothing but the standard library, not even the package that it lies in.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

# The packages whose versions decide what can be done and how fast it is, where they are there.
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "liger_kernel", "ninja")


def version(package: str) -> str | None:
    """Of an installed distribution, or as torch's own text says it: one built from source need not be installed."""
    found = _installed(package, tuple(sys.path), metadata.version)
    return _in_torchs_text("__version__") if found is None and package == "torch" else found


@functools.cache
def _installed(package: str, path: tuple[str, ...], look_up: Callable[[str], str]) -> str | None:
    """Looked up once for a path: predictions ask hundreds of times, and each time a file would be parsed."""
    try:
        return look_up(package)
    except metadata.PackageNotFoundError:
        return None


def cuda() -> str | None:
    """`12.8`: for which CUDA torch is built; None where it is built for none."""
    return _in_torchs_text("cuda")


def nccl() -> str | None:
    """Version of the NCCL that was installed with torch."""
    return version(f"nvidia-nccl-cu{major}") if (major := (cuda() or "").partition(".")[0]) else None


def origin(module: str) -> str | None:
    """The file of a module as `python -m` would find it, current folder included; None where there is none."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(module)
    except Exception:  # the package that it lies in is imported, and may raise anything
        return None
    return os.path.abspath(found.origin) if found and found.origin and found.has_location else None


def has(module: str) -> bool:
    """Whether a top-level module can be imported, as far as can be told without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _in_torchs_text(name: str) -> str | None:
    """What torch's `version.py` sets a name to, without importing torch."""
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
    """All of it, as JSON."""
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
