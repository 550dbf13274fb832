"""The words of published tables: one vocabulary a column, `data/published/words.json`, and what no vocabulary has.

A word that is in no list is never a default: the row is left out, and the reason names the column and the word. An empty
cell, or one that says that the source does not say, means the default that the vocabulary names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data" / "published"


class LeftOut(Exception):
    """A row that is not judged; the message is the reason, the same for all rows of a kind."""


class UnknownWord(LeftOut):
    """A cell with a word that no vocabulary has: the column, and the word."""

    def __init__(self, column: str, word: str) -> None:
        super().__init__(f"column {column}: nobody knows {word!r}")
        self.word = word


class Unreadable(Exception):
    """A cell that nobody could read: the column, and why."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column}: {why}")


@cache
def vocabulary() -> dict[str, Any]:
    """All of `words.json`."""
    return dict(json.loads((DATA / "words.json").read_text(encoding="utf-8")))


def bare(text: str) -> str:
    """A cell without what stands in brackets, in lower case."""
    return " ".join(re.sub(r"\([^()]*\)?|\[[^\[\]]*\]?", " ", text).lower().split())


def remarks_of(text: str) -> str:
    """What stands in a cell's brackets, in lower case."""
    return " ; ".join(re.findall(r"[(\[]([^()\[\]]*)", text)).lower()


def silent(text: str) -> bool:
    """Whether a cell says that the source does not say."""
    return (bare(text) or text.strip().lower()) in vocabulary()["unknown"] or bare(text).startswith("unknown")


def tokens(text: str) -> tuple[str, ...]:
    """Letters, numbers, `++`, and `,` between clauses, in lower case; other signs part them: `AdamW_8bit` is adamw, 8, bit."""
    text = re.sub(r"(\d)\s*x(?=[a-z])", r"\1 x ", text.lower().replace("×", "x"))
    text = re.sub(r"\bw/o\b", "without", text)
    return tuple(re.findall(r"[^\W\d_]+|\d+(?:\.\d+)?|\+\+|,", re.sub(r"[;/]", ",", re.sub(r"\bw/", "with ", text))))


# What turns the phrase after it around, what turns the one before it, and which of them may stand alone.
_BEFORE = frozenset(("no", "not", "non", "without", "never", "disable", "disabled", "none", "off"))
_AFTER = frozenset(("no", "off", "disabled", "false", "none", "never", "not"))
_ALONE = frozenset(("no", "none", "off", "disabled", "false", "without", "never"))


@dataclass(frozen=True)
class Said:
    """A phrase that was found: what it means, its number where it has one, and whether it is denied."""

    meaning: str
    number: float | None = None
    denied: bool = False


Phrases = dict[tuple[str, ...], str]


def phrases_of(words: dict[str, Iterable[str]]) -> Phrases:
    """Meanings by their phrases, as `longest` takes them; `#` is any number."""
    return {
        tuple(re.findall(r"[^\W\d_]+|\d+(?:\.\d+)?|\+\+|#", phrase.lower())): meaning
        for meaning, phrases in words.items()
        for phrase in phrases
    }


def longest(found: tuple[str, ...], at: int, phrases: Phrases) -> tuple[int, str, float | None] | None:
    """(length, meaning, number) of the longest phrase that begins at this token; None: none does."""
    for size in range(min(len(found) - at, 6), 0, -1):
        part = found[at : at + size]
        if part in phrases:
            return size, phrases[part], None
        numbers = [index for index, word in enumerate(part) if word[0].isdigit()]
        for index in numbers:
            if (general := (*part[:index], "#", *part[index + 1 :])) in phrases:
                return size, phrases[general], float(part[index])
    return None


@cache
def _column(column: str) -> tuple[dict[str, Any], Phrases, Phrases]:
    words = vocabulary()["columns"][column]
    fillers = phrases_of({"": [*vocabulary()["fillers"], *words["fillers"]]})
    return words, phrases_of(words["words"]), fillers


