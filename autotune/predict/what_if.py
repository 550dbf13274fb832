"""Predictions of a job on other machines, from one trace and a thinned space, and the predictor's published error."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autotune.errors import UserError
from autotune.predict.features import Columns, Floats
from autotune.predict.predictor import SURE_SIGMAS, Prediction, Predictor, Prepared, Table
from autotune.predict.step_time import host_limit_bytes
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    MICRO_BATCH,
    TRACED_KNOBS,
    Candidate,
    Value,
    job_with_candidate,
)
from autotune.problem.gpu_specs import gpu_table
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.space import SearchSpace
from autotune.util.files import shipped_json

PLENTY = 2**50  # bytes of main memory that hold any offload
_DECIDING = ("zero_stage", CHECKPOINTING, "offload_optimizer", "offload_param", *TRACED_KNOBS)
Family = tuple[tuple[str, Value], ...]


class OtherHardware:
    """Predict one job on machines other than the first.

    `batch_assumed`: a global batch that cannot be split over the ranks is rounded to the nearest that can.

    For each stage, checkpointing and offload it keeps two of the space's families: the fastest on the first machine, and the
    one that took the least memory there. The families left out move a prediction by a few per cent.
    """

    def __init__(
        self,
        space: SearchSpace,
        predictor: Predictor,
        candidates: Sequence[Candidate],
        table: Table,
        *,
        batch_assumed: bool = False,
    ) -> None:
        self.space, self.first, self.batch_assumed = space, predictor, batch_assumed
        self.families = _families(candidates, table)
        self._one_trace = predictor.share_a_trace([Candidate(family) for family in self.families])
        self._known: dict[int | None, list[Candidate]] = {}  # by a rank's share of the global batch
        self._prepared: list[tuple[Job, str, Prepared]] = []  # sizes of a job's candidates, by job and device

    def candidates(self, job: Job) -> list[Candidate]:
        """Return the candidates to try for this job; none if its global batch cannot be split.

        Without a global batch two kinds remain: the most micro-batches a step, which are fastest, and the fewest, which take
        the least memory. The latter have only the fewest sequences, as these decide what fits at all.
        """
        share = None if job.global_batch_size is None else job.global_batch_size // job.data_ranks
        if share not in self._known:
            self._known[share] = self._candidates(job)
        return self._known[share]

    def _candidates(self, job: Job) -> list[Candidate]:
        try:
            pairs = self.space.rungs(job)
        except UserError:
            return []
        if job.global_batch_size is None:
            most = max(steps for _, steps in pairs)
            pairs = [pair for pair in pairs if pair[1] == most or pair == pairs[0]]
        return [
            Candidate(tuple(sorted([*family, (MICRO_BATCH, micro_batch), (ACCUMULATION, accumulation)])))
            for family in self.families
            for micro_batch, accumulation in pairs
        ]

    def on(self, hardware: Hardware, job: Job | None = None) -> JobPredictions | None:
        """Predict all candidates on this hardware, for the job (default: the first one) with as many ranks.

        None if the global batch cannot be split over so many ranks; a batch that was only assumed is rounded. Sizes are equal
        in bf16 and fp16, so the first machine's trace serves cards without bf16 too.
        """
        job = job or self.first.job
        batch = job.global_batch_size
        if self.batch_assumed and batch is not None:
            at_once = max(1, hardware.count // job.sequence_ranks)
            batch = at_once * max(1, round(batch / at_once))
        try:
            job = dataclasses.replace(job, ranks=hardware.count, global_batch_size=batch)
        except UserError:
            return None
        candidates = self.candidates(job)
        if not candidates:
            return None
        predictor = Predictor(
            job,
            dataclasses.replace(hardware, host_memory_bytes=PLENTY),
            self.first.trace,
            self.first.tracer,
            self.first.widening,
        )
        known = (one for other, device, one in self._prepared if device == hardware.device and other == job)
        like = next(known, None)
        if like is not None and self._one_trace:
            prepared = predictor.prepare_like(candidates[0], like)
        else:
            prepared = predictor.prepare(candidates)
            self._prepared.append((job, hardware.device, prepared))
        return JobPredictions(hardware, predictor, candidates, prepared, predictor.prepared_table(prepared))


class JobPredictions:
    """Predictions of one job on one machine. Main memory limits nothing until a method checks it."""

    def __init__(
        self, hardware: Hardware, predictor: Predictor, candidates: list[Candidate], prepared: Prepared, table: Table
    ) -> None:
        self.hardware, self.job, self.table = hardware, predictor.job, table
        self._predictor, self._candidates, self._prepared = predictor, candidates, prepared
        self._sure = predictor.margins(table) >= SURE_SIGMAS

    def fastest(self, *, offload: bool = True, any_host: bool = False) -> int | None:
        """Return the index of the fastest candidate that fits with the probability SURE, or None.

        Args:
            offload: allow candidates that offload to the host.
            any_host: assume that main memory holds any offload.
        """
        fits = self._sure
        if not offload:
            fits = fits & (self.table.host == 0)
        elif not any_host:
            fits = fits & (self.table.host * self.hardware.per_node <= host_limit_bytes(self.hardware))
        return int(np.where(fits, self.table.samples, -np.inf).argmax()) if fits.any() else None

    def prediction(self, place: int) -> Prediction:
        """Return the prediction of one candidate with its breakdowns."""
        at = np.array([place])
        row = Table(**{name: column[at] for name, column in vars(self.table).items()})
        candidates = [self._candidates[place]]
        return self._predictor.prepared_predictions(candidates, self._prepared.rows(at), row)[0]


def host_bytes_per_node(host_bytes_per_rank: float, hardware: Hardware) -> float:
    """Return the main memory that a node needs: offload of its ranks, pinning included, and the processes' own memory."""
    own = PLENTY - host_limit_bytes(dataclasses.replace(hardware, host_memory_bytes=PLENTY))
    return host_bytes_per_rank * hardware.per_node + own


