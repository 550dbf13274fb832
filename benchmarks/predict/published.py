"""Predictions against measurements that others published: memory, steps, and what fits, without a GPU.

    python benchmarks/predict/published.py [--table NAME] [--source TEXT] [--rows] [--json FILE]
    python benchmarks/predict/published.py --coverage
    python benchmarks/predict/published.py --trials

`benchmarks/data/published/cases.json` has every usable figure as a job, a machine and a candidate. `id` is the row of the
table in that folder with the source's own words. Every figure is predicted without calibration, and after the first row of
its source has calibrated the predictor. Steps of our own trials on GPUs are cases, too. Models are traced once and cached;
the first run takes about 15 minutes. `--coverage` prints errors by kind of job from the stored results, and the factors of
`calibration.coverage_factors`. `--trials` prints our own trials, and how well rates of one card or model predict the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np

from autotune.predict.calibration import TIME, TIME_NOISE, fit, time_priors
from autotune.predict.features import Floats
from autotune.predict.predictor import Prediction, Predictor
from autotune.predict.step_time import step_seconds
from autotune.predict.trace import trace_job
from autotune.predict.trace_data import Trace
from autotune.problem.candidate import Candidate, job_with_candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.knobs import KNOBS
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from benchmarks.common import HERE, RESULTS, command_line, parse, print_table, write_json
from benchmarks.gpu.study import MODEL
from benchmarks.predict.many_traces import trace_jobs

CASES = HERE / "data" / "published" / "cases.json"
MAIN_TABLE = "gpu_published"
OWN = "own trials on"  # begins the name of a source of our own trials
OWN_FILES = "gpu-*.json"
MEMORY = ("allocated", "reserved", "nvml")
KINDS = ("peak", "step", "decision")
LEAST_FOR_SPEARMAN = 8  # rows of a source
SMALL_ROWS = 12
SMALL_SOURCE = "ml-sys"  # the smallest models: traced in seconds
EQUAL = "equal"

# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One published figure, and all that predicts it."""

    table: str
    id: str
    source: str
    job: Job
    hardware: Hardware
    candidate: Candidate
    loss: str  # of `predict.tracer.loss_of`
    quantity: str  # allocated, reserved, nvml, weights: bytes of one GPU; step: seconds; decision: 1 ran, 0 did not
    value: float
    held_out: bool = False  # never looked at while constants were chosen
    keeps_inputs: bool = False  # frozen layers save their inputs from forward to backward
    doubts: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """One of KINDS, or `weights`."""
        return "peak" if self.quantity in MEMORY else self.quantity


def published_cases() -> list[Case]:
    """Return the cases of all tables."""
    data = json.loads(CASES.read_text(encoding="utf-8"))
    return [_case(one, data["models"][one["model"]]) for one in data["cases"]]


def _case(one: dict[str, Any], model: dict[str, Any]) -> Case:
    typed = {
        "job": Job.from_json({**one["job"], "model": model}),
        "hardware": Hardware.from_json({"memory_cap_bytes": None, **one["hardware"]}),
        "candidate": Candidate.of(one["candidate"]),
        "doubts": tuple(one.get("doubts", ())),
    }
    return Case(**{name: value for name, value in {**one, **typed}.items() if name != "model"})


_BY_SHORT = {knob.short: name for name, knob in KNOBS.items() if knob.short}
_WORD = re.compile(r"(?P<off>no-)?(?P<short>.+?)(?:=(?P<value>.+)|(?P<number>\d+))?")  # no-overlap, rbs=5e+08, mb4


def own_trials(folder: Path = RESULTS) -> list[Case]:
    """Return the measured steps of every card of `gpu-*.json`, one case for each job and candidate: the median."""
    return [case for path in sorted(folder.glob(OWN_FILES)) for case in _own_cases(path)]


