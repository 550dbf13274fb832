"""Runs of all ways, one for each protection and user; tests look at their results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import autotune
from tests.sandbox import runner
from tests.sandbox.ways import Way

ORDINARY = 1234  # a user without files, rights and a name
SYSTEM_PYTHON = "/usr/bin/python3"  # readable for every user
NEEDED = (
    "__init__.py",
    "versions.py",
    "rank/__init__.py",
    "rank/sandbox.py",
    "data/caches.json",
    "util/entry_points.py",
    "util/__init__.py",
    "util/caches.py",
    "util/linux.py",
)


def available(way: Way, python: str) -> bool:
    if way.kind == "sh":
        return all(shutil.which(tool) for tool in way.needs)
    return python == sys.executable and all(find_spec(module) for module in way.needs) if way.needs else True


def copy_sandbox(folder: Path) -> None:
    """Copy the sandbox's modules to where every user can read them, unlike a checkout."""
    for name in NEEDED:
        there = folder / "autotune" / name
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text("" if name.endswith("__init__.py") else (Path(autotune.__file__).parent / name).read_text())


def run_ways(protection: str, user: int, ways: list[Way]) -> dict[str, dict[str, Any]]:
    """Return the result of each way that this machine has the tools for, by name."""
    python = SYSTEM_PYTHON if user else sys.executable
    base = Path(tempfile.mkdtemp(prefix="sandbox-", dir="/var/tmp"))
    try:
        base.chmod(0o755)
        copy_sandbox(base / "code")
        shutil.copy(runner.__file__, base / "code")
        (base / "user").mkdir()
        rows = [
            {
                "name": way.name,
                "kind": way.kind,
                "text": way.text,
                "module": way.needs[0] if way.kind == "py" and way.needs else "",
            }
            for way in ways
            if available(way, python)
        ]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(base / "code"), "LC_ALL": "C.UTF-8"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if user:
            environment["PATH"] = "/usr/local/bin:/usr/bin:/bin"
        words = [python, str(base / "code/runner.py"), protection, str(base / "user"), str(user)]
        done = subprocess.run(words, input=json.dumps(rows), env=environment, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    finally:
        shutil.rmtree(base, ignore_errors=True)