def loading_bytes_per_node(job: Job, parameters: int, hardware: Hardware, *, zero_init: bool = False) -> float:
    """Return the main memory that a node needs while its ranks load a checkpoint.

    Without `zero.Init`, `from_pretrained` makes a full copy of the weights in each rank, in the model's precision, before
    anything moves to a GPU; the processes' own memory is included. This is an upper bound: tensors of a safetensors file
    that need no cast stay mapped, and are not copied (`benchmarks/predict/loading.py`).

    Args:
        parameters: elements of the model.
        zero_init: rank 0 alone reads the checkpoint, and every rank keeps its part on its GPU (transformers 5.23,
            integrations/deepspeed.py, `_load_state_dict_into_zero3_model`). The figure is that of rank 0's node.

    Returns:
        0 if the base weights are quantized: transformers puts each on the GPU as it is read (`quantizer_bnb_4bit.py` sets the
            device map), and no copy is made.
    """
    if job.lora is not None and job.lora.quantize:
        return 0.0
    return host_bytes_per_node(job.element_bytes * parameters / (hardware.per_node if zero_init else 1), hardware)


def _families(candidates: Sequence[Candidate], table: Table) -> list[Family]:
    """Return the fastest and the smallest family per stage, checkpointing, offload and way of making the model."""
    speed: dict[Family, float] = {}
    size: dict[Family, float] = {}
    for candidate, samples, peak in zip(candidates, table.samples.tolist(), table.peak.tolist(), strict=True):
        family = candidate.family
        speed[family] = max(speed.get(family, 0.0), samples)
        size[family] = min(size.get(family, peak), peak)
    groups: dict[tuple[object, ...], list[Family]] = {}
    for family in speed:
        knobs = dict(family)
        groups.setdefault(tuple(knobs.get(name) for name in _DECIDING), []).append(family)
    both = ((max(group, key=speed.__getitem__), min(group, key=size.__getitem__)) for group in groups.values())
    return list(dict.fromkeys(family for pair in both for family in pair))


# -- known error -------------------------------------------------------------------------------------------------------
#
# Published measurements with their predictions before any calibration: `data/predictor_error.json`.
#
# `python benchmarks/predict/published/error.py` writes that file from the output of
# `benchmarks/predict/published/published.py --json`. Errors, coverage and wider intervals by kind of job, and the nearest
# measured rows, all come from these rows.

