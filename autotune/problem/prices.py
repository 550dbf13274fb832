"""What a GPU costs to rent: `data/prices.json`, rough and dated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Price:
    """What one GPU costs on demand; `date` is a month, or a year, in which somebody read the provider's list."""

    usd_per_hour: float
    provider: str
    date: str
    source: str

    def __str__(self) -> str:
        when = f", {self.date}" if self.date else ""
        return f"${self.usd_per_hour:.2f} a GPU and hour ({self.provider}{when})"


@cache
def price_table() -> dict[str, Price]:
    """Prices by the names of `data/gpus.json`; a card that nobody lists is missing."""
    rows = json.loads((resources.files("autotune") / "data" / "prices.json").read_text(encoding="utf-8"))["prices"]
    return {row["gpu"]: Price(**{key: value for key, value in row.items() if key != "gpu"}) for row in rows}
