"""Rows of benchmarks/predict/predictor.py: a measure, what it came to, its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def spearman(a: Any, b: Any) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def judged(measure: str, value: float, show: str, target: str, met: bool) -> dict[str, Any]:
    """A row: the value as it was found and as it is shown, and whether it meets the target."""
    return {"measure": measure, "ours": show, "target": target, "met": bool(met), "value": round(float(value), 6)}


def at_most(measure: str, value: float, limit: float, show: Callable[[float], str] = percent) -> dict[str, Any]:
    """A share, whatever its sign, against the largest that is wanted."""
    return judged(measure, value, show(value), f"{100 * limit:g} %", abs(value) <= limit)


def at_least(measure: str, value: float, limit: float, shown: str) -> dict[str, Any]:
    return judged(measure, value, shown, f"{limit:g}", value >= limit)


def about(against: str, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"against": against, **row} for row in rows]
