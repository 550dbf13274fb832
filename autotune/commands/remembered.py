"""Loads what a study keeps of the call that made it, and later calls need not say again. What would run is accepted here."""

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
from autotune.errors import UserError
from autotune.problem.job import Job
from autotune.problem.recorded import Named, knob_names
from autotune.problem.typed import declared
from autotune.recovery.ladder import stored_ladder
from autotune.search.storage import DATABASES
from autotune.search.study import StudyStore


class Remembered(NamedTuple):
    """What a study keeps and the reader accepted."""

    python: str | None = None  # that it was measured in, if that was not the tuner's
    maps: Sequence[str] = ()  # its own by `--map`
    job: Job | None = None  # to launch; None for `run`, whose job is typed

    def maps_under(self, typed: Sequence[str]) -> list[str]:
        """Return these and over them, knob by knob, what is typed now."""
        return list({text.partition("=")[0]: text for text in (*self.maps, *typed)}.values())


def remembered_python(request: Request, ask: Ask | None) -> str | None:
    """Return the Python in which `run` goes on with the study of a request. All else that `run` starts is typed.

    Raises:
        UserError: the study names one that the reader does not accept.
    """
    store = _store(request)
    if store is None or store.python is None or _names_python(request):
        return None
    accept(f"study {store.name}", [Named("Python", str(store.python))], trust=request.trust, ask=ask)
    return store.python.shown


def remembered(request: Request, ask: Ask | None) -> Remembered:
    """Return what `launch` takes of the study of a request.

    Raises:
        UserError: the study names what the reader does not accept.
    """
    store = _store(request)
    if store is None:
        return Remembered()
    job, python = store.job, None if _names_python(request) else store.python
    files = [store.folder / file for file in DATABASES] if store.folder else []
    owners = owner_of(next((file for file in files if file.exists()), None))
    typed = [Named("option", text) for text in request.maps]
    rungs = stored_ladder(store.folder, store.name) if store.folder else []
    tried = [*(record.candidate for record in store.records()), *(rung.candidate for rung in rungs)]
    named = [*owners, *(one for one in named_by(job, python) if one not in typed), *knob_names(tried)]
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
    """Return the study of a request. Another part of the command complains of one that is none, after what was typed."""
    if request.study is not None:
        with suppress(UserError):
            return StudyStore.load(request.study, request.storage)
    return None


def _names_python(request: Request) -> bool:
    return request.python is not None or bool(os.environ.get(VARIABLE, "").strip())