FIGURES = ("peak", "step")
LEAST_ROWS, LEAST_SOURCES = 5, 2  # of a kind; with fewer the next wider kind counts
COVERAGE = 0.9  # share of the published rows of a kind that its intervals hold
# Kinds of job, each wider than the one before: the fields of JobKind in which its rows agree.
_WIDER = (
    ("training", "stage", "offloaded", "devices"),
    ("training", "offloaded", "devices"),
    ("training", "devices"),
    ("training",),
    (),
)
_TRAININGS = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}  # in words
_NEAR = 4.0  # largest distance of a row that is shown; see `_distance`


@dataclass(frozen=True)
class JobKind:
    """The properties of a job on which a prediction's error depends most."""

    training: str  # one of _TRAININGS
    stage: int
    offloaded: bool  # optimizer or parameters
    devices: str  # "one", "several" (in one machine) or "nodes" (several machines)

    @classmethod
    def of(cls, job: Job, candidate: Candidate, hardware: Hardware) -> JobKind:
        """Return the kind of a candidate's training on the hardware."""
        lora = job_with_candidate(job, candidate).lora
        training = "full" if lora is None else "qlora" if lora.quantize else "lora"
        return cls(training, candidate.stage, bool(candidate.offloaded), _devices(hardware))

    def __str__(self) -> str:
        return self.words(_WIDER[0])

    def words(self, fields: Sequence[str]) -> str:
        """Describe the jobs that agree with this one in `fields`."""
        if not fields:
            return "every kind of job"
        offload = "with offload" if self.offloaded else "without offload"
        stage = f"ZeRO {self.stage}{' with offload' if self.offloaded else ''}"
        words = {
            "training": _TRAININGS[self.training],
            "stage": stage,
            "offloaded": "" if "stage" in fields else offload,
            "devices": {"one": "one GPU", "several": "several GPUs", "nodes": "several nodes"}[self.devices],
        }
        return ", ".join(words[name] for name in fields if words[name])


def _devices(hardware: Hardware) -> str:
    return "nodes" if hardware.nodes > 1 else "several" if hardware.count > 1 else "one"


