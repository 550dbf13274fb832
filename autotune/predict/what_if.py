"""Predictions of a job on other hardware, and the predictor's published error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from autotune.errors import UserError
from autotune.predict.predictor import SURE_SIGMAS, Prediction, Predictor, Table
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
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.space import SearchSpace

# -- other hardware ----------------------------------------------------------------------------------------------------
#
# Predictions of one job on other machines, from one trace and a thinned space.

PLENTY = 2**50  # bytes of main memory that hold any offload
_DECIDING = ("zero_stage", CHECKPOINTING, "offload_optimizer", "offload_param", *TRACED_KNOBS)
Family = tuple[tuple[str, Value], ...]


class Elsewhere:
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
        self._known: dict[int | None, list[Candidate]] = {}  # by a rank's share of the global batch

    def candidates(self, job: Job) -> list[Candidate]:
        """Return the candidates to try for this job; none if its global batch cannot be split.

        Without a global batch two kinds remain: the most micro-batches a step, which are fastest, and the fewest, which take
        the least memory. The latter have only the fewest sequences, as these decide what fits at all.
        """
        share = None if job.global_batch_size is None else job.global_batch_size // job.ranks
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
            batch = hardware.count * max(1, round(batch / hardware.count))
        try:
            job = dataclasses.replace(job, ranks=hardware.count, global_batch_size=batch)
        except UserError:
            return None
        candidates = self.candidates(job)
        if not candidates:
            return None
        predictor = Predictor(
            job, dataclasses.replace(hardware, host_memory_bytes=PLENTY), self.first.trace, self.first.tracer
        )
        return JobPredictions(hardware, predictor, candidates, predictor.table(candidates))


class JobPredictions:
    """Predictions of one job on one machine. Main memory limits nothing until a method checks it."""

    def __init__(self, hardware: Hardware, predictor: Predictor, candidates: list[Candidate], table: Table) -> None:
        self.hardware, self.job, self.table = hardware, predictor.job, table
        self._predictor, self._candidates = predictor, candidates
        self._sure = predictor.margins(table) >= SURE_SIGMAS
        self._told: dict[int, Prediction] = {}

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
        if place not in self._told:
            self._told[place] = self._predictor.predict(self._candidates[place])
        return self._told[place]


def host_bytes_per_node(host_bytes_per_rank: float, hardware: Hardware) -> float:
    """Return the main memory that a node needs: offload of its ranks, pinning included, and the processes' own memory."""
    own = PLENTY - host_limit_bytes(dataclasses.replace(hardware, host_memory_bytes=PLENTY))
    return host_bytes_per_rank * hardware.per_node + own


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
# Errors of predictions against published measurements, by kind of job: `data/predictor_error.json`.
#
# `python benchmarks/predict/published/error.py` writes that file from the output of
# `benchmarks/predict/published/published.py --json`.

FIGURES = ("peak", "step")


@dataclass(frozen=True)
class JobKind:
    """The properties of a job on which a prediction's error depends most."""

    training: str  # "full" or "lora"
    stage: int
    offloaded: bool  # optimizer or parameters
    devices: str  # "one", "several" (in one machine) or "nodes" (several machines)

    @classmethod
    def of(cls, job: Job, candidate: Candidate, hardware: Hardware) -> JobKind:
        """Return the kind of a candidate's training on the hardware."""
        training = "lora" if job_with_candidate(job, candidate).lora else "full"
        offloaded = bool(candidate.offloaded)
        devices = "nodes" if hardware.nodes > 1 else "several" if hardware.count > 1 else "one"
        return cls(training, candidate.stage, offloaded, devices)

    def __str__(self) -> str:
        training = "LoRA" if self.training == "lora" else "full training"
        devices = {"one": "one GPU", "several": "several GPUs", "nodes": "several nodes"}[self.devices]
        return f"{training}, ZeRO {self.stage}{' with offload' if self.offloaded else ''}, {devices}"


@dataclass(frozen=True)
class KnownError:
    """Errors of one figure, as shares of the measured value, before any calibration."""

    rows: int
    sources: int
    median: float
    inside: float  # share of the rows inside the 95 % interval


@dataclass(frozen=True)
class KnownErrors:
    """Known errors of one kind of job, by figure; None if no published measurement has this kind."""

    kind: JobKind
    peak: KnownError | None
    step: KnownError | None
    all_peak: KnownError | None  # all kinds together
    all_step: KnownError | None

    def to_json(self) -> dict[str, Any]:
        """Return the errors for JSON; null if no measured rows have this kind."""

        def one(error: KnownError | None) -> dict[str, Any] | None:
            return vars(error) if error else None

        return {
            "kind": vars(self.kind),
            "peak": one(self.peak),
            "step": one(self.step),
            "every_kind": {"peak": one(self.all_peak), "step": one(self.all_step)},
        }


def known_errors(job: Job, candidate: Candidate, hardware: Hardware) -> KnownErrors:
    """Return the errors measured on jobs like this one."""
    kind, table = JobKind.of(job, candidate, hardware), _table()
    return KnownErrors(kind, *(table.get((of, figure)) for of in (kind, None) for figure in FIGURES))


@cache
def _table() -> dict[tuple[JobKind | None, str], KnownError]:
    """Read the errors by kind (None: all together) and figure."""
    data = json.loads((resources.files("autotune") / "data" / "predictor_error.json").read_text(encoding="utf-8"))
    return {
        (JobKind(**row["kind"]) if row["kind"] else None, row["figure"]): KnownError(
            row["rows"], row["sources"], row["median"], row["inside"]
        )
        for row in data["errors"]
    }