def _own_cases(path: Path) -> Iterator[Case]:
    found = json.loads(path.read_text(encoding="utf-8"))
    described = next(row for row in found["steps"]["facts"]["rows"] if row["what"] == "detected")["hardware"]
    hardware = Hardware.from_json({**described, "threads": found["hardware"]["cpus"]})
    source = f"{OWN} {found['hardware']['name']}"
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for key, one in _own_steps(found["steps"]):
        seconds.setdefault(key, []).append(one)
    for number, ((model, tokens, knobs), measured) in enumerate(seconds.items(), start=1):
        job, value = Job(resolve_model(model), 1, tokens, "bf16"), statistics.median(measured)
        yield Case("", f"{path.stem} {number}", source, job, hardware, candidate_of(knobs), "own", "step", value)


def _own_steps(steps: dict[str, Any]) -> Iterator[tuple[tuple[str, int, str], float]]:
    timed = ("predictions", "held_back", "study")  # trials of other steps run while DeepSpeed's ops are built
    for row in (row for name in timed for row in steps.get(name, {"rows": ()})["rows"]):
        whole = [(row["candidate"], row["whole"])] if "whole" in row else row.get("all trials", ())
        for knobs, outcome in whole:
            if found := outcome.get("measurement"):
                tokens = round(found["tokens_per_second"] / found["samples_per_second"])
                yield (row.get("job", MODEL), tokens, knobs), found["step_seconds"]


def candidate_of(text: str) -> Candidate:
    """Return the candidate that `str` describes like this.

    Raises:
        ValueError: a word names no knob.
    """
    knobs: dict[str, Any] = {}
    for word in text.split():
        found = _WORD.fullmatch(word)
        name = found and _BY_SHORT.get(found["short"])
        if not found or name is None:
            raise ValueError(f"{word!r} of {text!r} names no knob")
        value: Any = found["value"] or found["number"]
        if value is None:
            value = not found["off"]
        knobs[name] = int(float(value)) if KNOBS[name].kind is int else value
    return Candidate.of(knobs)


# -- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """A case and the prediction of its figure, in the figure's unit."""

    case: Case
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed error as a share of the measured value."""
        return self.predicted / self.case.value - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.case.value <= self.high

    @property
    def half_width(self) -> float:
        """Half the interval's width, as a share of the prediction."""
        return (self.high - self.low) / 2 / self.predicted

    @property
    def right(self) -> bool:
        """True if a decision was predicted."""
        return bool(self.predicted) == bool(self.case.value)


_TRACES: dict[tuple[str, str], Trace] = {}


def _trace(case: Case) -> Trace:
    job = dataclasses.replace(case.job, ranks=1, base_config={}, lengths=(), packed=False, compiled=False)
    key = job.key, case.loss
    if key not in _TRACES:
        _TRACES[key] = trace_job(case.job, loss=case.loss)
    return _TRACES[key]


def predictor_of(case: Case) -> Predictor:
    trace = _trace(case)
    return Predictor(case.job, case.hardware, _with_inputs(trace) if case.keeps_inputs else trace)


def _with_inputs(trace: Trace) -> Trace:
    """Return the trace if frozen layers saved their inputs from forward to backward; a checkpoint drops them."""
    run = trace.plain
    (fixed, each), left = run.frozen_only, run.after_forward[1]
    shares = [min(1.0, max(0.0, one / left)) if left > 0 else 0.0 for one in run.per_sequence]
    kept = dataclasses.replace(
        run,
        fixed=[one + share * fixed for one, share in zip(run.fixed, shares, strict=True)],
        per_sequence=[one + share * each for one, share in zip(run.per_sequence, shares, strict=True)],
    )
    return dataclasses.replace(trace, plain=kept)


