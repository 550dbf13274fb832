"""Runs a user's script in this process, as `python` would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from autotune.problem.job import Script


def run_script(script: Script, arguments: list[str]) -> None:
    """Runs the script as `__main__` with these arguments, its folder first on the path; the current folder is the
    caller's to set. Raises what the script raises, SystemExit included."""
    sys.argv = [script.target, *arguments]
    if script.is_module:
        sys.path.insert(0, "")
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        path = str(script.path)
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")