@dataclass(frozen=True)
class PublishedRow:
    """One published measurement, and its prediction before any calibration: bytes of a GPU, or seconds of a step."""

    id: str
    source: str
    figure: str  # one of FIGURES
    kind: JobKind
    model: str
    parameters: int
    gpu: str
    gpus: int
    nodes: int
    seq_len: int
    micro_batch: int
    checkpointing: bool
    step_tokens: float  # of all GPUs together
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed error of the prediction, as a share of the measured value."""
        return self.predicted / self.measured - 1

    @property
    def stretch(self) -> float:
        """Factor on the interval that would just hold the measured value; intervals of steps are symmetric in the logarithm."""
        scale = math.log if self.figure == "step" else float
        middle, measured = scale(self.predicted), scale(self.measured)
        edge = scale(max(self.high if measured > middle else self.low, 1e-9))
        return abs(measured - middle) / max(abs(edge - middle), 1e-9 * abs(middle))

    def __str__(self) -> str:
        where = f"{self.gpus} x {self.gpu}{f' in {self.nodes} nodes' if self.nodes > 1 else ''}"
        again = ", checkpointing" if self.checkpointing else ""
        how = f"{self.kind.words(('stage',))}, micro-batch {self.micro_batch}{again}"
        return f"{self.model}, {self.seq_len} tokens, {where}, {how} ({self.source}, row {self.id})"


@dataclass(frozen=True)
class KnownError:
    """Error of one figure on the published rows of a kind of job, before any calibration."""

    kind: str  # in words; wider than the job's own if that has too few rows
    rows: int
    sources: int
    bias: float  # median of the signed errors: above 0, too much memory or too long a step is predicted
    median: float  # median error without sign
    widening: float  # factor on the intervals with which they hold COVERAGE of the rows; at least 1
    held: int  # rows inside the widened intervals


@dataclass(frozen=True)
class KnownErrors:
    """Errors of jobs like one, and the measured rows that are nearest to it."""

    kind: JobKind
    peak: KnownError
    step: KnownError
    nearest: tuple[PublishedRow, ...]  # measured steps, nearest first

    def to_json(self) -> dict[str, Any]:
        """Return the errors and rows for JSON; shares, bytes and seconds."""
        return {
            "kind": vars(self.kind),
            "peak": vars(self.peak),
            "step": vars(self.step),
            "nearest": [
                {**dataclasses.asdict(row), "tokens_per_second": row.step_tokens / row.measured} for row in self.nearest
            ],
        }


def known_errors(job: Job, candidate: Candidate, hardware: Hardware, parameters: int) -> KnownErrors:
    """Return the errors measured on jobs like this one, and the nearest measured rows.

    Args:
        parameters: elements of the model.
    """
    kind = JobKind.of(job, candidate, hardware)
    far = {row: _distance(row, kind, candidate, hardware, job.seq_len, parameters) for row in published_rows()}
    near = sorted((row for row, one in far.items() if row.figure == "step" and one < _NEAR), key=lambda row: far[row])
    one_each = {(row.source, row.model): row for row in reversed(near)}  # the nearest of each
    nearest = sorted(one_each.values(), key=lambda row: far[row])[:2]
    return KnownErrors(kind, known_error(kind, "peak"), known_error(kind, "step"), tuple(nearest))


def _distance(
    row: PublishedRow, kind: JobKind, candidate: Candidate, hardware: Hardware, seq_len: int, parameters: int
) -> float:
    """Return the distance of a published row from a job: doublings of sizes and speeds, and what differs in kind."""
    if "full" in (row.kind.training, kind.training) and row.kind.training != kind.training:
        return math.inf
    theirs, mine = gpu_table().get(row.gpu), hardware.gpu_facts
    card = abs(math.log2(theirs.tflops / mine.tflops)) + 0.3 if theirs and mine else 2.0
    return (
        2 * abs(math.log2(row.parameters / parameters))
        + abs(math.log2(row.gpus / hardware.count))
        + (0.0 if mine and row.gpu == mine.name else card)
        + 0.5 * abs(math.log2(row.seq_len / seq_len))
        + 1.0 * (row.kind.training != kind.training)
        + 2.0 * (row.kind.offloaded != kind.offloaded)
        + 0.5 * (row.kind.stage != kind.stage)
        + 0.5 * (row.checkpointing != candidate.checkpointing)
    )


@cache
def known_error(kind: JobKind, figure: str) -> KnownError:
    """Return the error of a figure for a kind of job, or for a wider kind if it has too few rows or sources.

    QLoRA of any stage comes before LoRA, and LoRA before every kind.
    """
    for fields in _WIDER:
        if not fields and kind.training == "qlora":
            return known_error(dataclasses.replace(kind, training="lora"), figure)
        rows = [
            row
            for row in published_rows()
            if row.figure == figure and all(getattr(row.kind, name) == getattr(kind, name) for name in fields)
        ]
        sources = len({row.source for row in rows})
        if not fields or (len(rows) >= LEAST_ROWS and sources >= LEAST_SOURCES):
            break
    stretches = sorted(row.stretch for row in rows)
    widening = max(1.0, stretches[math.ceil(COVERAGE * len(rows)) - 1])
    return KnownError(
        kind.words(fields),
        len(rows),
        sources,
        statistics.median(row.error for row in rows),
        statistics.median(abs(row.error) for row in rows),
        widening,
        sum(one <= widening for one in stretches),
    )


def published_widening(job: Job, hardware: Hardware, columns: Columns) -> tuple[Floats, Floats]:
    """Return (n,) factors each on the intervals of peaks and of steps; widened, each kind's hold COVERAGE of its rows."""
    devices = _devices(hardware)
    offloaded = (columns.offload_optimizer > 0) | (columns.offload_param > 0)
    found, at = np.unique(np.stack([columns.lora > 0, columns.stage, offloaded]), axis=1, return_inverse=True)
    adapted = "qlora" if job.lora and job.lora.quantize else "lora"
    kinds = [JobKind(adapted if lora else "full", int(stage), bool(off), devices) for lora, stage, off in found.T]
    peak, step = (np.array([known_error(kind, figure).widening for kind in kinds]) for figure in FIGURES)
    return peak[at.ravel()], step[at.ravel()]


@cache
def measured_cards() -> frozenset[str]:
    """Return the cards with published rows, by the names of `data/gpus.json`; predictions for all others are extrapolated."""
    return frozenset(row.gpu for row in published_rows())


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return the rows of `data/predictor_error.json`."""
    data = shipped_json("predictor_error.json")
    return tuple(PublishedRow(**{**row, "kind": JobKind(**row["kind"])}) for row in data["rows"])
