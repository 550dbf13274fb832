"""Conclusions about untried candidates, from those that ran out of memory and from the predictor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.prediction import Table
from autotune.predict.predictor import Predictor
from autotune.predict.roofline import host_limit_bytes
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.results.report.data import Cell
from autotune.search.dominance import Dominance, Rules


@dataclass(frozen=True)
class Judged:
    """Candidates, in their order, with the conclusions about each."""

    cells: tuple[Cell, ...]  # RULED_OUT, TOO_MUCH, PREDICTED or, without a predictor, UNKNOWN
    culprits: Mapping[Candidate, Candidate]  # for each excluded candidate, one that ran out of memory and needs no more
    table: Table | None
    over_host: tuple[bool, ...]  # main memory is too small


def judged(
    candidates: Sequence[Candidate], ran_out: Collection[Candidate], hardware: Hardware, predictor: Predictor | None
) -> Judged:
    """Judge candidates without a trial.

    Args:
        ran_out: candidates that ran out of a device's memory.
        predictor: calibrated.
    """
    every = list(dict.fromkeys([*candidates, *ran_out]))
    dominance = Dominance(every, Rules.of(hardware.device, hardware.count, predictor.trace if predictor else None))
    culprits: dict[Candidate, Candidate] = {}
    for candidate in ran_out:
        for i in np.flatnonzero(dominance.needs_no_less(candidate)):
            culprits.setdefault(every[i], candidate)
    if predictor is None or not candidates:
        cells = tuple(Cell.RULED_OUT if candidate in culprits else Cell.UNKNOWN for candidate in candidates)
        return Judged(cells, culprits, None, (False,) * len(candidates))
    table = predictor.table(candidates)
    host = table.host * hardware.count / hardware.nodes > host_limit_bytes(hardware)
    cells = tuple(
        Cell.RULED_OUT if candidate in culprits else Cell.PREDICTED if fits else Cell.TOO_MUCH
        for candidate, fits in zip(candidates, predictor.fits(table).tolist(), strict=True)
    )
    return Judged(cells, culprits, table, tuple(host.tolist()))