def said_in(column: str, text: str, *, prose: bool = False) -> Iterator[Said]:
    """The phrases of a text, in order, and `alone` where a denial stands by itself.

    Args:
        prose: what no vocabulary has is passed over.

    Raises:
        UnknownWord: it has a word that the column's vocabulary has not.
    """
    _, phrases, fillers = _column(column)
    found, at, denying, told, clause = tokens(text), 0, False, list[Said](), 0
    while at < len(found):
        if found[at] == ",":
            told += _alone(column, text, denying and not told[clause:] and not prose)
            at, denying, clause = at + 1, False, len(told)
            continue
        here, filler = longest(found, at, phrases), longest(found, at, fillers)
        if here is not None and (filler is None or here[0] >= filler[0]):
            size, meaning, number = here
            told.append(Said(meaning, number, denying))
            at, denying = at + size, False
        elif (
            found[at] in _AFTER
            and told[clause:]
            and not told[-1].denied
            and not _phrase_follows(found, at + 1, phrases)
        ):
            told[-1] = Said(told[-1].meaning, told[-1].number, denied=True)
            at += 1
        elif found[at] in _BEFORE | _ALONE:
            denying, at = True, at + 1
        elif filler is not None:
            at += filler[0]
        elif prose:
            denying, at = False, at + 1
        else:
            raise UnknownWord(column, _as_written(text, found[at]))
    return iter(told + _alone(column, text, denying and not told[clause:] and not prose))


def _alone(column: str, text: str, stands: bool) -> list[Said]:
    """What a denial means that stands by itself."""
    if not stands:
        return []
    if "alone" not in _column(column)[0]:
        raise UnknownWord(column, text.strip())
    return [Said(_column(column)[0]["alone"])]


def _phrase_follows(found: tuple[str, ...], at: int, phrases: Phrases) -> bool:
    return at < len(found) and longest(found, at, phrases) is not None


def _as_written(text: str, token: str) -> str:
    """The whole word of a text that a token is part of."""
    return next((word for word in re.split(r"[\s,;/()\[\]]+", text) if token in word.lower()), token)


@dataclass(frozen=True)
class Cell:
    """What a cell says, outside its brackets and, of some meanings, within."""

    column: str
    told: tuple[Said, ...]  # what it says, without what it denies
    remarked: frozenset[str]
    unknown: bool = False  # empty, or the source does not say

    @property
    def heads(self) -> list[str]:
        """The meanings outside the brackets, each of one word."""
        return list(dict.fromkeys(word for one in self.told for word in one.meaning.split()))

    def __contains__(self, meaning: str) -> bool:
        return meaning in self.heads or meaning in self.remarked

    def number(self, meaning: str) -> float | None:
        """The number that stands with a meaning: 3 of `zero3`."""
        return next((one.number for one in self.told if one.meaning == meaning and one.number is not None), None)

    def one_of(self, *meanings: str) -> str | None:
        """The one meaning of these that the cell has; None: none.

        Raises:
            LeftOut: it has several.
        """
        found = [meaning for meaning in meanings if meaning in self.heads]
        if len(found) > 1:
            raise LeftOut(f"column {self.column}: {' and '.join(found)} at once")
        return found[0] if found else None


def cell_of(column: str, text: str) -> Cell:
    """What a cell of a column says.

    Raises:
        UnknownWord: outside brackets it has a word that the column's vocabulary has not.
    """
    words = _column(column)[0]
    inside = {
        word for one in said_in(column, remarks_of(text), prose=True) if not one.denied for word in _split(one.meaning)
    }
    remarked = frozenset(inside & {word for meaning in words["remarks"] for word in _split(meaning)})
    if silent(text):
        return Cell(column, (), remarked, unknown=True)
    try:
        told = list(said_in(column, re.split(r"\s[-–—]+\s", bare(text))[0]))  # what stands behind a dash is prose, too
    except UnknownWord as error:
        at = text.lower().find(error.word)
        raise UnknownWord(column, text[at : at + len(error.word)] if at >= 0 else error.word) from None
    kept = tuple(one for one in told if not one.denied)
    if told and not kept and "alone" in words:
        kept = (Said(words["alone"]),)
    if not kept:
        raise UnknownWord(column, text.strip())
    return Cell(column, kept, remarked)


def _split(meaning: str) -> list[str]:
    return meaning.split()


# -- prose -----------------------------------------------------------------------------------------------------------

_DENIED_BEFORE = re.compile(
    r"\b(?:no|not|non|without|w/o|never|disabled?|disabling|instead of|rather than)\b[\s\w./-]{0,24}$"
)
_DENIED_AFTER = re.compile(
    r"^[\w]*\s*(?:is|was|are|were|has been)?\s*(?:=|:)?\s*(?:off\b|disabled\b|false\b|not\b|unused\b|=\s*0\b)"
)


def states(text: str, phrase: str) -> bool:
    """Whether a text in lower case has a phrase that it does not deny: `without liger`, `torch.compile off`."""
    for found in re.finditer(re.escape(phrase), text):
        before = re.split(r"[;,:()]|\. ", text[: found.start()])[-1]
        if not _DENIED_BEFORE.search(before) and not _DENIED_AFTER.match(text[found.end() :]):
            return True
    return False
