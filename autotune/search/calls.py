"""The calls of `autotune run` on a study, each in an attribute of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CALL = "call "  # begins the name of an attribute


@dataclass(frozen=True)
class Call:
    """One call of `autotune run` on the study."""

    started: str
    budget_seconds: float
    used_seconds: float
    ended: str = ""  # why it ended; empty while it runs, or after a SIGKILL


def name_of_call(before: int, tuner: str) -> str:
    """The attribute of a call that begins; two may begin at once.

    Args:
        before: how many there were.
    """
    return f"{_CALL}{before:06d} {tuner}"


def calls_in(attributes: Mapping[str, Any]) -> list[Call]:
    """Every call so far, in order."""
    of_0_1 = attributes.get("calls", [])  # version 0.1 kept them all in one attribute
    return [
        Call(**call) for call in (*of_0_1, *(attributes[key] for key in sorted(attributes) if key.startswith(_CALL)))
    ]
