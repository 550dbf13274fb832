"""Conversion of a Python call's values to a Request: each value is converted by the type of its field."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from autotune.commands.request import Request
from autotune.errors import UserError, near

MOST_NUMBER = 2**63
_WORDS = 'expected a list of words, like ["train.py", "--epochs", "1"]'


def request_of(command: object, options: Mapping[str, object], beside: Iterable[str] = (), **known: object) -> Request:
    """Return the Request of `autotune.tune` and `autotune.launch`; None keeps a field's default.

    Args:
        beside: the function's own options, which are no fields.
        known: fields that the function takes under their own names.

    Raises:
        UserError: no such option, or a value that its field cannot have.
    """
    types = {field.name: str(field.type).replace(" ", "").split("|") for field in dataclasses.fields(Request)}
    allowed = types.keys() - {"script", "command", *known}
    for name in options:
        if name not in allowed:
            raise UserError(f"no option {name!r}{near(str(name), sorted({*allowed, *beside}))}")
    given = {**options, **known}
    values = {name: _taken(name, value, types[name]) for name, value in given.items() if value is not None}
    script = [] if command is None else _list("command", command, _WORDS)
    return Request(script=script, **values)


def _taken(name: str, value: object, types: Sequence[str]) -> Any:
    """Return the value converted to one of a field's types."""
    if "list[str]" in types:
        return _list(name, value, "expected a list of texts")
    if "int" in types and "str" in types:  # a number or a word; texts are parsed later
        return _plain(name, value) if isinstance(value, str) else _whole(name, value)
    return next(take(name, value) for type_name, take in _TAKES.items() if type_name in types)


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | PurePath):
        raise _refused(name, "a path", value)
    return Path(_plain(name, str(value)))


def _text(name: str, value: object) -> str:
    """Return a text; a number becomes its text: seconds, bytes, a share or a count, as on the command line."""
    if isinstance(value, str | PurePath):
        return _plain(name, str(value))
    number = _number(name, value, "a text, a path or a number")
    return str(int(number)) if number == int(number) else str(number)


def _whole(name: str, value: object) -> int:
    number = _number(name, _read(name, value, int, "a whole number"), "a whole number")
    if number != int(number):
        raise _refused(name, "a whole number", value)
    return int(number)


def _real(name: str, value: object) -> float:
    return float(_number(name, _read(name, value, float, "a number"), "a number"))


def _read(name: str, value: object, kind: type[int] | type[float], expected: str) -> object:
    """Return a parsed text; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return kind(value)
    except ValueError:
        raise _refused(name, expected, value) from None


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, "True or False", value)
    return value


_TAKES: dict[str, Callable[[str, object], object]] = {
    "Path": _path,
    "bool": _switch,
    "int": _whole,
    "float": _real,
    "str": _text,
}


def _list(name: str, value: object, expected: str) -> list[str]:
    """Return the texts of paths and numbers. A single text is refused: it would be split into letters."""
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        raise UserError(f"{name}: {expected}, found {_shown(value)}")
    return [_word(f"{name}[{at}]", word) for at, word in enumerate(value)]


def _word(name: str, value: object) -> str:
    if isinstance(value, str) and "\0" not in value:
        return value
    return _text(name, value)


def _number(name: str, value: object, expected: str) -> int | float:
    """Return a plain number from one of Python's or numpy's types."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refused(name, expected, value)
    number: Any = value
    if not abs(number) < MOST_NUMBER:  # also excludes NaN
        raise UserError(f"{name}: the number is not possible: expected less than 2**63")
    return int(number) if isinstance(value, numbers.Integral) else float(number)


def _plain(name: str, text: str) -> str:
    if any(sign in text for sign in "\0\n\r"):
        raise _refused(name, "one line of text", text)
    return text


def _refused(name: str, expected: str, value: object) -> UserError:
    return UserError(f"{name}: expected {expected}, found {_shown(value)}")


def _shown(value: object) -> str:
    """Return a short text quoted, and the type of any other value."""
    if isinstance(value, bool | int | float) and abs(value) < MOST_NUMBER:
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    return f"a value of type {type(value).__name__}"
