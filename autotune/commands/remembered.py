"""What a study keeps of the call that made it, and later calls need not say again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from autotune.commands.request import Request
from autotune.errors import UserError
from autotune.interpreter import Interpreter, current, interpreter_at
from autotune.problem.typed import declared
from autotune.search.study import StudyStore


class Remembered(NamedTuple):
    """Of the study that a request names."""

    python: str | None = None  # that it was measured in, where that was not the tuner's
    maps: Sequence[str] = ()  # its own by `--map`

    def maps_under(self, typed: Sequence[str]) -> list[str]:
        """These and over them, knob by knob, what is typed now."""
        return list({text.partition("=")[0]: text for text in (*self.maps, *typed)}.values())


def remembered(request: Request) -> Remembered:
    """What the study keeps; a study that is none is complained of later, after what was typed."""
    if request.study is not None:
        with suppress(UserError):
            store = StudyStore.load(request.study, request.storage)
            script = store.job.script
            return Remembered(store.python, declared(script) if script is not None else ())
    return Remembered()


def python_of(store: StudyStore) -> Interpreter:
    """The interpreter of the study's ranks, where it is there still, else the present one."""
    if store.python:
        with suppress(UserError):
            return interpreter_at(store.python, "the study's Python")
    return current()
