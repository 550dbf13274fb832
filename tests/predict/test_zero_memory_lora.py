"""Adapters: the bill of memory against real engines on CPU ranks, and large models at stage 3."""

import json
from pathlib import Path

import pytest

from autotune.predict.features import columns_of
from autotune.predict.trace import trace_job
from autotune.predict.zero_memory import estimate_memory
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, parse_lora
from autotune.problem.models import resolve_model
from tests.predict.passes import peaks_of

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks/data/live_tensors_lora_cpu.json").read_text())["rows"]


def name_of(row: dict[str, object]) -> str:
    return f"{row['model']} {row['ranks']} {Candidate.of(row['candidate'])}"  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if at in (5, 29) else pytest.mark.slow) for at, row in enumerate(ROWS)],
    ids=name_of,
)
def test_real_engines_are_met(row: dict[str, object]) -> None:
    job = Job(resolve_model(row["model"]), row["ranks"], row["seq_len"], row["precision"], lora=parse_lora(row["lora"]))  # type: ignore[arg-type]
    one = estimate_memory(job, trace_job(job, device="cpu"), columns_of([Candidate.of(row["candidate"])], job))  # type: ignore[arg-type]
    at = [i for i, name in enumerate(one.moments) if name != "init"]
    live = max(row["live"].values())  # type: ignore[attr-defined]
    # one sequence of the smallest model with tied weights peaks in forward, where the order of the last frees decides
    smallest = row["model"] == "tiny-gemma-2" and "max_reuse_distance" in str(row["candidate"])
    assert float(peaks_of(one)[at, 0].max() + one.terms["host"][0]) == pytest.approx(
        live, rel=0.15 if smallest else 0.07
    )
