"""Trust in what a study names. The reader's command line grants it, or the reader is asked; a study grants nothing.

`run` stores a digest of each thing that its command line names, in the reader's own state folder. The reader's own studies are
therefore launched without a question, on every machine with this home folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.job import Job
from autotune.problem.recorded import Named, RecordedPython, code_of, training_names

Ask = Callable[[str], bool]
_SHOWN = 4  # shown in an error's one line


def named_by(job: Job, python: str | RecordedPython | None) -> list[Named]:
    """Return everything that a `launch` of a study of this job and Python would run, load or write."""
    beside = [Named("Python", str(python))] if python is not None else []
    return [*beside, *code_of(job), *training_names(job)]


def owner_of(path: Path | None) -> list[Named]:
    """Return the owner of a study's file, if that is another user than the reader."""
    with suppress(OSError):
        if path is not None and (owner := path.stat().st_uid) != os.geteuid():
            return [Named("study of another user:", f"{path} (uid {owner})")]
    return []


def accept(origin: str, named: Sequence[Named], *, trust: bool, ask: Ask | None) -> None:
    """Accept the things that a study names: by an earlier command line of the reader, by `--trust`, or by an answer.

    Args:
        origin: for display: "study NAME", or "table FILE".
        trust: `--trust` is on the command line.
        ask: asks the reader a question; None without a terminal.

    Raises:
        UserError: they are not accepted.
    """
    unknown = [one for one in dict.fromkeys(named) if not is_granted(one)]
    if trust or not unknown:
        return
    if ask is None:
        listed = "; ".join(map(str, unknown[:_SHOWN])) + "; …" * (len(unknown) > _SHOWN)
        raise UserError(
            f"{origin} brings what no command line of yours named ({listed}): look at it, then name it yourself or add --trust"
        )
    lines = "\n".join(f"  {one}" for one in unknown)
    if not ask(f"{origin} brings what no command line of yours named:\n{lines}\nrun with it?"):
        raise UserError(f"{origin} was not trusted: nothing was started")
    grant(unknown)


def accept_job(origin: str, job: Job, *, trust: bool, ask: Ask | None, besides: Sequence[Named] = ()) -> Job:
    """Return a recorded job as one that may run. No other function converts a RecordedJob.

    Args:
        origin: for display: "study NAME", or "table FILE".
        besides: other things that come with it.

    Raises:
        UserError: the reader does not accept what the job names.
    """
    accept(origin, [*besides, *code_of(job)], trust=trust, ask=ask)
    return Job(**{field.name: getattr(job, field.name) for field in dataclasses.fields(Job)})


# -- grants of earlier command lines ---------------------------------------------------------------------------------------


def grant(named: Iterable[Named]) -> None:
    """Store that the reader named these. If the home folder is not writable, the reader is asked again later."""
    folder = _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for one in named:
            (folder / _digest(one)).touch(mode=0o600)


def is_granted(one: Named) -> bool:
    """Check that the reader named it before, by a file that only the reader can have created."""
    with suppress(OSError):
        folder, file = _folder().stat(), (_folder() / _digest(one)).lstat()
        alone = not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return alone and folder.st_uid == file.st_uid == os.geteuid() and stat.S_ISREG(file.st_mode)
    return False


def _folder() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(root).expanduser() / "autotune" / "trusted"


def _digest(one: Named) -> str:
    return hashlib.sha256(f"{one.kind}\0{one.what}".encode(errors="surrogateescape")).hexdigest()
