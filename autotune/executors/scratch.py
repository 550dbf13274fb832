"""Sandboxes of trials: the machine's protection, and the files that a script finds in its sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from autotune.errors import UserError
from autotune.interpreter import bound_command, current
from autotune.problem.argument_files import output_folder
from autotune.problem.argument_texts import output_folders, write_trial_files
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.rank.sandbox import Protection, Sandbox, available_protection, remove

_SCRATCH = "scratch"
UNPROTECTED = (
    "this machine cannot keep a script's writes from your files (neither overlayfs nor Landlock): a trial may overwrite or "
    "delete what your script overwrites or deletes"
)


def protection_of(cwd: Path, folder: Path, *, unprotected: bool) -> Protection:
    """Return the protection of trials whose script runs in `cwd` and whose folders are in `folder`.

    Args:
        cwd: the script's working directory.
        folder: the folder of the trials.
        unprotected: run without protection if this machine has none.

    Raises:
        UserError: the machine has none, and `unprotected` is false.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _available(cwd, folder.resolve(), current().path)
    if found is Protection.NONE and not unprotected:
        raise UserError(
            f"{UNPROTECTED}. Copy the folder and pass --unprotected, or use a machine whose kernel has one of them"
        )
    return found


@cache
def _available(cwd: Path, folder: Path, python: str) -> Protection:
    return available_protection(cwd, folder, lambda module, *words: bound_command(python, module, *words))


def trial_sandbox(
    folder: Path, job: Job, candidate: Candidate, study: Path, *, unprotected: bool, kept: Sequence[str] = ()
) -> Sandbox:
    """Create a trial's sandbox, with copies of argument files that carry the candidate.

    All trials of an executor use one folder, one after the other. Libraries that cache by file path, such as
    `datasets`, therefore find their caches in the next trial.

    Args:
        folder: the executor's folder.
        job: the job.
        candidate: the candidate.
        study: the study's folder, which a view of the user's folder leaves out.
        unprotected: run without protection if this machine has none.
        kept: folders whose content outlives the trial; created if missing.

    Raises:
        UserError: this machine offers no protection, and `unprotected` is false.
        OSError: the disk is full, or the folder cannot be written.
    """
    cwd = Path(job.script.cwd if job.script else os.getcwd())
    protection = protection_of(cwd, folder, unprotected=unprotected)
    kept = [*kept, *_swap_folders(job, candidate)]
    for one in kept:
        os.makedirs(one, exist_ok=True)
    sandbox = Sandbox(folder.resolve() / _SCRATCH, cwd, protection, tuple(kept))
    sandbox.create(study)
    if job.script is not None:
        overlaid = protection is Protection.OVERLAY  # with an overlay the script uses its own output folders
        write_trial_files(job, candidate, sandbox.files, quiet=not overlaid)
        for theirs in () if overlaid else output_folders(job.script):
            if theirs.is_dir():
                output_folder(sandbox.files, theirs)
    return sandbox


def _swap_folders(job: Job, candidate: Candidate) -> Iterator[str]:
    """Yield DeepSpeed's NVMe swap folders, which a sandbox layer would move to another drive."""
    own = job.script.profile.get("config", {}) if job.script else {}
    for config in (own, candidate.ds_config(job)):
        zero = config.get("zero_optimization")
        for name in ("offload_optimizer", "offload_param"):
            part = zero.get(name) if isinstance(zero, dict) else None
            if isinstance(part, dict) and os.path.isdir(path := str(part.get("nvme_path", ""))):
                yield os.path.join(os.path.abspath(path), "zero_stage_3")


def clear(folder: Path) -> None:
    """Remove the files of an executor's last trial."""
    remove(folder.resolve() / _SCRATCH)
