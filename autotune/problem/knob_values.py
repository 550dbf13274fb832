"""Validation of knob values, shared by space files and the user's own DeepSpeed config."""

from __future__ import annotations

import difflib
from typing import Any

from autotune.bounds import MOST, shown, trouble
from autotune.errors import UserError, near
from autotune.problem.job import Lora, parse_lora
from autotune.problem.knobs import Knob
from autotune.problem.needs import Value


def knob_value(knob: Knob, value: Any) -> Value:
    """Return the value in the form that candidates use: `5e8` becomes a whole number in any spelling.

    Raises:
        ValueError: the knob cannot have the value; the message names what was expected and found.
    """
    if why := trouble(value):
        raise ValueError(why)
    if knob.kind is Lora:
        return _lora(value)
    if isinstance(knob.kind, tuple):
        word = "none" if value is None else value
        if not isinstance(word, str) or word not in knob.kind:
            hint = difflib.get_close_matches(str(word), knob.kind, 1)
            raise ValueError(f"expected one of {', '.join(knob.kind)}, found {value!r}{near(str(word), hint)}")
        return word
    if knob.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, found {value!r}")
        return value
    if knob.kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not knob.low <= value <= knob.high:
            expected = f"at least {knob.low:g}" if knob.high == float("inf") else f"from {knob.low:g} to {knob.high:g}"
            raise ValueError(f"expected a number {expected}, found {value!r}")
        return float(value)
    return _whole(knob, value)


def _whole(knob: Knob, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML reads 5.0e+8 as a float, and 5e8 as a word
    if isinstance(value, str):
        try:
            value = int(float(value))
        except (ValueError, OverflowError):
            raise ValueError(f"expected a whole number, found {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {shown(value)}")
    high = min(knob.high, MOST)
    if not knob.low <= value <= high:
        expected = f"at least {knob.low}" if knob.high > MOST and value < knob.low else f"{knob.low} to {high}"
        raise ValueError(f"{shown(value)} is out of range: expected {expected}")
    return value


def _lora(value: Any) -> str:
    """Return `none` for full training, or adapters in their shortest spelling; a number is a rank."""
    if value in (None, "none"):
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected none, a rank, or r=16,targets=all-linear, found {value!r}")
    try:
        return str(parse_lora(f"r={value}" if isinstance(value, int) else value))
    except UserError as error:
        raise ValueError(str(error)) from None
