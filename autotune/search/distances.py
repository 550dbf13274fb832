"""Distances from a setting to every candidate. The sampler may propose any setting; the nearest candidate is tried."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autotune.predict.knobs import Floats
from autotune.problem.candidate import CHECKPOINTING, Candidate, Value


class Distances:
    """Distances from a setting to all candidates, summed over knobs.

    A number adds the log2 of the ratio, at most FAR. A different choice adds FAR.
    """

    FAR = 4.0

    def __init__(self, candidates: list[Candidate]) -> None:
        self._count = len(candidates)
        names = sorted({name for candidate in candidates for name in candidate.as_dict})
        self._codes: dict[Any, float] = {}
        self._columns = {}
        for name in names:
            values = [candidate.get(name) for candidate in candidates]
            codes = {value: self._code(name, value) for value in dict.fromkeys(values)}
            self._columns[name] = np.array([codes[value] for value in values])

    def _code(self, name: str, value: Value | None) -> float:
        """Return the log2 of a number, or for a choice or missing knob a code far from every such logarithm."""
        if self._is_number(name, value):
            return math.log2(max(float(value), 1e-9))  # type: ignore[arg-type]
        return self._codes.setdefault((name, value), 1e3 * (1 + len(self._codes)))

    @staticmethod
    def _is_number(name: str, value: Value | None) -> bool:
        return (
            name not in (CHECKPOINTING, "zero_stage") and isinstance(value, int | float) and not isinstance(value, bool)
        )

    def to(self, wanted: Candidate) -> Floats:
        """Return the distances from `wanted` to the candidates, (n,)."""
        total = np.zeros(self._count)
        for name in {*wanted.as_dict, *self._columns}:
            column = self._columns.get(name)
            if column is None:
                total += self.FAR
            else:
                total += np.minimum(self.FAR, abs(column - self._code(name, wanted.get(name))))
        return total
