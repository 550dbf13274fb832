"""Processes of ours beside this one."""

from __future__ import annotations

import os
from pathlib import Path


def package_environment() -> dict[str, str]:
    """This process's environment, in which `python -m autotune.…` finds this package even where it is not installed."""
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
