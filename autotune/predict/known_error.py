"""Errors of predictions against published measurements, by kind of job: `data/predictor_error.json`.

`python benchmarks/published_error.py` writes that file from the output of `benchmarks/published.py --json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from autotune.problem.candidate import Candidate, under
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job

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
        training = "lora" if under(job, candidate).lora else "full"
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
