"""Where a script that is measured may write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from uuid import uuid4

from autotune.problem.argument_files import OUTPUT_FOLDER
from autotune.problem.argument_texts import output_folders, write_trial_files
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.rank.links import MAKING, link_entries, show

_SCRATCH = "scratch"
_MOST_PARENTS = 4  # of the current folder, that are shown
_MOST_BESIDE = 1000  # entries of a parent: each is a link to be made and removed in every trial


def scratch_folder(folder: Path, job: Job, candidate: Candidate, study: Path) -> Path:
    """A folder that shows a script what its own does, and takes what it writes there: links to every entry but the study.
    Its argument files have the candidate in them. It lies in folders that show its parents, so `..` is what it is to the user.

    Its path is the same for every trial of an executor, which has one at a time: what libraries cache by the paths of files
    (`datasets` does) is found by the next trial.

    Args:
        folder: the executor's, in the study's or that itself.
        study: the study's own, which no script sees; what lies beside it (`runs/` may hold checkpoints too) every script does.
    """
    assert job.script is not None
    clear(folder)
    study, cwd = study.resolve(), Path(job.script.cwd)
    root = scratch = folder.resolve() / _SCRATCH
    (root / MAKING).mkdir(parents=True)
    here = cwd.resolve()
    around = {here, *here.parents}
    hidden = root if study in around else study  # called from inside the study
    for parent, name in _parents(here):
        if _is_small(parent):
            with suppress(OSError):  # what can be read is shown
                _show(scratch, parent, hidden, set(around))
        scratch /= name
        scratch.mkdir()
    _show(scratch, cwd, hidden, around)
    write_trial_files(job, candidate, scratch, quiet=True)
    for theirs in output_folders(job.script):
        if theirs.is_dir():
            show(str(scratch / OUTPUT_FOLDER), str(theirs))
    return scratch


def clear(folder: Path) -> None:
    """Takes away what an executor's last trial has left. What cannot be removed (a network disk keeps files that are open) is out
    of the next one's way by then, and is tried again."""
    with suppress(FileNotFoundError):
        (folder / _SCRATCH).rename(folder / f"{_SCRATCH}-{uuid4().hex}")
    for left in folder.glob(f"{_SCRATCH}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _parents(here: Path) -> Iterator[tuple[Path, str]]:
    """Those of a folder that are shown, the outermost first, each with its entry that leads to the folder. `/` never is."""
    for one in reversed([here, *here.parents][:_MOST_PARENTS]):
        if one.parent.parent != one.parent:
            yield one.parent, one.name


def _is_small(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return sum(1 for _ in islice(entries, _MOST_BESIDE + 1)) <= _MOST_BESIDE
    return False


def _show(scratch: Path, source: Path, hidden: Path, seen: set[Path]) -> None:
    """Links, and a real folder in the place of one that holds what is hidden, at any depth.

    Args:
        seen: folders that are shown already, or have a place of their own: links may lead around in circles.
    """
    holding: list[tuple[bool, str, Path]] = []
    resolved = source.resolve()

    def apart(entry: os.DirEntry[str]) -> bool:
        is_link = entry.is_symlink()
        real = Path(entry.path).resolve() if is_link else resolved / entry.name
        if real in hidden.parents:
            holding.append((is_link, entry.name, real))
            return True
        return real == hidden or hidden in real.parents or (real in seen and not is_link)

    link_entries(str(scratch), str(source), apart)
    for _, name, real in sorted(holding):  # what is no link comes first
        if real not in seen:
            seen.add(real)
            (scratch / name).mkdir()
            _show(scratch / name, source / name, hidden, seen)
