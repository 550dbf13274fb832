"""Attributes replaced in other people's modules and classes, each put back by `undo`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches:
    """What the hooks of one rank have replaced."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._originals: dict[tuple[int, str], Callable[..., Any]] = {}

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """From now on a call of `owner.name` calls `around` instead, with the original function as its first argument.

        Args:
            owner: a module, or a class whose method it is (`self` is then the second argument).
            around: takes its own arguments by position alone, since keyword arguments are the caller's.
        """
        original = getattr(owner, name)
        before = vars(owner).get(name, _MISSING)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._originals.setdefault((id(owner), name), original)

        def restore() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.callback(restore)

    def original(self, owner: Any, name: str) -> Callable[..., Any]:
        """What `owner.name` was before the first wrap; what it is, where there is none."""
        found: Callable[..., Any] = self._originals.get((id(owner), name)) or getattr(owner, name)
        return found

    def set_environment(self, name: str, value: str) -> None:
        before = os.environ.get(name)
        os.environ[name] = value
        if before is None:
            self._undo.callback(os.environ.pop, name, None)
        else:
            self._undo.callback(os.environ.__setitem__, name, before)

    def on_undo(self, callback: Callable[[], Any]) -> None:
        self._undo.callback(callback)

    def undo(self) -> None:
        """The last replaced is put back first."""
        self._undo.close()
        self._originals.clear()
