"""What a person did wrong, or what the machine lacks, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from autotune.masking import masked
from autotune.versions import StrEnum

_ENDLESS = re.compile(r"\S{500,}")  # no path, flag or number that a person has typed


class Told(Exception):
    """An error whose text people read. The text holds no secrets, whoever catches it."""

    def __init__(self, text: str = "") -> None:
        super().__init__(_ENDLESS.sub(lambda word: f"{word[0][:100]}…", masked(text)))


class UserError(Told):
    """Bad input: the message says what was wrong, what was expected and what to do next. The CLI exits with 2."""


class Cause(StrEnum):
    """Why a user's script cannot be tuned as it is."""

    SCRIPT = "script"  # it fails, or never reaches DeepSpeed
    STEPS = "steps"  # it ends before enough optimizer steps
    BATCH = "batch"  # it trains on another batch than it was told to
    SHORT = "short"  # it obeys, and too many of its steps are the last of its data


class Unusable(UserError):
    """The user's script cannot be tuned as it is, whatever the candidate. Raised in a rank and again in the tuner.

    Args:
        cause: what a caller may decide by; the text is for people.
    """

    def __init__(self, text: str, cause: Cause = Cause.SCRIPT) -> None:
        super().__init__(text)
        self.cause = cause


class NothingFits(Told):
    """The search ended without a feasible candidate. The CLI exits with 3."""


class MachineTrouble(Told):
    """The machine fails, whatever the candidate: a driver, a network interface, shared memory. The CLI exits with 4."""


class Stopped(Told):
    """A person stopped it before it came to anything. The CLI exits with 130."""


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean A or B?` for a misspelt word, or an empty string."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn the failures that malformed stored values cause into one line. A study may be a stranger's, with any JSON in it.

    Args:
        what: is read: "the study".

    Raises:
        UserError: a value has a type or size that nothing can be done with.
    """
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RecursionError,
    ) as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{what} cannot be read ({why}): restore a copy of it, or choose another") from error


def one_line(error: BaseException) -> str:
    """What an error says, whoever raised it, short and without line breaks; its type where it says nothing."""
    return " ".join(masked(str(error)).split())[:200] or type(error).__name__
