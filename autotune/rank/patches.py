"""Replaced attributes of other libraries' modules and classes, and of the environment, until they are restored."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

_signature = functools.lru_cache(inspect.signature)  # a data set may seed a generator for each row


class Call:
    """Call of a replaced function or method."""

    def __init__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.original, self.args, self.kwargs = original, args, kwargs

    def __call__(self) -> Any:
        """Call the original."""
        return self.original(*self.args, **self.kwargs)

    @property
    def owner(self) -> Any:
        """Object whose method is called."""
        return self.args[0]

    @property
    def given(self) -> dict[str, Any]:
        """Arguments by name, with defaults."""
        bound = _signature(self.original).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def change(self, **arguments: Any) -> None:
        """Change arguments by name."""
        bound = _signature(self.original).bind(*self.args, **self.kwargs)
        bound.arguments.update(arguments)
        self.args, self.kwargs = bound.args, bound.kwargs


class Patches(ExitStack):
    """Attributes replaced in one rank. `close` restores all of them, the last replaced first."""

    def __init__(self) -> None:
        super().__init__()
        self._originals: dict[tuple[int, str], Callable[..., Any]] = {}

    def wrap(self, owner: Any, name: str, around: Callable[[Call], Any]) -> None:
        """Replace `owner.name` by a function that passes each call to `around`, and returns its result.

        Args:
            owner: a module, or the class of a method.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(Call(original, args, kwargs))

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

    def original(self, owner: Any, name: str) -> Callable[..., Any]:
        """Return `owner.name` from before its first wrap, or its current value without a wrap."""
        found: Callable[..., Any] = self._originals.get((id(owner), name)) or getattr(owner, name)
        return found

    def set_environment(self, name: str, value: str) -> None:
        """Set an environment variable."""
        if name in os.environ:
            self.callback(os.environ.__setitem__, name, os.environ[name])
        else:
            self.callback(os.environ.pop, name, None)
        os.environ[name] = value
