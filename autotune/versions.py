"""Which versions of Python and of the libraries under a training this package works with, and how versions are compared.

What a rank does differently under older libraries is in `rank/versions.py`, what ZeRO keeps and allocates differently in
`predict/versions.py`; each difference there names the version and the reason. docs/versions.md has what was run with what.

The contract: nothing is imported here but the standard library, and nothing of this package. `installed()` is what this
interpreter has, by name as in RANGES, None for what is not there; versions that another interpreter has told, in the same form,
can be given to `complaint` and `newer`, whose lines are for people. `release` makes a version comparable with a tuple.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """Python 3.10 has none: its `class Kind(str, Enum)` prints as `Kind.OK` where enum.StrEnum prints the text."""

        __str__ = str.__str__


Versions = Mapping[str, "str | None"]

PYTHON = "python"
# name: (oldest that works, newest minor version that was tried)
RANGES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    PYTHON: ((3, 10), (3, 13)),
    "torch": ((2, 6), (2, 13)),
    "deepspeed": ((0, 16), (0, 19)),
    "transformers": ((4, 51), (5, 23)),
    "accelerate": ((1, 3), (1, 15)),  # of scripts that use it
}


def installed() -> dict[str, str | None]:
    """The versions that this interpreter has of everything in RANGES. Nothing of it is imported."""
    return {name: platform.python_version() if name == PYTHON else version_of(name) for name in RANGES}


def version_of(package: str) -> str | None:
    """What this interpreter has of a package; None: nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str | None) -> tuple[int, ...]:
    """The numbers of a version: (0, 18, 2) of `0.18.2+cu128`; empty where there is none. What follows the numbers is left
    out: a pre-release has what its release will have."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def complaint(found: Versions) -> str:
    """One line where something is too old: which, what was found, what is accepted. Empty where nothing is."""
    old = [name for name in RANGES if _is_too_old(name, found.get(name))]
    said = [f"{name} {found[name]} (expected {dotted(RANGES[name][0])} or newer)" for name in old]
    return f"too old: {', '.join(said)}" if said else ""


def newer(found: Versions) -> list[str]:
    """A line for each that is newer than what this package was tried with."""
    return [
        f"{name} {version} is newer than {dotted(RANGES[name][1])}, the newest that was tried"
        for name, version in found.items()
        if name in RANGES and _is_newer(name, version)
    ]


def _is_too_old(name: str, version: str | None) -> bool:
    oldest = RANGES[name][0]
    numbers = release(version)
    return bool(numbers) and numbers[: len(oldest)] < oldest


def _is_newer(name: str, version: str | None) -> bool:
    newest = RANGES[name][1]
    return release(version)[: len(newest)] > newest


def dotted(numbers: tuple[int, ...]) -> str:
    """A release as people write it: `0.18.2`."""
    return ".".join(map(str, numbers))
