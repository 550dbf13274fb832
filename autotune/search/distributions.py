"""What Optuna is told of a candidate and its outcome: distributions of the knobs, and constraints."""

from __future__ import annotations

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from autotune.problem.candidate import Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome
from autotune.problem.space import SearchSpace
from autotune.units import GIB


def constraints(outcome: Outcome, hardware: Hardware) -> dict[str, float]:
    """Optuna's constraints, feasible at 0 or less: GiB over the ceiling, and 1 for what failed otherwise."""
    if outcome.measurement is not None:
        over = (outcome.measurement.peak_bytes - hardware.ceiling_bytes) / GIB
        return {"memory_gib_over": over, "failed": 0.0}
    if outcome.kind.is_oom:
        over = max((outcome.missing_bytes or 0) / GIB, 0.01) + hardware.capacity_bytes * hardware.headroom / GIB
        return {"memory_gib_over": over, "failed": 0.0}
    return {"memory_gib_over": 0.0, "failed": 1.0}


def distributions(candidate: Candidate, space: SearchSpace) -> dict[str, BaseDistribution]:
    """Optuna's view of the knobs that this candidate has: ordered numbers as ranges, the rest as choices."""
    found: dict[str, BaseDistribution] = {}
    for name, value in candidate.knobs:
        values: tuple[Value, ...] = space.knobs[name].values if name in space.knobs else (value,)
        found[name] = distribution(values, value)
    return found


def distribution(values: tuple[Value, ...], value: Value) -> BaseDistribution:
    """A range that holds all the values and this one, or a choice."""
    numbers = [v for v in (*values, value) if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) + 1 and len(set(numbers)) > 1 and max(numbers) > 3:
        low, high = min(numbers), max(numbers)
        if all(isinstance(v, int) for v in numbers):
            return IntDistribution(int(low), int(high), log=low >= 1)
        return FloatDistribution(float(low), float(high), log=low > 0)
    return CategoricalDistribution(values if value in values else (*values, value))
