"""What a person did wrong, or what the machine lacks, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: the message says what was wrong, what was expected and what to do next. The CLI exits with 2."""


class NothingFits(Exception):
    """The search ended without a feasible candidate. The CLI exits with 3."""


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean A or B?` for a misspelt word, or an empty string."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