def figure(case: Case, prediction: Prediction) -> tuple[float, float, float]:
    """Return (predicted, low, high) of the figure's quantity, in bytes, in seconds, or 1 for what fits."""
    if case.quantity == "step":
        return prediction.step_seconds, *prediction.step_interval
    if case.quantity == "decision":
        return float(prediction.fits), 0.0, 1.0
    if case.quantity == "allocated":
        return prediction.allocated_bytes, *prediction.allocated_interval
    peak, (low, high) = prediction.peak_bytes, prediction.peak_interval
    if case.quantity == "weights":  # and the largest of them while it is dequantized
        held = prediction.memory["weights"] + prediction.memory["gathered parameters"]
        return held, held * low / peak, held * high / peak
    beside = 0.0 if case.quantity == "nvml" else prediction.memory["context and communication"]
    return peak - beside, low - beside, high - beside


def uncalibrated(cases: Sequence[Case]) -> list[Scored]:
    """Predict every case with a fresh predictor."""
    return [Scored(case, *figure(case, predictor_of(case).predict(case.candidate))) for case in cases]


def calibrated(cases: Sequence[Case]) -> list[Scored]:
    """Predict all cases but those that calibrate: of each source the first configuration with a peak, and with a step."""
    found = []
    for source in dict.fromkeys(case.source for case in cases):
        own = [case for case in cases if case.source == source]
        peak = next((case for case in own if case.quantity in MEMORY), None)
        steps = [case for case in own if case.quantity == "step"]
        same = [case for case in steps if peak and (case.job, case.candidate) == (peak.job, peak.candidate)]
        step = next(iter(same or steps), None)
        memory, time = (learnt(case) if case else None for case in (peak, step))
        for case in own:
            if case is not peak and case is not step:
                prediction = believing(case, memory, time).predict(case.candidate)
                found.append(Scored(case, *figure(case, prediction)))
    return found


def believing(case: Case, memory: Predictor | None, time: Predictor | None) -> Predictor:
    """Return a predictor of the case with the posteriors of those of other jobs on similar machines."""
    predictor = predictor_of(case)
    if memory:
        predictor._memory = memory._memory
    if time:
        predictor._time = time._time
    return predictor


def learnt(case: Case) -> Predictor:
    """Return a predictor that has observed the case, as a study observes a trial.

    A peak that is not NVML's is observed as the NVML peak that goes with it. A peak teaches nothing about steps, nor the other
    way round.
    """
    predictor = predictor_of(case)
    before = predictor.predict(case.candidate)
    peak, step = before.peak_bytes, before.step_seconds
    if case.quantity == "step":
        step = case.value
    else:
        peak += case.value - figure(case, before)[0]
    allocated: dict[str, Any] = {"torch_allocated_bytes": int(case.value)} if case.quantity == "allocated" else {}
    measured = Measurement(step, 0.0, 4, 1.0, 1.0, int(peak), **allocated)
    predictor.observe(case.candidate, Outcome(OutcomeKind.OK, measurement=measured))
    predictor.calibrate()
    return predictor


# -- summaries -------------------------------------------------------------------------------------------------------


def summary(scored: Sequence[Scored]) -> dict[str, float]:
    """Return shares and errors of rows of one kind, as fractions."""
    if scored[0].case.kind == "decision":
        return {"right": sum(one.right for one in scored) / len(scored)}
    errors = sorted(abs(one.error) for one in scored)
    return {
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "inside": sum(one.inside for one in scored) / len(scored),
        "half_width": statistics.median(one.half_width for one in scored),
        "bias": statistics.median(one.error for one in scored),
    }


