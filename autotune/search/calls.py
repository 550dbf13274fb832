"""Records of the `autotune run` calls on a study, one attribute each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CALL = "call "  # prefix of the attribute names


@dataclass(frozen=True)
class Call:
    """One call of `autotune run` on the study."""

    started: str
    budget_seconds: float
    used_seconds: float
    ended: str = ""  # reason; empty while the call runs, or after a SIGKILL


def name_of_call(before: int, tuner: str) -> str:
    """Return the attribute name of a new call. Tuner names keep simultaneous calls apart.

    Args:
        before: number of earlier calls.
        tuner: this tuner's name.
    """
    return f"{_CALL}{before:06d} {tuner}"


def calls_in(attributes: Mapping[str, Any]) -> list[Call]:
    """Return every call so far, in order."""
    of_0_1 = attributes.get("calls", [])  # version 0.1 stored all calls in one attribute
    return [
        Call(**call) for call in (*of_0_1, *(attributes[key] for key in sorted(attributes) if key.startswith(_CALL)))
    ]
