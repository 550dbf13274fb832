"""How docs/figures.py reads a result and writes figures: numbers, shares, tables, lists in prose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.common import RESULTS


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def span(values: list[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"