def spearman(scored: Sequence[Scored]) -> str | None:
    """Return the rank correlation as text; `equal` if all figures of a side are the same, None for fewer than 8 rows."""
    if len(scored) < LEAST_FOR_SPEARMAN or scored[0].case.kind == "decision":
        return None
    predicted, measured = [one.predicted for one in scored], [one.case.value for one in scored]
    if min(len(set(predicted)), len(set(measured))) < 2:
        return EQUAL
    return f"{statistics.correlation(_ranks(predicted), _ranks(measured)):.3f}"


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks; equal values share the mean of theirs."""
    order = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(order):
        places.setdefault(value, []).append(place)
    return [statistics.mean(places[value]) for value in values]


def lines(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Return a line for each source and kind, then for held-out sources, fitted ones, and all."""
    groups = []
    for source in dict.fromkeys(one.case.source for one in scored):
        own = [one for one in scored if one.case.source == source]
        groups.append((source.split("/")[-1] + (" *" if own[0].case.held_out else ""), own, True))
    if len(groups) > 1:
        held = [one for one in scored if one.case.held_out]
        fitted = [one for one in scored if not one.case.held_out]
        groups += [("held-out sources", held, False), ("fitted sources", fitted, False), ("all", list(scored), False)]
    found = []
    for name, rows, is_source in groups:
        for kind in KINDS:
            own = [one for one in rows if one.case.kind == kind]
            if own:
                found.append(_line(name, kind, own, is_source))
    return found


def _line(name: str, kind: str, scored: Sequence[Scored], is_source: bool) -> dict[str, Any]:
    s = summary(scored)
    columns = {"mid %": "median", "p90 %": "p90", "bias %": "bias", "in %": "inside", "± %": "half_width"}
    right = f"{sum(one.right for one in scored)}/{len(scored)}" if kind == "decision" else None
    return {
        "source": name,
        "kind": kind,
        "rows": len(scored),
        **{column: f"{100 * s[key]:.1f}" if key in s else None for column, key in columns.items()},
        "right": right,
        "rho": spearman(scored) if is_source else None,
    }


# Largest shares of the measured value, without calibration and after one row.
TARGETS = {
    "peak": {"median": (0.07, 0.04), "half_width": (0.12, 0.05)},
    "step": {"median": (0.18, 0.08), "half_width": (0.45, 0.15)},
}
INSIDE, RIGHT, SPEARMAN = (0.90, 0.98), 0.95, 0.95


def verdicts(before: Sequence[Scored], after: Sequence[Scored]) -> list[dict[str, Any]]:
    """Return the targets with what is reached over all rows."""
    found = []
    for kind, targets in TARGETS.items():
        for at, (when, scored) in enumerate((("uncalibrated", before), ("after one row", after))):
            own = [one for one in scored if one.case.kind == kind]
            if not own:
                continue
            s = summary(own)
            for measure, limits in targets.items():
                named = f"{kind}, {when}: {measure.replace('_', ' ')}"
                found.append(_verdict(named, f"{s[measure]:.1%}", f"<= {limits[at]:.0%}", s[measure] <= limits[at]))
            inside = INSIDE[0] <= s["inside"] <= INSIDE[1]
            found.append(_verdict(f"{kind}, {when}: inside 95 %", f"{s['inside']:.1%}", "90 to 98 %", inside))
    if decisions := [one for one in before if one.case.kind == "decision"]:
        share = summary(decisions)["right"]
        found.append(_verdict("fits or not: right", f"{share:.1%}", ">= 95 %", share >= RIGHT))
    ranks = [float(line["rho"]) for line in lines(before) if line["rho"] not in (None, EQUAL)]
    if ranks:
        good = sum(rank >= SPEARMAN for rank in ranks)
        named = "Spearman >= 0.95: sources and kinds of 8 rows or more"
        found.append(_verdict(named, f"{good} of {len(ranks)}", "all", good == len(ranks)))
    return found


def _verdict(measure: str, ours: str, target: str, met: bool) -> dict[str, Any]:
    return {"measure": measure, "ours": ours, "target": target, "met": "yes" if met else "no"}


