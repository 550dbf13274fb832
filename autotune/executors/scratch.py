"""Where a script that is measured may write."""

from __future__ import annotations

import shutil
from pathlib import Path

from autotune.problem.job import Script


def scratch_folder(folder: Path, script: Script) -> Path:
    """A folder that shows a script what its own does, and takes what it writes there: links to every entry but the
    one that holds the study, which is a usual place for logs too."""
    scratch = folder.resolve() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for entry in Path(script.cwd).iterdir():
        if entry.resolve() not in scratch.parents:
            (scratch / entry.name).symlink_to(entry)
    return scratch
