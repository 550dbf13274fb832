"""Convert candidates and outcomes to Optuna's terms: parameters, distributions and constraints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from autotune.problem.candidate import Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.knobs import KNOBS
from autotune.problem.outcome import Outcome
from autotune.problem.space import SearchSpace
from autotune.units import GIB


def constraints(outcome: Outcome, hardware: Hardware) -> dict[str, float]:
    """Return Optuna's constraints, feasible at 0 or less: GiB over the ceiling, and 1 for any other failure."""
    if outcome.measurement is not None:
        over = (outcome.measurement.peak_bytes - hardware.ceiling_bytes) / GIB
        return {"memory_gib_over": over, "failed": 0.0}
    if outcome.kind.is_oom:
        over = max((outcome.missing_bytes or 0) / GIB, 0.01) + hardware.capacity_bytes * hardware.headroom / GIB
        return {"memory_gib_over": over, "failed": 0.0}
    return {"memory_gib_over": 0.0, "failed": 1.0}


def told(
    candidate: Candidate, space: SearchSpace | None, stored: Mapping[str, BaseDistribution]
) -> tuple[dict[str, Value], dict[str, BaseDistribution]]:
    """Return the candidate's parameters and their distributions: ordered numbers as ranges, the rest as choices.

    A database accepts only one type of distribution, and one set of choices, per name. The stored distributions
    therefore decide, because a study may be searched in several spaces. A value that the stored distribution cannot
    hold is stored under a numbered name: `NAME (2)`.

    Args:
        candidate: the candidate.
        space: a distribution covers this space's values; None covers the candidate's values only.
        stored: distributions of the study's earlier trials, by name.
    """
    parameters: dict[str, Value] = {}
    found: dict[str, BaseDistribution] = {}
    for name, value in candidate.knobs:
        values = space.knobs[name].values if space is not None and name in space.knobs else ()
        for key in itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2))):
            holds = holding(stored[key], value) if key in stored else distribution(name, (*values, value))
            if holds is not None:
                parameters[key], found[key] = value, holds
                break
    return parameters, found


def holding(stored: BaseDistribution, value: Value) -> BaseDistribution | None:
    """Return a distribution that holds the value and is compatible with the stored one; None if there is none."""
    if isinstance(stored, CategoricalDistribution):
        return stored if any(type(one) is type(value) and one == value for one in stored.choices) else None
    assert isinstance(stored, IntDistribution | FloatDistribution)
    if isinstance(value, bool | str) or (stored.log and value <= 0):
        return None
    if isinstance(stored, FloatDistribution):
        return FloatDistribution(min(stored.low, float(value)), max(stored.high, float(value)), log=stored.log)
    if isinstance(value, int):
        return IntDistribution(min(stored.low, value), max(stored.high, value), log=stored.log)
    return None


def distribution(name: str, values: tuple[Value, ...]) -> BaseDistribution:
    """Return a range or a choice that holds all values of a knob.

    A choice contains all possible values of the knob if these are few, including values that the space lacks.
    """
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and name != "zero_stage":
        low, high = min(numbers), max(numbers)
        if all(isinstance(v, int) for v in numbers):
            return IntDistribution(int(low), int(high), log=low >= 1)
        return FloatDistribution(float(low), float(high), log=low > 0)
    return CategoricalDistribution(tuple(dict.fromkeys((*_all_of(name), *values))))


def _all_of(name: str) -> tuple[Value, ...]:
    kind = KNOBS[name].kind if name in KNOBS else None
    if name == "zero_stage":
        return (0, 1, 2, 3)
    return (False, True) if kind is bool else kind if isinstance(kind, tuple) else ()
