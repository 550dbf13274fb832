"""How far a setting is from every candidate: the sampler asks for any setting, the nearest candidate is tried."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autotune.predict.knobs import Floats
from autotune.problem.candidate import CHECKPOINTING, Candidate, Value


class Distances:
    """Distances of a setting from all candidates, summed over knobs: for numbers the log2 of their ratio, at most FAR;
    FAR for a different choice."""

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
        """The log2 of a number; for a choice or a missing knob, a code far from every such logarithm."""
        if self._is_number(name, value):
            return math.log2(max(float(value), 1e-9))  # type: ignore[arg-type]
        return self._codes.setdefault((name, value), 1e3 * (1 + len(self._codes)))

    @staticmethod
    def _is_number(name: str, value: Value | None) -> bool:
        return (
            name not in (CHECKPOINTING, "zero_stage") and isinstance(value, int | float) and not isinstance(value, bool)
        )

    def to(self, wanted: Candidate) -> Floats:
        """(n,) distances of `wanted` from the candidates."""
        total = np.zeros(self._count)
        for name in {*wanted.as_dict, *self._columns}:
            column = self._columns.get(name)
            if column is None:
                total += self.FAR
            else:
                total += np.minimum(self.FAR, abs(column - self._code(name, wanted.get(name))))
        return total
