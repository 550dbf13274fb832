"""`python image.py VENV WHEELS`: links the packages of this Python into a virtual environment, but for autotune and for what lies
in a folder of wheels: the image of a GPU machine, as far as a CPU can have it."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

_OWN = re.compile(r"__editable__|.*\.pth$|autotune$|deepspeed_autotune-|__pycache__$")


def names_in(wheel: Path) -> set[str]:
    """Return the names that a wheel puts into site-packages, its metadata without the version."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    return {named(top) for top in tops}


def named(entry: str) -> str:
    """Return an entry of site-packages, of metadata the package alone: its version may be another there."""
    package, _, rest = entry.partition("-")
    return f"{package.lower()}.dist-info" if rest.endswith(".dist-info") else entry


def link(venv: Path, wheels: Path) -> None:
    lacking = {name for wheel in wheels.glob("*.whl") for name in names_in(wheel)}
    (target,) = venv.glob("lib/python3*/site-packages")
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for entry in folder.iterdir():
            there = target / entry.name
            if named(entry.name) not in lacking and not _OWN.match(entry.name) and not there.exists():
                there.symlink_to(entry)


if __name__ == "__main__":
    link(Path(sys.argv[1]), Path(sys.argv[2]))
