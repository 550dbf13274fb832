"""Predictions of cases beside what was measured, without calibration and after the first row of each source."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError
from autotune.predict.predictor import Prediction, Predictor
from autotune.predict.trace import trace_job
from autotune.predict.trace_data import Trace
from autotune.predict.what_if import JobKind
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from benchmarks.predict.many_traces import trace_jobs
from benchmarks.predict.published.readers import Case
from benchmarks.predict.published.sources import source_of

LEAST_FOR_SPEARMAN = 8  # rows of a source
MEMORY = ("allocated", "reserved", "nvml")


@dataclass(frozen=True)
class Scored:
    """A case and what was predicted of its figure, in the figure's unit."""

    case: Case
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.case.value - 1)

    @property
    def inside(self) -> bool:
        return self.low <= self.case.value <= self.high

    @property
    def half_width(self) -> float:
        """Half the interval's width, as a share of the prediction."""
        return (self.high - self.low) / 2 / self.predicted

    @property
    def right(self) -> bool:
        """Of a decision."""
        return bool(self.predicted) == bool(self.case.value)


def traced(
    cases: Sequence[Case], on_traced: Callable[[int, int], None] | None = None
) -> tuple[list[Case], list[tuple[Case, str]]]:
    """(cases whose model can be traced or estimated, why of the others)."""
    with contextlib.suppress(Exception):  # what it cannot trace `_trace` meets again, a row at a time
        trace_jobs([(case.job, case.loss) for case in cases], on_traced)
    good, bad = [], []
    for case in cases:
        try:
            _trace(case)
        except UserError as error:
            bad.append((case, str(error)))
        except Exception as error:  # what a reader made of a row can be more than the tracer can take
            bad.append((case, fault(error)))
        else:
            good.append(case)
    return good, bad


def fault(error: Exception) -> str:
    """Why a row is left out that nobody expected to fail."""
    return f"cannot be judged: {type(error).__name__}: {' '.join(str(error).split())[:120]}".rstrip(": ")


def predictable(cases: Sequence[Case]) -> tuple[list[Case], list[tuple[Case, str]]]:
    """(cases of which the figure is predicted, why of the others)."""
    good, bad = [], []
    for case in cases:
        try:
            predicted, low, high = figure(case, predictor_of(case).predict(case.candidate))
            JobKind.of(case.job, case.candidate, case.hardware)
            if case.quantity != "decision" and not (predicted > 0 and math.isfinite(predicted + high - low)):
                raise ValueError(f"predicted {predicted:g}")
        except Exception as error:
            bad.append((case, fault(error)))
        else:
            good.append(case)
    return good, bad


_TRACES: dict[tuple[str, str], Trace] = {}


def _trace(case: Case) -> Trace:
    key = (
        dataclasses.replace(case.job, ranks=1, base_config={}, lengths=(), packed=False, compiled=False).key,
        case.loss,
    )
    if key not in _TRACES:
        _TRACES[key] = trace_job(case.job, loss=case.loss)
    return _TRACES[key]


def predictor_of(case: Case) -> Predictor:
    trace = _trace(case)
    return Predictor(case.job, case.hardware, _with_inputs(trace) if case.keeps_inputs else trace)


def _with_inputs(trace: Trace) -> Trace:
    """The trace if frozen layers saved their inputs from forward to backward; a checkpoint drops them."""
    run = trace.plain
    (fixed, each), left = run.frozen_only, run.after_forward[1]
    shares = [min(1.0, max(0.0, one / left)) if left > 0 else 0.0 for one in run.per_sequence]
    kept = dataclasses.replace(
        run,
        fixed=[one + share * fixed for one, share in zip(run.fixed, shares, strict=True)],
        per_sequence=[one + share * each for one, share in zip(run.per_sequence, shares, strict=True)],
    )
    return dataclasses.replace(trace, plain=kept)


def parameters_of(case: Case) -> int:
    """Elements of the model's parameters, adapters included."""
    trace = _trace(case)
    return sum(trace.parameters) + trace.frozen


def figure(case: Case, prediction: Prediction, quantity: str | None = None) -> tuple[float, float, float]:
    """(predicted, low, high) of the figure's quantity, in bytes, in seconds, or 1 for what fits."""
    quantity = quantity or case.quantity
    if quantity == "step":
        return prediction.step_seconds, *prediction.step_interval
    if quantity == "decision":
        return float(prediction.fits), 0.0, 1.0
    peak, (low, high) = prediction.peak_bytes, prediction.peak_interval
    if quantity == "weights":  # and the largest of them while it is dequantized
        held = prediction.memory["parameters"] + prediction.memory["gathered parameters"]
        return held, held * low / peak, held * high / peak
    if quantity == "allocated" and hasattr(prediction, "allocated_bytes"):
        return prediction.allocated_bytes, *prediction.allocated_interval
    beside = 0.0 if quantity == "nvml" else prediction.memory["context and communication"]
    if quantity == "allocated":
        beside += prediction.memory["allocator"]
    return peak - beside, low - beside, high - beside


