"""Forecast of each trial from earlier trials, and the forecasts' errors.

Predictions are not stored. They are recomputed from the trace, with a predictor that observes the trials in order. The
predictor is refitted only before the trials of `_refits`, as a fit costs as much as many predictions. A trial's forecast uses
earlier trials only.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from autotune.predict.prediction import SIGMAS, Prediction
from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate
from autotune.results.report.data import Accuracy, Forecast, Status, Trial
from autotune.search.records import RESUME, Record


def _refits(count: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 9, 13, …: each 1.5 times the one before."""
    at, found = 0, []
    while at < count:
        found.append(at)
        at = max(at + 1, at * 3 // 2)
    return found


def forecasts(
    records: Sequence[Record], predictor: Predictor, explained: Collection[Candidate]
) -> tuple[dict[int, Forecast], dict[Candidate, Prediction]]:
    """Return (forecast by trial number, breakdown before the first trial of each candidate in `explained`).

    The predictor has observed all trials afterwards.
    """
    told = [
        record for record in records if record.outcome is not None and record.role != RESUME and record.candidate.knobs
    ]
    found: dict[int, Forecast] = {}
    broken_down: dict[Candidate, Prediction] = {}
    starts = _refits(len(told))
    for start, end in pairwise([*starts, len(told)]):
        block = told[start:end]
        candidates = [record.candidate for record in block]
        table = predictor.table(candidates)
        fits = predictor.fits(table)
        for i, record in enumerate(block):
            spread = float(np.exp(SIGMAS * table.step_sigma[i]))
            peak, step, sigma = float(table.peak[i]), float(table.step[i]), float(table.peak_sigma[i])
            found[record.number] = Forecast(
                peak,
                (max(0.0, peak - SIGMAS * sigma), peak + SIGMAS * sigma),
                step,
                (step / spread, step * spread),
                bool(fits[i]),
            )
        for candidate in dict.fromkeys(candidates):
            if candidate in explained and candidate not in broken_down:
                broken_down[candidate] = predictor.predict(candidate)
        for record in block:
            assert record.outcome is not None
            predictor.observe(record.candidate, record.outcome)
    return found, broken_down


def accuracy(trials: Sequence[Trial]) -> Accuracy | None:
    """Return the error over each config's first trial, as later ones are no longer unseen. None without a measurement."""
    firsts: dict[str, Trial] = {}
    for trial in trials:
        if trial.forecast is not None:
            firsts.setdefault(trial.label, trial)
    memory, step, memory_inside, step_inside = [], [], [], []
    for trial in firsts.values():
        expected, peak, seconds = trial.forecast, trial.peak_bytes, trial.step_seconds
        if expected is None or peak is None or seconds is None:
            continue
        memory.append(abs(expected.peak_bytes / peak - 1))
        step.append(abs(expected.step_seconds / seconds - 1))
        memory_inside.append(expected.peak_interval[0] <= peak <= expected.peak_interval[1])
        step_inside.append(expected.step_interval[0] <= seconds <= expected.step_interval[1])
    if not memory:
        return None
    expected_to_fit = [trial for trial in firsts.values() if trial.forecast and trial.forecast.fits]
    return Accuracy(
        len(memory),
        statistics.median(memory),
        statistics.median(step),
        sum(memory_inside) / len(memory),
        sum(step_inside) / len(step),
        len(expected_to_fit),
        sum(trial.status is Status.RAN_OUT for trial in expected_to_fit),
    )
