"""Run a user's script in this process, as `python` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.problem.command_line import ACCELERATE
from autotune.problem.job import Script
from autotune.problem.script import line_of

ACCELERATE_MODULE = "accelerate.commands.launch"


def run_script(script: Script, arguments: Sequence[str]) -> None:
    """Run the script as `__main__` with these arguments and its folder first on the path.

    The caller sets the current folder. All exceptions of the script are raised, SystemExit included.

    A script typed behind `accelerate launch` is started by that launcher in this process, because only the launcher
    knows the environment of its ranks. `hooks/relaunch.py` takes over at the point at which ranks would start.
    """
    line = line_of(script)
    if line.kind == ACCELERATE:
        module = ["--module"] if script.is_module else []
        target = str(script.path) if script.path is not None else script.target
        run_target(["-m", ACCELERATE_MODULE, *line.launcher[line.head :], *module, target, *arguments])
    else:
        run_target(
            ["-m", script.target, *arguments] if script.is_module else [str(script.path), *arguments], script.target
        )


def run_target(words: Sequence[str], name: str | None = None) -> None:
    """Run a Python file, or `-m` and a module, as `__main__` with the remaining words as its arguments.

    Args:
        name: `sys.argv[0]` of the file; None uses its path.
    """
    path = sys.path[:]
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [name or words[0], *words[1:]]
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.path[:] = path
