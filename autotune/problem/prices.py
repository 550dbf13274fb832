"""Rental prices of GPUs from `data/prices.json`, rough and dated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Price:
    """Price of one GPU on demand; `date` is the month or year in which the provider's list was read."""

    usd_per_hour: float
    provider: str
    date: str
    source: str

    def __str__(self) -> str:
        when = f", {self.date}" if self.date else ""
        return f"${self.usd_per_hour:.2f} a GPU and hour ({self.provider}{when})"


@cache
def price_table() -> dict[str, Price]:
    """Return prices by the names of `data/gpus.json`; a card without a listed price is missing."""
    rows = json.loads((resources.files("autotune") / "data" / "prices.json").read_text(encoding="utf-8"))["prices"]
    return {row["gpu"]: Price(**{key: value for key, value in row.items() if key != "gpu"}) for row in rows}
