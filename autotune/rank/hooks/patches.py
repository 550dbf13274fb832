"""Replace attributes in modules and classes of other libraries; `undo` restores each."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches:
    """Attributes replaced by the hooks of one rank."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._originals: dict[tuple[int, str], Callable[..., Any]] = {}

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace `owner.name` by a function that calls `around` with the original as its first argument.

        Args:
            owner: a module, or the class of a method (`self` is then the second argument).
            around: takes its own arguments by position only, because keyword arguments belong to the caller.
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
        """Return `owner.name` from before its first wrap, or its current value without a wrap."""
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
        """Restore all attributes, the last replaced first."""
        self._undo.close()
        self._originals.clear()
