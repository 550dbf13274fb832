"""Virtual environments made in a second: each shows some of the packages of the environment that runs the tests, as links, and
really lacks the others."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(folder: Path, packages: list[str], *, without: tuple[str, ...] = ()) -> Path:
    """A virtual environment in `folder` with these distributions and whatever they require, but for `without`.

    Returns:
        Its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in required_by(packages) - set(without):
        for entry in top_level(metadata.distribution(name)):
            link = site / entry.name
            if not link.exists():
                link.symlink_to(entry)
    return folder / "bin" / "python"


def required_by(packages: list[str]) -> set[str]:
    """Normalised names of the distributions and of all that they require here, themselves included."""
    found: set[str] = set()
    left = [Requirement(package) for package in packages]
    while left:
        wanted = left.pop()
        name = wanted.name.lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            one = Requirement(text)
            extras = ["", *wanted.extras]
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(one)
    return found


def top_level(distribution: metadata.Distribution) -> set[Path]:
    """What a distribution has put into site-packages: packages, modules, its own metadata."""
    files = distribution.files or []
    names = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
    return {Path(os.fspath(distribution.locate_file(name))) for name in names}


def install_wheel(python: Path, wheel: Path) -> Path:
    """Installs a wheel without its requirements; returns the folder of its console scripts."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    # a source tree on PYTHONPATH would count as installed
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=300, env=env, cwd=wheel.parent)
    return python.parent
