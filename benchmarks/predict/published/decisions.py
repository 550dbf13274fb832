"""What a source states without a number: that a configuration ran, or did not, and up to which micro-batch it ran.

Statements that compare two runs (`faster`, `2x speedup`) are compared with nothing, since a row is of one run.
"""

from __future__ import annotations

import re

from benchmarks.predict.published.number_formats import count, printed
from benchmarks.predict.published.rows import Row, length, plain_unit
from benchmarks.predict.published.words import LeftOut, UnknownWord, Unreadable, bare, vocabulary


def verdict(row: Row) -> bool | None:
    """Whether the row says that it ran; None where its value is a number of something.

    Raises:
        LeftOut: main memory was at an end, or nobody knows the words.
    """
    kind, text = row.kind, bare(row["value"]) or row["value"].strip().lower()
    words = vocabulary()["decisions"]
    if text in words["host"] or re.match(r"host|cpu|ram\b", text):
        raise LeftOut("host memory")
    if re.search(r"\boom\b|out of memory|outofmemory", text):
        return bool(re.match(r"no\b|not\b|without", text)) or text.endswith("free")
    yes, no = text in words["ran"], text in words["failed"]
    if kind.startswith(("oom", "out_of_memory")):
        if text and not (yes or no) and not row.unknown("value"):
            raise UnknownWord("value", row["value"])
        return text in ("no", "n", "false", "0") or text in set(words["ran"]) - {
            "yes",
            "y",
            "true",
            "1",
            "✓",
            "✔",
            "✅",
        }
    if kind.startswith(("fit", "runs", "ran", "trains")):
        if row.unknown("value"):
            return True
        if not (yes or no):
            raise UnknownWord("value", row["value"])
        return yes
    return None


def largest_micro_batch(row: Row, gpus: int | None, accumulation: int | None) -> int:
    """The largest micro-batch that ran, 0 where none did: a `max_micro_batch` row's value, in the unit that it has.

    Raises:
        LeftOut: the value contradicts the row's micro-batch, or it is of all GPUs, whose number is unknown.
        Unreadable: there is no number, or its unit is none of a batch.
    """
    stated = None if row.unknown("micro_batch") else count(row["micro_batch"], "micro_batch")
    text = bare(row["value"])
    if row.unknown("value") or (text in vocabulary()["decisions"]["ran"] and not text.isdigit()):
        if stated is None:
            raise LeftOut("micro-batch not stated")
        return stated
    if text in ("0", "oom", "none", "nothing"):
        return 0
    found = printed(row["value"])
    unit = plain_unit(row["unit"] or found.unit) + " " + row.kind
    value = found.value
    if "tokens" in unit:
        tokens = length(row)
        if tokens is None or not tokens.full:
            raise LeftOut("a largest batch in tokens of rows of unknown length")
        value /= tokens.longest
    elif not re.match(r"(?:samples|batch|micro|rows|$|/gpu| )", unit):
        raise Unreadable("unit", f"{row['unit']!r} is none of a batch (samples/GPU, samples, tokens)")
    if re.search(r"global|total|sum|all gpus|effective", unit + " " + row["unit"].lower()):
        if not gpus:
            raise LeftOut("number of GPUs not stated")
        value /= gpus * (accumulation or 1)
    if value < 1 or value != int(value):
        raise LeftOut("column value: no whole micro-batch of one GPU")
    if stated is not None and stated != int(value) and row["micro_batch"].strip().isdigit() and stated != found.value:
        raise LeftOut("the largest micro-batch contradicts the row's micro-batch")
    return int(value)
