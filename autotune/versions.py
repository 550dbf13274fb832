"""Supported versions of Python and of the libraries under a training, and comparison of versions.

`rank/versions.py` lists differences of a rank under older libraries, and `predict/features.py` differences of ZeRO's memory. Each
difference names the version and the reason. docs/versions.md lists the tested combinations.

This module imports only the standard library, and nothing of this package. `installed()` returns this interpreter's versions by
the names in RANGES, with None for missing packages. Another interpreter's versions in the same form can be passed to `complaint`
and `newer`, which return lines for display. `release` converts a version to a tuple for comparison.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata

Versions = Mapping[str, "str | None"]

PYTHON = "python"
# name: (oldest version that works, newest minor version that was tested)
RANGES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    PYTHON: ((3, 11), (3, 13)),
    "torch": ((2, 6), (2, 13)),
    "deepspeed": ((0, 16), (0, 19)),
    "transformers": ((4, 51), (5, 23)),
    "accelerate": ((1, 3), (1, 15)),  # for scripts that use it
}


def installed() -> dict[str, str | None]:
    """Return this interpreter's versions of everything in RANGES, without importing any of it."""
    return {name: platform.python_version() if name == PYTHON else version_of(name) for name in RANGES}


def version_of(package: str) -> str | None:
    """Return this interpreter's version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a version, like (0, 18, 2) for `0.18.2+cu128`; empty for None.

    A suffix is dropped, since a pre-release has the features of its release.
    """
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def complaint(found: Versions) -> str:
    """Return one line about packages that are too old, with the accepted versions; empty if there are none."""
    said = [
        f"{name} {found[name]} (expected {dotted(oldest)} or newer)"
        for name, (oldest, _) in RANGES.items()
        if (numbers := release(found.get(name))) and numbers[: len(oldest)] < oldest
    ]
    return f"too old: {', '.join(said)}" if said else ""


def newer(found: Versions) -> list[str]:
    """Return a line for each package that is newer than the newest tested version."""
    return [
        f"{name} {version} is newer than {dotted(newest)}, the newest that was tried"
        for name, version in found.items()
        if name in RANGES and release(version)[: len(newest := RANGES[name][1])] > newest
    ]


def dotted(numbers: tuple[int, ...]) -> str:
    """Format a release like `0.18.2`."""
    return ".".join(map(str, numbers))