def as_json(one: Scored, after: Scored | None) -> dict[str, Any]:
    """Return one figure in bytes or seconds, uncalibrated and after its source's first row (None for that row)."""
    case = one.case
    job, candidate, hardware, trace = case.job, case.candidate, case.hardware, _trace(case)
    samples = candidate.micro_batch * candidate.accumulation * job.data_ranks * job.samples_per_row
    return {
        "id": case.id,
        "source": case.source,
        "figure": case.kind,
        "quantity": case.quantity,
        "kind": job_kind(case),
        "model": job.model.name,
        "parameters": sum(trace.parameters) + trace.frozen,
        "gpu": hardware.facts or hardware.name,
        "gpus": hardware.count,
        "nodes": hardware.nodes,
        "seq_len": job.seq_len,
        "sequence_ranks": job.sequence_ranks,
        "micro_batch": candidate.micro_batch,
        "checkpointing": candidate.checkpointing,
        "trains": f"LoRA {job.lora}" if job.lora else job.optimizer_kind,
        "by": "torch" if job.torch_alone else "DeepSpeed",
        "step_tokens": samples * job.tokens_per_sample,
        "measured": case.value,
        "predicted": one.predicted,
        "interval": [one.low, one.high],
        "calibrated": after and after.predicted,
        "calibrated_interval": after and [after.low, after.high],
        "candidate": str(candidate),
        "doubts": ", ".join(case.doubts),
    }


# -- coverage by kind of job -----------------------------------------------------------------------------------------

COVERAGE = 0.9  # share of a kind's rows that its widened intervals hold
LEAST_ROWS, LEAST_SOURCES = 5, 2  # of a kind; with fewer the next wider kind counts
# Each kind wider than the one before: the fields in which its rows agree.
WIDER = (
    ("training", "stage", "offloaded", "devices"),
    ("training", "offloaded", "devices"),
    ("training", "devices"),
    ("training",),
    (),
)
_TRAININGS = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}
_DEVICES = {"one": "one GPU", "several": "several GPUs", "nodes": "several nodes"}
Row = dict[str, Any]


def job_kind(case: Case) -> Row:
    """Return the properties of a job on which a prediction's error depends most."""
    lora, devices = job_with_candidate(case.job, case.candidate).lora, "one"
    if case.hardware.count > 1:
        devices = "nodes" if case.hardware.nodes > 1 else "several"
    adapters = "qlora" if lora and lora.quantize else "lora"
    offloaded = bool(case.candidate.offloaded)
    training = adapters if lora else "full"
    return {"training": training, "stage": case.candidate.stage, "offloaded": offloaded, "devices": devices}


def stored_rows() -> list[Row]:
    """Return the stored peaks and steps, without those of sequence parallelism, which are all of one source."""
    files = [json.loads((RESULTS / f"{name}.json").read_text())["rows"] for name in ("published", "published-jobs")]
    rows = [row for file in files for row in file]
    return [row for row in rows if row["figure"] in ("peak", "step") and row.get("sequence_ranks", 1) == 1]


def stretch(row: Row) -> float:
    """Return the factor on a row's interval that would just hold the measured value; steps count in the logarithm."""
    scale: Callable[[float], float] = math.log if row["figure"] == "step" else float
    middle, measured, (low, high) = scale(row["predicted"]), scale(row["measured"]), row["interval"]
    edge = scale(max(high if measured > middle else low, 1e-9))
    return abs(measured - middle) / max(abs(edge - middle), 1e-9 * abs(middle))


def alike(kind: Row, rows: Sequence[Row]) -> tuple[tuple[str, ...], str, list[Row]]:
    """Return (fields in which they agree, training, rows) of the narrowest kind with enough rows and sources.

    QLoRA of any stage comes before LoRA, and LoRA before every kind.
    """
    for fields in WIDER:
        if not fields and kind["training"] == "qlora":
            return alike({**kind, "training": "lora"}, rows)
        found = [row for row in rows if all(row["kind"][name] == kind[name] for name in fields)]
        if len(found) >= LEAST_ROWS and len({row["source"] for row in found}) >= LEAST_SOURCES:
            break
    return fields, kind["training"], found