def uncalibrated(cases: Sequence[Case]) -> list[Scored]:
    """Every case as a fresh predictor has it."""
    return [Scored(case, *figure(case, predictor_of(case).predict(case.candidate))) for case in cases]


def calibrated(cases: Sequence[Case]) -> list[Scored]:
    """All cases but those that calibrated: of each source the first configuration with a peak, and with a step.

    A source whose first row teaches nothing that can be fitted has none of its rows here.
    """
    found: list[Scored] = []
    by_source: dict[str, list[Case]] = {}
    for case in cases:
        by_source.setdefault(source_of(case.row).name, []).append(case)
    for own in by_source.values():
        with contextlib.suppress(ArithmeticError, ValueError):
            found += _calibrated_source(own)
    return found


def _calibrated_source(own: Sequence[Case]) -> list[Scored]:
    found = []
    peak = next((case for case in own if case.quantity in MEMORY), None)
    steps = [case for case in own if case.quantity == "step"]
    same = [case for case in steps if peak and case.configuration == peak.configuration]
    step = next(iter(same or steps), None)
    memory = learnt(peak, predictor_of(peak)) if peak else None
    time = learnt(step, predictor_of(step)) if step else None
    for case in own:
        if case is peak or case is step:
            continue
        predictor = predictor_of(case)
        predictor.believe(memory, time)
        found.append(Scored(case, *figure(case, predictor.predict(case.candidate))))
    return found


def learnt(case: Case, predictor: Predictor) -> Predictor:
    """The predictor after the case was observed, as a study observes a trial.

    A peak that is not NVML's is observed as the NVML peak that goes with it: what is beside torch's allocator stays as
    predicted. A peak teaches nothing about steps, nor the other way round: `believe` takes one of them.
    """
    before = predictor.predict(case.candidate)
    peak, step = before.peak_bytes, before.step_seconds
    if case.quantity == "step":
        step = case.value
    else:
        peak += case.value - figure(case, before)[0]
    allocated: dict[str, Any] = {"torch_allocated_bytes": int(case.value)} if case.quantity == "allocated" else {}
    measured = Measurement(step, 0.0, 4, 1.0, 1.0, int(peak), **allocated)
    predictor.observe(case.candidate, Outcome(OutcomeKind.OK, measurement=measured))
    return predictor


# -- summaries -------------------------------------------------------------------------------------------------------


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """Figures of rows of one kind: peaks, steps or decisions. Shares and errors as fractions."""
    decisions = [one for one in scored if one.case.quantity == "decision"]
    others = [one for one in scored if one.case.quantity != "decision"]
    found: dict[str, Any] = {"rows": len(scored)}
    if decisions:
        found |= {"right": sum(one.right for one in decisions), "wrong": sum(not one.right for one in decisions)}
    if others:
        errors = sorted(one.error for one in others)
        found |= {
            "median": statistics.median(errors),
            "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
            "inside": sum(one.inside for one in others) / len(others),
            "half_width": statistics.median(one.half_width for one in others),
            "bias": statistics.median(one.predicted / one.case.value - 1 for one in others),
        }
    return found


def ranked(scored: Sequence[Scored]) -> list[Scored]:
    """The rows of which a rank correlation is told; none where they are fewer than 8."""
    rows = [one for one in scored if one.case.quantity != "decision"]
    return rows if len(rows) >= LEAST_FOR_SPEARMAN else []


def spearman(scored: Sequence[Scored]) -> float | None:
    """Rank correlation of predicted and measured figures; None for fewer than 8 rows, and where either are all the same."""
    rows = ranked(scored)
    if min(len({one.predicted for one in rows}), len({one.case.value for one in rows})) < 2:
        return None
    a, b = _ranks([one.predicted for one in rows]), _ranks([one.case.value for one in rows])
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks; equal values share the mean of theirs."""
    order = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(order):
        places.setdefault(value, []).append(place)
    return [statistics.mean(places[value]) for value in values]


__all__ = [
    "Hardware",
    "Scored",
    "calibrated",
    "fault",
    "figure",
    "parameters_of",
    "predictable",
    "ranked",
    "spearman",
    "summary",
]
__all__ += ["traced", "uncalibrated"]
