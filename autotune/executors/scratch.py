"""Where a script that is measured may write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from autotune.problem.argument_files import OUTPUT_FOLDER
from autotune.problem.argument_texts import output_folders, write_trial_files
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.rank.links import link_entries, show


def scratch_folder(folder: Path, job: Job, candidate: Candidate, study: Path) -> Path:
    """A folder that shows a script what its own does, and takes what it writes there: links to every entry but the study.
    Its argument files have the candidate in them.

    Args:
        folder: the trial's, in the study's.
        study: the study's own, which no script sees; what lies beside it (`runs/` may hold checkpoints too) every script does.
    """
    assert job.script is not None
    scratch = folder.resolve() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    cwd, hidden = Path(job.script.cwd), study.resolve()
    around = {cwd.resolve(), *cwd.resolve().parents}
    if hidden in around:  # called from inside the study
        hidden = folder.resolve()
    _show(scratch, cwd, hidden, around)
    write_trial_files(job, candidate, scratch, quiet=True)
    for theirs in output_folders(job.script):
        if theirs.is_dir():
            show(str(scratch / OUTPUT_FOLDER), str(theirs))
    return scratch


def _show(scratch: Path, source: Path, hidden: Path, seen: set[Path]) -> None:
    """Links, and a real folder in the place of one that holds what is hidden, at any depth.

    Args:
        seen: folders that are shown already, or hold what is: links may lead around in circles.
    """
    holding: list[tuple[bool, str, Path]] = []
    resolved = source.resolve()

    def apart(entry: os.DirEntry[str]) -> bool:
        is_link = entry.is_symlink()
        real = Path(entry.path).resolve() if is_link else resolved / entry.name
        if real in hidden.parents:
            holding.append((is_link, entry.name, real))
            return True
        return real == hidden or hidden in real.parents

    link_entries(str(scratch), str(source), apart)
    for _, name, real in sorted(holding):  # what is no link comes first
        if real not in seen:
            seen.add(real)
            (scratch / name).mkdir()
            _show(scratch / name, source / name, hidden, seen)