def widening(kind: Row, rows: Sequence[Row]) -> float:
    """Return the factor with which intervals of this kind of job hold COVERAGE of its rows; at least 1."""
    stretches = sorted(stretch(row) for row in alike(kind, rows)[2])
    return max(1.0, stretches[math.ceil(COVERAGE * len(stretches)) - 1])


def coverage() -> list[dict[str, Any]]:
    """Return errors and coverage of each kind of job that has rows."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for figure in ("peak", "step"):
        rows = [row for row in stored_rows() if row["figure"] == figure]
        kinds = {json.dumps(row["kind"]): row["kind"] for row in rows}
        for kind in sorted(kinds.values(), key=lambda kind: _named(kind, WIDER[0])):
            fields, training, own = alike(kind, rows)
            factor, named = widening(kind, rows), _named({**kind, "training": training}, fields)
            errors = [row["predicted"] / row["measured"] - 1 for row in own]
            lines[figure, named] = {
                "figure": figure,
                "kind": named,
                "rows": len(own),
                "sources": len({row["source"] for row in own}),
                "bias": f"{statistics.median(errors):+.1%}",
                "median": f"{statistics.median(map(abs, errors)):.1%}",
                "widened": f"{factor:.2f}",
                "held": f"{sum(stretch(row) <= factor for row in own)} of {len(own)}",
            }
    return list(lines.values())


def _named(kind: Row, fields: Sequence[str]) -> str:
    offload = "with offload" if kind["offloaded"] else "without offload"
    stage = f"ZeRO {kind['stage']}" + (" with offload" if kind["offloaded"] else "")
    words = {"training": _TRAININGS[kind["training"]], "stage": stage, "devices": _DEVICES[kind["devices"]]}
    if "stage" not in fields:
        words["offloaded"] = offload
    return ", ".join(words[name] for name in fields if name in words) or "every kind of job"


# -- our own trials --------------------------------------------------------------------------------------------------

HOST = ("starts", "hooks", "moved")  # rates that are shown: host seconds per operator and module, and pointwise kernels


def trial_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return every trial's step with its prediction before any trial, and its 95 % interval."""
    return [
        {
            "card": one.case.hardware.facts,
            "job": f"{one.case.job.model.name}, {one.case.job.seq_len} tokens",
            "candidate": str(one.case.candidate),
            "measured s": f"{one.case.value:.3f}",
            "predicted s": f"{one.predicted:.3f} ({one.low:.3f} to {one.high:.3f})",
            "predicted / measured": f"{1 + one.error:.2f}",
            "held": "in" if one.inside else "out",
        }
        for one in uncalibrated(cases)
    ]


