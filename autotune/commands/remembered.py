"""Loader of the facts that a study keeps from its first call, so that later calls need not repeat them. The reader accepts
here what would run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from autotune.commands.python import VARIABLE
from autotune.commands.request import Request
from autotune.commands.setup import Setup
from autotune.commands.trust import Ask, accept, accept_job, named_by, owner_of
from autotune.errors import UserError, readable
from autotune.problem.job import Job
from autotune.problem.recorded import Named, knob_names
from autotune.problem.typed import declared
from autotune.recovery.ladder import stored_ladder
from autotune.search.storage import DATABASES
from autotune.search.study import StudyStore


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
        python = None if _names_python(request) else store.python
        beside = [Named("Python", str(python))] if python is not None else []
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
    job, python = store.job, None if _names_python(request) else store.python
    typed = [Named("option", text) for text in request.maps]
    rungs = stored_ladder(store.folder, store.name) if store.folder else []
    tried = [*(record.candidate for record in store.records()), *(rung.candidate for rung in rungs)]
    named = [*_origin(store), *(one for one in named_by(job, python) if one not in typed), *knob_names(tried)]
    accepted = accept_job(f"study {store.name}", job, trust=request.trust, ask=ask, besides=named)
    maps = declared(job.script) if job.script is not None else ()
    return Remembered(python.shown if python else None, maps, accepted)


def accepted_table(setup: Setup, request: Request, ask: Ask | None) -> Setup:
    """Return the setup of `run` with a replayed table's job accepted: its model is traced.

    Raises:
        UserError: the table names code that the reader does not accept.
    """
    if setup.landscape is None:
        return setup
    job = accept_job(f"table {setup.landscape.name}", setup.job, trust=request.trust, ask=ask)
    return dataclasses.replace(setup, job=job)


def _store(request: Request) -> StudyStore | None:
    """Return the study of a request, or None. Another part of the command reports a missing study, after it has checked the
    options.
    """
    if request.study is not None:
        with suppress(UserError):
            return StudyStore.load(request.study, request.storage)
    return None


def _origin(store: StudyStore) -> list[Named]:
    """Return the owner of a study's file, if that is another user than the reader, and linked folders that trials write to."""
    if store.folder is None or not store.folder.is_dir():
        return []
    links = [entry for entry in sorted(store.folder.iterdir()) if entry.is_symlink() and entry.is_dir()]
    owners = owner_of(next((store.folder / file for file in DATABASES if (store.folder / file).exists()), None))
    return [*owners, *(Named("linked folder", f"{link} to {link.resolve()}") for link in links)]


def _names_python(request: Request) -> bool:
    return request.python is not None or bool(os.environ.get(VARIABLE, "").strip())
