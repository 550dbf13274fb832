"""Bounds of outside data: whole numbers, numbers, texts and nested data, from options, files and calls.

Every reader of outside data (options, spaces, DeepSpeed configs, model configurations, hostfiles, lengths, tables) checks it here
before it is used.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UserError

MOST = 2**63 - 1  # the largest integer of DeepSpeed and torch; "no limit" in a config
MOST_RANKS = 65_536  # of one training
MOST_TEXT = 65_536  # characters of one text
MOST_BYTES = 64 * 2**20  # of a text file
_MOST_DEPTH = 200
_SHOWN = 60  # characters of a value in a message


def known_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that JSON data has. Fields of a newer version are dropped."""
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def used_fields(one: Any, always: Collection[str]) -> dict[str, Any]:
    """Return a dataclass as JSON data, without fields that have their default.

    Args:
        always: fields that are kept in any case.
    """
    data, fields = dataclasses.asdict(one), dataclasses.fields(one)
    return {each.name: data[each.name] for each in fields if each.name in always or data[each.name] != each.default}


def display_value(value: object) -> str:
    """Return a value for a message: on one line, and short."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST:
        return f"a number of {int(abs(value).bit_length() * math.log10(2)) + 1} digits"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def whole_number(value: object, what: str, low: int = 0, high: int = MOST) -> int:
    """Return a whole number, given as one or as text.

    Args:
        what: name of the value in the message, like `--gpus` or `FILE:3: slots`.

    Raises:
        UserError: the value is no whole number between `low` and `high`.
    """
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:  # also more digits than Python converts
        number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise UserError(f"{what}: expected a whole number from {low} to {high}, found {display_value(value)}")
    return number


def invalid_reason(value: object) -> str | None:
    """Return why a value is invalid, or None: a number beyond 63 bits, a text with NUL, or one that is too long."""
    if isinstance(value, int) and abs(value) > MOST:
        return f"expected a number of at most 63 bits, found {display_value(value)}"
    if isinstance(value, str) and "\0" in value:
        return "holds a NUL character"
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"expected at most {MOST_TEXT} characters, found {len(value)}"
    return None


def check_data(data: Any, where: str) -> None:
    """Check every key, number and text in nested data. Keys are on one line, since messages quote them.

    Raises:
        UserError: a value is out of bounds; the message has its dotted key.
    """
    for path, value, is_key in leaves(data):
        why = invalid_reason(value)
        if is_key and not why and not str(value).isprintable():
            why = f"the key {display_value(value)} holds control characters"
        if why:
            raise UserError(f"{where}: {display_value('.'.join(path)) + ': ' if path else ''}{why}")


def leaves(data: Any, path: Sequence[str] = ()) -> Iterator[tuple[Sequence[str], Any, bool]]:
    """Yield (path, value, False) of each value without parts, and (path, key, True) of each key."""
    if len(path) > _MOST_DEPTH:
        raise RecursionError("nested too deeply")
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield path, key, True
            yield from leaves(value, (*path, str(key)))
    elif isinstance(data, list | tuple):
        for at, value in enumerate(data):
            yield from leaves(value, (*path, str(at)))
    else:
        yield path, data, False


def read_text(path: Path, what: str, expected: str) -> str:
    """Return a file's text, which is UTF-8 with or without a byte order mark.

    A pipe, such as `<(command)` of a shell, is read until its writers close it.

    Args:
        what: name of the file in the message, like `--lengths FILE`.
        expected: end of the message.

    Raises:
        UserError: the file cannot be read, is no text, or is too large.
    """
    try:
        if len(data := bounded_bytes(path, MOST_BYTES)) > MOST_BYTES:
            raise UserError(f"{what} has more than {MOST_BYTES} bytes: {expected}")
        text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except FileNotFoundError:
        raise UserError(f"{what}: no such file; {expected}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{what} cannot be read ({why}): {expected}") from None
    if "\0" in text:
        raise UserError(f"{what} cannot be read (it holds NUL characters): {expected}")
    return text


def bounded_bytes(path: Path, most_bytes: int = MOST_BYTES, *, stored: bool = False) -> bytes:
    """Return what a file holds, or one byte more than `most_bytes` of a longer one: a device may have no end.

    A pipe without a writer is empty.

    Args:
        stored: an earlier call wrote it, so a pipe or a device in its place is an error.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        if stored and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        os.set_blocking(file.fileno(), True)
        return file.read(most_bytes + 1)


def parse_json(text: str, where: str, expected: str) -> Any:
    """Return the data of a JSON text, within bounds.

    Raises:
        UserError: the text is no JSON, or a value is out of bounds.
    """
    try:
        data = json.loads(text)
        check_data(data, where)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.lineno}: not JSON ({error.msg}); {expected}") from None
    except (ValueError, RecursionError) as error:  # a number of more digits than Python converts
        raise UserError(f"{where} cannot be read ({display_value(str(error))}); {expected}") from None
    return data
