"""How far predicted bytes of live tensors are from those that `live_tensors.py` has counted."""

from __future__ import annotations

from typing import Any

from autotune.predict.features import columns_of
from autotune.predict.trace import trace_job
from autotune.predict.zero_memory import estimate_memory
from autotune.problem.candidate import Candidate
from autotune.problem.job import FULL, Job, parse_lora
from autotune.problem.knobs import READ, Release
from autotune.problem.models import CAUSAL, resolve_model
from tests.predict.passes import peaks_of


def live_error(row: dict[str, Any], deepspeed: Release = READ) -> float:
    """The share by which the prediction is above what was counted; below it where it is negative. On CPU ranks host and
    device are one.

    Args:
        deepspeed: the version that it was counted under.
    """
    base, lora = row.get("base_config", {}), row.get("lora")
    job = Job(
        resolve_model(row["model"]),
        row["ranks"],
        row["seq_len"],
        row["precision"],
        base_config=base,
        task=row.get("task", CAUSAL),
        loss=row.get("loss", FULL),
        lora=parse_lora(lora) if lora else None,
    )
    predicted = estimate_memory(job, trace_job(job), columns_of([Candidate.of(row["candidate"])], job, deepspeed))
    at = [i for i, name in enumerate(predicted.moments) if name != "init"]
    peak = float(peaks_of(predicted)[at, 0].max() + predicted.terms["host"][0])
    counted: float = max(row["live"].values())
    return peak / counted - 1
