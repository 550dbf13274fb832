"""A pass of a model whose figures are round, for arithmetic that is done by hand, and the growth of a pass's peak."""

import numpy as np

from autotune.predict.features import Floats
from autotune.predict.trace_data import BACKWARD, FORWARD, Pass
from autotune.predict.zero_memory import PASSING, MemoryEstimate

PASS = Pass(
    [FORWARD, BACKWARD],
    [0, 0],
    [0, 0],
    [0, 0],
    (0, 0),
    flops=(1e12, 2e12),
    attention=(0, 0),
    moved=((0, 1e9), (0, 2e9)),
    operators=(300, 600),
)


def act_bytes_per_sequence(run: Pass) -> float:
    """The bytes by which one more sequence raises the peak of forward."""

    def peak(micro_batch: int) -> float:
        rows = zip(run.fixed, run.per_sequence, run.phase, strict=True)
        return max(fixed + each * micro_batch for fixed, each, at in rows if at == FORWARD)

    return peak(2) - peak(1)


def peaks_of(one: MemoryEstimate) -> Floats:
    """(moments, candidates): bytes of live tensors on the device."""
    return np.asarray(one.resident() + sum(map(one.terms.__getitem__, PASSING)))
