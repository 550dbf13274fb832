"""Errors of the user and of the machine, each in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

from autotune.masking import masked

_ENDLESS = re.compile(r"\S{500,}")  # longer than any typed path, flag or number


class ExitCode(IntEnum):
    """Exit codes of the command line. `launch` returns the exit code of the training instead."""

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """Create a member from its number and its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    meaning: str  # one sentence of the reference page

    DONE = 0, "The command has done its work: there is a winner, a plan that fits, a file."
    FINDINGS = 1, "`doctor` found something that prevents tuning; or autotune itself failed, with a traceback."
    BAD_INPUT = 2, "The input is wrong. One line says what is wrong and what to do."
    NOTHING_FITS = 3, "Nothing fits in memory. The last lines say what came closest, and what would fit."
    MACHINE = 4, "The machine fails, whatever the config: a driver, a network, a full disk, a lost database."
    NO_WINNER = (
        5,
        "There is no winner for another reason: start-up used the budget, or trials failed. The last lines say why.",
    )
    INTERRUPTED = 130, "Ctrl-C or SIGTERM. Measurements are kept, and the same command continues."


class DisplayedError(Exception):
    """Error with a text for display. The text holds no secrets."""

    exit_code: ClassVar[ExitCode] = ExitCode.FINDINGS

    def __init__(self, text: str = "") -> None:
        super().__init__(_ENDLESS.sub(lambda word: f"{word[0][:100]}…", masked(text)))

    def replace_text(self, text: str) -> None:
        """Replace the text."""
        self.args = (text,)


class UserError(DisplayedError):
    """Bad input: the message names the problem, the expected input and the fix."""

    exit_code = ExitCode.BAD_INPUT


class BadArgument(UserError, ValueError):
    """Bad input to a function of the Python API: the message names its parameters."""


class ScriptFails(UserError):
    """Failure of a user's script: the message ends with the last lines of its log, which stay lines."""


class Cause(StrEnum):
    """Reason why a user's script cannot be tuned unmodified."""

    SCRIPT = "script"  # the script fails, or never reaches DeepSpeed
    STEPS = "steps"  # the script ends before enough optimizer steps
    BATCH = "batch"  # the script trains on another batch than requested
    SHORT = "short"  # the script honours the batch, but too many of its steps are the last of its data


class Unusable(UserError):
    """The user's script cannot be tuned unmodified, with any candidate. Raised in a rank and again in the tuner.

    Args:
        cause: for decisions of the caller; the text is for display.
    """

    def __init__(self, text: str, cause: Cause = Cause.SCRIPT) -> None:
        super().__init__(text)
        self.cause = cause


UNPROTECTED = (
    "this machine cannot keep a script's writes from your files (neither overlayfs nor Landlock): a trial may overwrite or "
    "delete what your script overwrites or deletes"
)


class NotProtected(UserError):
    """User code on a machine that cannot protect the user's files, without the user's consent."""

    def __init__(self) -> None:
        super().__init__(
            f"{UNPROTECTED}. Copy the folder and pass --unprotected, or use a machine whose kernel has one of them"
        )


class NothingFits(DisplayedError):
    """Search without a feasible candidate.

    Args:
        summary: the call of `run` as JSON data, for `--json`; None for another command.
    """

    exit_code = ExitCode.NOTHING_FITS

    def __init__(self, text: str, summary: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.summary = summary


class NoWinner(NothingFits):
    """Search without a winner for another reason than memory, such as a budget that ended before the first trial."""

    exit_code = ExitCode.NO_WINNER


class MachineError(DisplayedError):
    """Failure of the machine for any candidate: a driver, a network interface, shared memory."""

    exit_code = ExitCode.MACHINE


class Stopped(DisplayedError):
    """Stop by the user before there was a result."""

    exit_code = ExitCode.INTERRUPTED


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean A or B?` for a misspelt word, or an empty string if none is similar.

    Args:
        cutoff: least similarity, from 0 (the three nearest words) to 1.
    """
    matches = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Convert errors from malformed stored values to one line. A study may come from another user, with any JSON in it.

    Args:
        what: the object that is read: "the study".

    Raises:
        UserError: a value has an unusable type or size.
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
    """Return an error's text, short and without line breaks; its type if it has no text."""
    return " ".join(masked(str(error)).split())[:200] or type(error).__name__
