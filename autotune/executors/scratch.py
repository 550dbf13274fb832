"""Where a script that is measured may write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from autotune.problem.argument_texts import write_trial_files
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job


def scratch_folder(folder: Path, job: Job, candidate: Candidate) -> Path:
    """A folder that shows a script what its own does, and takes what it writes there: links to every entry but the
    one that holds the study, which is a usual place for logs too. Its argument files have the candidate in them."""
    assert job.script is not None
    script = job.script
    scratch = folder.resolve() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    holding = {scratch, *scratch.parents}
    cwd = Path(script.cwd)
    own = next((one.name for one in holding if one.parent == cwd.resolve()), None)
    with os.scandir(cwd) as entries:  # thousands of files on a network disk: only links are asked where they lead
        for entry in entries:
            if entry.name != own and not (entry.is_symlink() and Path(entry.path).resolve() in holding):
                (scratch / entry.name).symlink_to(cwd / entry.name)
    write_trial_files(job, candidate, scratch, quiet=True)
    return scratch