def transfer(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return errors of steps before any trial, and with the rates of other cards or other models alone."""
    before = {id(one.case): math.log1p(one.error) for one in uncalibrated(cases)}
    found = []
    for split, part_of in (("card", lambda one: one.hardware.facts), ("model", lambda one: one.job.model.name)):
        for part in dict.fromkeys(map(part_of, cases)):
            tested = [case for case in cases if part_of(case) == part]
            mean = fitted_rates([case for case in cases if part_of(case) != part])
            factors = {name: f"{math.exp(mean[list(TIME).index(name)] - TIME[name].mean):.2f}" for name in HOST}
            untried = [before[id(case)] for case in tested]
            found.append(_transferred(part, "no trial", untried, dict.fromkeys(HOST, "")))
            after = [float(one) for one in _residuals(tested)(mean)]
            found.append(_transferred(part, f"trials of the other {split}", after, factors))
    return found


def _transferred(part: str, rates: str, errors: Sequence[float], factors: dict[str, str]) -> dict[str, Any]:
    absolute = sorted(abs(math.expm1(one)) for one in errors)
    return {
        "tested": part,
        "steps": len(errors),
        "fitted to": rates,
        "median error": f"{statistics.median(absolute):.1%}",
        "worst": f"{absolute[-1]:.1%}",
        "bias": f"{math.expm1(statistics.median(errors)):+.1%}",
        **factors,
    }


def fitted_rates(cases: Sequence[Case]) -> Floats:
    """Return the constants of TIME fitted to steps of several jobs."""
    priors = time_priors(cases[0].hardware, 1.0)[: len(TIME)]
    return fit(priors, _residuals(cases), noise=TIME_NOISE).mean


def _residuals(cases: Sequence[Case]) -> Callable[[Floats], Floats]:
    """Return a function from constants to the logarithms of predicted over measured steps."""
    predictors = list(map(predictor_of, cases))
    prepared = [one.prepare([case.candidate]) for one, case in zip(predictors, cases, strict=True)]
    measured = np.log([case.value for case in cases])

    def off(constants: Floats) -> Floats:
        steps = [
            step_seconds(one._seconds(of, constants))[..., 0] for one, of in zip(predictors, prepared, strict=True)
        ]
        return np.asarray(np.log(np.stack(steps, axis=-1)) - measured)

    return off


# -- the command -----------------------------------------------------------------------------------------------------

LEGEND = (
    "mid, p90: median and 90th percentile of the error; bias: median of predicted over measured, less 1;\n"
    "in: measured inside the 95 % interval; ±: median half-width of the intervals; right: fits or not;\n"
    "rho: Spearman, of 8 rows or more (equal: all figures are the same, and have none)"
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--table", action="append", help=f"tables of cases; default: {MAIN_TABLE} and our own trials")
    parser.add_argument("--source", default="", metavar="TEXT", help="only sources whose name has this text")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--coverage", action="store_true", help="only print errors by kind of job, from stored results")
    parser.add_argument("--trials", action="store_true", help="only print our own trials on GPUs")
    arguments = parse(parser, source=SMALL_SOURCE)
    if arguments.coverage:
        print_table("errors by kind of job", coverage(), keys=2)
        return
    if arguments.trials:
        rows, held = trial_rows(own_trials()), "inside their 95 % intervals"
        print_table("steps of our own trials, predicted before any trial", rows, keys=3)
        print(f"{sum(one['held'] == 'in' for one in rows)} of {len(rows)} {held}")
        print_table("rates of one part predict the other", transfer(own_trials()), keys=3)
        return
    cases = [case for case in published_cases() if case.table in (arguments.table or [MAIN_TABLE])]
    cases += [] if arguments.table else own_trials()
    cases = [case for case in cases if arguments.source.lower() in case.source.lower()]
    if arguments.small:
        cases = cases[:SMALL_ROWS]
    if not cases:
        parser.error("no case of these tables and sources")
    judge(cases, arguments.rows, arguments.json)


def judge(cases: Sequence[Case], rows: bool, path: Path | None) -> None:
    """Print the errors of these cases, and write them."""
    trace_jobs([(case.job, case.loss) for case in cases], _show_progress)
    before, after = uncalibrated(cases), calibrated(cases)
    later = {id(one.case): one for one in after}
    figures = [as_json(one, later.get(id(one.case))) for one in before]
    if rows:
        names = ("id", "model", "candidate", "quantity", "measured", "predicted", "interval", "calibrated")
        print_table("every row (bytes, seconds)", [{name: row[name] for name in names} for row in figures], keys=2)
    print(LEGEND)
    print_table("without calibration (* held out)", lines(before), keys=2)
    print_table("after the first row of each source (* held out)", lines(after), keys=2)
    print_table("targets", verdicts(before, after))
    result = {
        "uncalibrated": lines(before),
        "calibrated": lines(after),
        "targets": verdicts(before, after),
        "rows": figures,
    }
    write_json(path, result)


def _show_progress(made: int, of: int) -> None:
    if sys.stderr.isatty() or made == of:
        print(f"\rtraced {made} of {of} models", end="\n" if made == of else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
