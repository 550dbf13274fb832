"""GPUs by the names that people publish them under: whole words, the longest name first (an A4000 is no A40)."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from autotune.problem.gpu_specs import GpuFacts, gpu_table
from benchmarks.predict.published.number_formats import NUMBER, number
from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import (
    LeftOut,
    Phrases,
    UnknownWord,
    longest,
    phrases_of,
    remarks_of,
    silent,
    tokens,
    vocabulary,
)

NEAR = 0.15  # a stated memory that differs by less is the card's nominal one


@cache
def _names() -> tuple[dict[str, Any], Phrases, Phrases]:
    words = vocabulary()["gpu"]
    by_card: dict[str, list[str]] = {}
    for name, card in words["cards"].items():
        for prefix in ("", *(prefix + " " for prefix in words["prefixes"])):
            by_card.setdefault(card, []).append(prefix + name)
    refused = {f"!{why}": words[why] for why in ("not CUDA", "other chips")}
    fillers = {"": words["fillers"], "gib": ["# gb", "# gib", "# g"]}
    return words, phrases_of({**by_card, **refused}), phrases_of(fillers)


def cards_in(text: str) -> tuple[list[str], float | None]:
    """(rows of autotune's table that a text names, the GiB that it states).

    Raises:
        LeftOut: the card is none of CUDA's, or a part or another chip of its name.
        UnknownWord: it names what nobody knows.
    """
    words, phrases, fillers = _names()
    text = re.sub(r"(\d)\s*[x×*]\s*(?=[A-Za-z])", r"\1 x ", text)  # 4xRTX
    found, at, cards, gib, numbers = tokens(text), 0, list[str](), None, list[str]()
    while at < len(found):
        here, filler = longest(found, at, phrases), longest(found, at, fillers)
        if here is not None and here[1].startswith("!"):
            raise LeftOut(f"column gpu: {text.strip()!r}: {here[1][1:]}")
        if here is not None and not (here[2] is None and filler and filler[0] > here[0]):
            cards.append(here[1])
            at += here[0]
        elif filler is not None:
            gib = filler[2] if filler[1] else gib
            numbers += [found[at]] if found[at][0].isdigit() and not filler[1] else []
            at += filler[0]
        else:
            raise UnknownWord("gpu", text.strip())
    if not cards and (numbers or set(found) & set(words["prefixes"])):
        raise UnknownWord("gpu", text.strip())
    return list(dict.fromkeys(cards)), gib


def gpu_of(row: Row) -> tuple[GpuFacts | None, float | None]:
    """(facts of the row's GPU, its memory in GiB); None where they are not stated.

    Where several of one memory are named (`RTX 3090/4090`) the first, but for steps. An 80 GB card of unknown name has no facts.

    Raises:
        LeftOut: the card is not CUDA's, is not known, or several are named.
    """
    gib = _stated(row["gpu_mem_gib"]) if not row.unknown("gpu_mem_gib") else None
    text = re.sub(r"\([^()]*\)?", " ", row["gpu"])
    if silent(row["gpu"]):
        return None, gib
    inside = re.search(r"(\d+(?:\.\d+)?) ?gi?b(?!.*total)", remarks_of(row["gpu"]))
    gib = float(inside.group(1)) if gib is None and inside else gib
    whole = re.split(r"\blimited\b|\bcapped\b|\bwith memory\b", text, flags=re.IGNORECASE)[0]
    parts = re.split(r"\s*(?:/|,|\+|&|\bor\b|\band\b|;)\s*", whole, flags=re.IGNORECASE)
    named: list[str] = []
    for part in filter(None, parts):
        cards, stated = cards_in(part)
        gib = gib if gib is not None else stated
        named += [_variant(card, gib) for card in cards]
    table = gpu_table()
    if len(set(named)) > 1:
        alike = len({round(table[name].memory_gib) for name in named}) == 1
        if not alike or row.of_speed:
            raise LeftOut("column gpu: several cards")
    facts = table[named[0]] if named else None
    if facts is not None and (gib is None or abs(gib / facts.memory_gib - 1) < NEAR):
        gib = facts.memory_gib
    return facts, gib


def _stated(text: str) -> float | None:
    found = re.search(NUMBER, text)
    if found is None:
        raise UnknownWord("gpu_mem_gib", text)
    gib = number(found.group())
    return gib / 1024 if re.match(r"\s*mi?b", text[found.end() :].lower()) or gib >= 4096 else gib


def _variant(card: str, gib: float | None) -> str:
    """The card of this name that has the stated memory; the usual one where none has."""
    table = gpu_table()
    for name in (card, *vocabulary()["gpu"]["variants"].get(card, ())):
        if gib is not None and abs(gib / table[name].memory_gib - 1) < NEAR:
            return str(name)
    return card
