"""Programs and settings that a study remembers, and permission to run them.

The reader's command line grants it, or the reader is asked; a study grants nothing. `run` stores a digest of each thing that its
command line names, in the reader's own state folder. The reader's own studies are therefore launched without a question, on every
machine with this home folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from autotune.commands.environment import names_python
from autotune.commands.request import Request
from autotune.errors import UserError, readable
from autotune.problem.job import Job
from autotune.recovery.ladder import stored_ladder
from autotune.script.parse_command import declared
from autotune.script.recorded import RecordedItem, RecordedPython, code_of, knob_names, training_names
from autotune.search.storage import DATABASES
from autotune.search.study import StudyStore

Ask = Callable[[str], bool]
_SHOWN = 4  # shown in an error's one line


def named_by(job: Job, python: str | RecordedPython | None) -> list[RecordedItem]:
    """Return everything that a `launch` of a study of this job and Python would run, load or write."""
    beside = [RecordedItem("Python", str(python))] if python is not None else []
    return [*beside, *code_of(job), *training_names(job)]


def accept(origin: str, named: Sequence[RecordedItem], *, trust: bool, ask: Ask | None) -> None:
    """Accept the things that a study names: by an earlier command line of the reader, by `--trust`, or by an answer.

    Args:
        origin: for display: "study NAME".
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
            f"{origin} names things that no command line of yours named ({listed}). Check them, then name them yourself or "
            "add --trust."
        )
    lines = "\n".join(f"  {one}" for one in unknown)
    if not ask(f"{origin} brings what no command line of yours named:\n{lines}\nrun with it?"):
        raise UserError(f"{origin} was not trusted: nothing was started")
    grant(unknown)


def accept_job(origin: str, job: Job, *, trust: bool, ask: Ask | None, besides: Sequence[RecordedItem] = ()) -> Job:
    """Return a recorded job as one that may run. No other function converts a RecordedJob.

    Args:
        origin: for display: "study NAME".
        besides: other things that come with it.

    Raises:
        UserError: the reader does not accept what the job names.
    """
    accept(origin, [*besides, *code_of(job)], trust=trust, ask=ask)
    return Job(**{field.name: getattr(job, field.name) for field in dataclasses.fields(Job)})


# -- grants of earlier command lines ---------------------------------------------------------------------------------------


def grant(named: Iterable[RecordedItem]) -> None:
    """Store that the reader named these. If the home folder is not writable, the reader is asked again later."""
    folder = _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for one in named:
            (folder / _digest(one)).touch(mode=0o600)


def is_granted(one: RecordedItem) -> bool:
    """Check that the reader named it before, by a file that only the reader can have created."""
    with suppress(OSError):
        folder, file = _folder().stat(), (_folder() / _digest(one)).lstat()
        alone = not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return alone and folder.st_uid == file.st_uid == os.geteuid() and stat.S_ISREG(file.st_mode)
    return False


def _folder() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(root).expanduser() / "autotune" / "trusted"


def _digest(one: RecordedItem) -> str:
    return hashlib.sha256(f"{one.kind}\0{one.what}".encode(errors="surrogateescape")).hexdigest()


# -- settings that a study remembers -----------------------------------------------------------------------------------


class Remembered(NamedTuple):
    """Facts that a study keeps and the reader accepted."""

    python: str | None = None  # the Python of its measurements, if that was not the tuner's
    maps: Sequence[str] = ()  # the study's own `--map` values
    job: Job | None = None  # the job to launch; None for `run`, whose job is typed

    def maps_under(self, typed: Sequence[str]) -> list[str]:
        """Return these values, overridden knob by knob by those typed now."""
        return list({text.partition("=")[0]: text for text in (*self.maps, *typed)}.values())


def remembered_python(request: Request, ask: Ask | None) -> str | None:
    """Return the Python in which `run` resumes the study of a request. All else that `run` starts is typed.

    Raises:
        UserError: the reader does not accept the study's Python, its owner or its linked folders.
    """
    with readable("the study"):
        store = _store(request)
        if store is None:
            return None
        python = None if names_python(request.python) else store.python
        beside = [RecordedItem("Python", str(python))] if python is not None else []
        accept(f"study {store.name}", [*_origin(store), *beside], trust=request.trust, ask=ask)
        return python.shown if python is not None else None


@readable("the study")
def remembered(request: Request, ask: Ask | None) -> Remembered:
    """Return the facts that `launch` takes from the study of a request.

    Raises:
        UserError: the reader does not accept what the study names.
    """
    store = _store(request)
    if store is None:
        return Remembered()
    job, python = store.job, None if names_python(request.python) else store.python
    typed = [RecordedItem("option", text) for text in request.maps]
    rungs = stored_ladder(store.folder, store.name) if store.folder else []
    tried = [*(record.candidate for record in store.records()), *(rung.candidate for rung in rungs)]
    named = [*_origin(store), *(one for one in named_by(job, python) if one not in typed), *knob_names(tried)]
    accepted = accept_job(f"study {store.name}", job, trust=request.trust, ask=ask, besides=named)
    maps = declared(job.script) if job.script is not None else ()
    return Remembered(python.shown if python else None, maps, accepted)


def _store(request: Request) -> StudyStore | None:
    """Return the study of a request, or None.

    Another part of the command reports a missing study, after it has checked the options.
    """
    if request.study is not None:
        with suppress(UserError):
            return StudyStore.load(request.study, request.storage)
    return None


def _origin(store: StudyStore) -> list[RecordedItem]:
    """Return the owner of a study's file, if that is another user than the reader, and linked folders that trials write to."""
    folder = store.folder
    if folder is None or not folder.is_dir():
        return []
    links = [entry for entry in sorted(folder.iterdir()) if entry.is_symlink() and entry.is_dir()]
    found = [RecordedItem("linked folder", f"{link} to {link.resolve()}") for link in links]
    file = next((folder / file for file in DATABASES if (folder / file).exists()), None)
    with suppress(OSError):
        if file is not None and (owner := file.stat().st_uid) != os.geteuid():
            found.insert(0, RecordedItem("study of another user:", f"{file} (uid {owner})"))
    return found
