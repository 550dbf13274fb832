"""New paths of version 0.1's modules: importing an old path fails with an error that names the new one.

Nothing is re-exported. The error is one line with the replacement.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "autotune.callback": "autotune.recovery.callback (public: `from autotune import StudyCallback`)",
    "autotune.candidate": "autotune.problem.candidate",
    "autotune.doctor": "autotune.commands.doctor",
    "autotune.export": "autotune.results.export",
    "autotune.hardware": "autotune.problem.hardware",
    "autotune.job": "autotune.problem.job",
    "autotune.ladder": "autotune.recovery.ladder",
    "autotune.launcher": "autotune.commands.launch (public: `autotune.launch`)",
    "autotune.models": "autotune.problem.models",
    "autotune.outcome": "autotune.problem.outcome",
    "autotune.plan": "autotune.commands.plan and autotune.results.plan",
    "autotune.probe": "autotune.commands.probe and autotune.problem.script_job",
    "autotune.report": "autotune.results.console and autotune.results.winner",
    "autotune.run": "autotune.commands.run and autotune.commands.request",
    "autotune.script": "autotune.problem.script",
    "autotune.space": "autotune.problem.space and autotune.problem.space_file",
    "autotune.training": "autotune.recovery.supervisor",
    "autotune.trial": (
        "autotune.rank (checkpoints, config, devices, hooks, workload; rank is model, script_rank is script, train_rank "
        "is train) and autotune.group (gauge, ops, protocol, verdict; server is fork_server)"
    ),
    "autotune.predict.allocator": "benchmarks/allocator.py of the repository; autotune.predict needs it no more",
    "autotune.predict.live": "autotune.rank.live",
}


def moved_line(name: str) -> str | None:
    """Return the line for a module's old path, like `autotune.candidate` or `autotune.trial.rank`, or None.

    A moved folder also covers its old submodules, since its `__pycache__` may still make it a package.
    """
    package = name.rpartition(".")[0]
    old = next((old for old in (name, package) if old in MOVED), None)
    return f"{old} is now {MOVED[old]}" if old is not None else None


class MovedFinder:
    """Last finder of `sys.meta_path`: reached only by imports that no other finder could serve."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Find nothing.

        Raises:
            ModuleNotFoundError: for a path of the table. Its `name` is left unset: with it, `from autotune import run` would
                replace this error by its own, without the line about the move.
        """
        if line := moved_line(name):
            raise ModuleNotFoundError(line)


def install_finder() -> None:
    """Install the finder, once per process."""
    if MovedFinder not in sys.meta_path:
        sys.meta_path.append(MovedFinder)
