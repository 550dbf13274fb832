"""Replaced attributes of other libraries' modules and classes, and of the environment, until they are restored."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

Original = Callable[..., Any]  # function or method that is replaced, which the function in its place may call


class Patches(ExitStack):
    """Attributes replaced in one rank. `close` restores all of them, the last replaced first."""

    def __init__(self) -> None:
        super().__init__()
        self._originals: dict[tuple[int, str], Original] = {}

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace `owner.name` by a function that calls `around` with the original as its first argument.

        Args:
            owner: a module, or the class of a method (`self` is then the second argument).
            around: takes its own arguments by position only, because keyword arguments belong to the caller.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        if isinstance(owner, ModuleType):  # pickled by reference: a spawned process finds the original there
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        self.replace(owner, name, wrapper)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by a value."""
        self._originals.setdefault((id(owner), name), getattr(owner, name))
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:  # inherited
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def original(self, owner: Any, name: str) -> Original:
        """Return `owner.name` from before its first wrap, or its current value without a wrap."""
        found: Original = self._originals.get((id(owner), name)) or getattr(owner, name)
        return found

    def set_environment(self, name: str, value: str) -> None:
        """Set an environment variable."""
        if name in os.environ:
            self.callback(os.environ.__setitem__, name, os.environ[name])
        else:
            self.callback(os.environ.pop, name, None)
        os.environ[name] = value
