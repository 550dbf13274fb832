"""What a study keeps of the Python that its ranks ran in."""

from __future__ import annotations

from contextlib import suppress

from autotune.commands.request import Request
from autotune.errors import UserError
from autotune.interpreter import Interpreter, current, interpreter_at
from autotune.search.study import StudyStore


def remembered_python(request: Request) -> str | None:
    """The Python that the study was measured in, where that was not the tuner's; a study that is none is complained of later,
    after what was typed."""
    if request.study is not None:
        with suppress(UserError):
            return StudyStore.load(request.study, request.storage).python
    return None


def python_of(store: StudyStore) -> Interpreter:
    """The interpreter of the study's ranks, where it is there still, else the present one."""
    if store.python:
        with suppress(UserError):
            return interpreter_at(store.python, "the study's Python")
    return current()
