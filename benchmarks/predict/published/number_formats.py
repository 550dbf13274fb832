"""Numbers as people print them: `2,048`, `1.5k`, `80 GB`, `7B`, `≈ 12`, `72-80`, `21.3 ± 0.2`, `12.6+10.9`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.predict.published.words import LeftOut, Unreadable, bare

_THIN = "\u00a0\u2009\u202f"  # spaces that part thousands
# Thousands are parted by commas, apostrophes, underscores or thin spaces; any other comma is a decimal one.
NUMBER = rf"\d{{1,3}}(?:[,'’_{_THIN}]\d{{3}})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?(?:e[+-]?\d+)?"
_SUFFIXES = {"k": 1e3, "m": 1e6, "million": 1e6, "b": 1e9, "bn": 1e9, "billion": 1e9}
_WORDS = {"single": 1, "one": 1, "two": 2, "three": 3, "four": 4, "eight": 8, "sixteen": 16}
_ABOUT = re.compile(r"^(?:[≈~∼≃]|about|approx(?:imately|\.)?|around|circa|ca\.?|c\.|roughly|nearly)\s*")
_BOUND = re.compile(r"^(?:[<>≤≥]=?|at (?:least|most)|up to|over|under|more than|less than|below|above|max\b|min\b)")
_RANGE = rf"({NUMBER})\s*(k?)\s*[a-z%]*\s*(?:-|–|—|~|…|\.\.+|to|and)\s*({NUMBER})\s*(k?)(?![a-z]*\d)"


def number(text: str) -> float:
    """A number with or without separators."""
    text = re.sub(rf"[,'’_{_THIN}](?=\d{{3}}(?:\D|$))", "", text) if not text.startswith("0,") else text
    return float(text.replace(",", "."))


@dataclass(frozen=True)
class Printed:
    """A figure as it is printed: its number, and the unit that stands behind it ("" where none does)."""

    value: float
    unit: str


def printed(text: str, column: str = "value") -> Printed:
    """The figure of a cell. Of a range the middle; of GPU0 + GPU1 the larger: a peak is the worst rank's.

    Raises:
        LeftOut: it is a bound, or one of several figures.
        Unreadable: there is no positive number.
    """
    plain = bare(text).replace("−", "-").replace("×", "x").strip()
    plain = _ABOUT.sub("", plain)
    if _BOUND.match(plain):
        raise LeftOut(f"column {column}: a bound, no figure")
    plain = re.sub(rf"\s*(?:±|\+/-|\+-)\s*(?:{NUMBER})", "", plain.removeprefix("between "))
    found = list(re.finditer(NUMBER, plain))
    if not found or plain.startswith("-"):
        raise Unreadable(column, f"{text!r} is no positive number")
    unit = re.sub(r"\s+", " ", plain[found[-1].end() :]).strip()
    times = 1e3 if re.match(r"k\b", unit) else 1.0
    unit = re.sub(r"^k\b\s*", "", unit)
    values = [number(one.group()) * times for one in found]
    if len(values) > 1:
        values = [_one_of(plain, values, column)]
    if values[0] <= 0:
        raise Unreadable(column, f"{text!r} is no positive number")
    return Printed(values[0], unit)


def _one_of(plain: str, values: list[float], column: str) -> float:
    if "+" in plain and re.fullmatch(rf"(?:{NUMBER})(?:\s*[a-z]*\s*\+\s*(?:{NUMBER}))+\s*[a-z/ ]*", plain):
        return max(values)
    span = re.match(_RANGE, plain)
    if span and span.end() >= len(plain.rstrip("abcdefghijklmnopqrstuvwxyz/% ")) and len(values) == 2:
        low, high = number(span.group(1)), number(span.group(3))
        low, high = (low * (1e3 if span.group(2) else 1.0), high * (1e3 if span.group(4) else 1.0))
        if not span.group(2) and span.group(4) and low < 1000:
            low *= 1e3  # 1-2k
        if low < high:
            return (low + high) / 2
    raise LeftOut(f"column {column}: several figures")


def count(text: str, column: str) -> int:
    """A whole number of things, at least 1: `8`, `8 GPUs`, `8xA100`, `2 nodes x 8`, `1,024`.

    Raises:
        LeftOut: there are several.
        Unreadable: there is none, or one below 1.
    """
    plain = (bare(text) or text.lower()).replace("×", "x")
    plain = _ABOUT.sub("", plain)
    if plain.split() and plain.split()[0] in _WORDS:
        return _WORDS[plain.split()[0]]
    if product := re.match(
        r"(\d+)(?:\s*[x*]| nodes?(?: of| with|,|\s*[x*])?)\s*(\d+)(?![\d.,])(?: ?gpus?| each| per node|$)*", plain
    ):
        if column == "n_gpus":
            return int(product.group(1)) * int(product.group(2))
        raise LeftOut(f"column {column}: several figures")
    if column == "n_gpus" and re.match(r"\d+ nodes?\b(?!.*\d)", plain):
        raise LeftOut("column n_gpus: nodes without their GPUs")
    if column == "n_gpus" and re.match(r"\d+\s*x\s*[a-z]", plain):
        plain = plain.split("x")[0]  # 8xA100-80GB
    found = list(re.finditer(NUMBER, plain))
    if not found:
        raise Unreadable(column, f"{text!r} has no number")
    if len(found) > 1:
        raise LeftOut(f"column {column}: several figures")
    value = number(found[0].group()) * _scale(plain[found[0].end() :], ("k",))
    if value < 1:
        raise Unreadable(column, f"{text!r} is below 1")
    if value != int(value):
        raise Unreadable(column, f"{text!r} is no whole number")
    return int(value)


def _scale(rest: str, known: tuple[str, ...] = tuple(_SUFFIXES)) -> float:
    word = re.match(r"\s?([a-z]+)\b", rest)
    return _SUFFIXES[word.group(1)] if word and word.group(1) in known else 1.0


def billions(text: str) -> float:
    """A model's size in units of 1e9: `7`, `7B`, `350M`, `6.74 billion`, `6738415616`, `7-8`.

    Raises:
        LeftOut: there are several figures.
        Unreadable: there is no positive number.
    """
    one = printed(text, "params_b")
    value = one.value * _scale(one.unit) if _scale(one.unit) > 1 else one.value
    return value / 1e9 if value >= 1e5 else value


@dataclass(frozen=True)
class Length:
    """Tokens of a row of a batch: the longest, whether all are that long, and (source, target) where both are told apart."""

    longest: int
    full: bool
    sides: tuple[int, ...] = ()  # one: only the source's is a number


_TOKENS = {"k": 1024, "m": 1024**2}
_VARIES = ("<", "≤", "variable", "up to", "unpacked", "at most", "~", "≈", "dynamic")


def length_of(text: str) -> Length | None:
    """The length that a cell states: `2048`, `2,048`, `32k`, `<=512 (…)`, `variable (max 768, …)`, `512 in + 512 out`, `128-512`.

    Raises:
        LeftOut: there are several.
        Unreadable: there is none, or one below 1.
    """
    lower, plain = text.lower(), bare(text)
    numbers = _lengths(plain)
    varies = any(word in lower for word in _VARIES) or bool(re.search(r"\bmax(?:imum)?(?=\b|_)", lower))
    if re.search(r"\b(?:avg|average|mean|median)\b", plain):
        return None
    if not numbers and (inside := re.search(rf"max\D{{0,12}}({NUMBER}) ?([km]\b)?", lower)):
        numbers = [int(number(inside.group(1)) * _TOKENS.get(inside.group(2) or "", 1))]
    if not numbers:
        if varies or "unknown" in lower:
            return None
        raise Unreadable("seq_len", f"{text!r} has no number")
    if min(numbers) < 1:
        raise Unreadable("seq_len", f"{text!r} is below 1")
    two_sided = bool(re.search(r"source|target|\bsrc\b|\btgt\b|input|output|\bin\b|\bout\b|prompt|response", plain))
    if "+" in plain or two_sided:
        return Length(sum(numbers), not varies, tuple(numbers))
    if len(numbers) == 2 and numbers[0] < numbers[1] and re.search(r"\d[km]?\s*(?:-|–|to)\s*\d", plain):
        return Length(numbers[1], False)
    if len(numbers) > 1:
        raise LeftOut("column seq_len: several figures")
    return Length(max(numbers), not varies)


def _lengths(plain: str) -> list[int]:
    return [
        int(number(one) * _TOKENS.get(thousands, 1)) for one, thousands in re.findall(rf"({NUMBER}) ?([km]\b)?", plain)
    ]
