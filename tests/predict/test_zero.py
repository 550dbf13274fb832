import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from autotune.executors.base import Effort
from autotune.executors.local import LocalExecutor
from autotune.predict.knobs import columns_of
from autotune.predict.trace import trace_job
from autotune.predict.zero import bill
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from tests.conftest import make_candidate, make_job

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/data/live_tensors_cpu.json").read_text())["rows"]


def predicted(job: Job, candidate: Candidate) -> float:
    one = bill(job, trace_job(job), columns_of([candidate], job))
    at = [i for i, name in enumerate(one.moments) if name != "init"]
    return float(one.peaks()[at, 0].max() + one.host[0])


def test_live_bytes_of_real_engines_are_met() -> None:
    errors = []
    for row in MEASURED:
        job = Job(resolve_model(row["model"]), row["ranks"], row["seq_len"], row["precision"])
        errors.append(abs(predicted(job, Candidate.of(row["candidate"])) / max(row["live"].values()) - 1))
    assert len(errors) >= 60
    assert np.median(errors) < 0.02
    assert max(errors) < 0.08


def test_engines_made_now_are_met_too(tmp_path: Path) -> None:
    job, candidates = make_job(), [make_candidate(stage, 3) for stage in (1, 3)]
    executor = LocalExecutor(job, detect("cpu", 2), tmp_path, candidates, count_live_tensors=True)
    executor.open(lambda text: None)
    with closing(executor):
        for candidate in candidates:
            with closing(executor.session(candidate, f"stage{candidate.stage}")) as session:
                outcome = session.measure(candidate, Effort(min_steps=2, max_steps=2, min_seconds=0), 120.0)
            assert outcome.measurement is not None, outcome
            live = max(outcome.measurement.live_tensor_bytes.values())
            assert predicted(job, candidate) == pytest.approx(live, rel=0.06)


def test_what_each_stage_partitions() -> None:
    job = make_job(ranks=4, precision="bf16", seq_len=16)
    trace = trace_job(job)
    total = sum(trace.parameters)
    one = bill(job, trace, columns_of([make_candidate(stage) for stage in range(4)], job))
    assert one.parameters == pytest.approx([2 * total] * 3 + [2 * total / 4])
    assert one.optimizer == pytest.approx([12 * total, 3 * total, 3 * total, 3 * total])


def test_offload_moves_bytes_to_the_host() -> None:
    job = make_job(precision="bf16", seq_len=16)
    trace = trace_job(job)
    stay, move, both = (
        make_candidate(3),
        make_candidate(3, offload_optimizer="cpu"),
        make_candidate(3, offload_optimizer="cpu", offload_param="cpu"),
    )
    one = bill(job, trace, columns_of([stay, move, both], job))
    assert one.host[0] == 0
    assert one.host[1] >= 12 * sum(trace.parameters) / 2
    assert one.host[2] > one.host[1]
    assert one.peaks().max(axis=0)[1] < one.peaks().max(axis=0)[0]
    assert one.parameters[2] == 0


def test_overlap_doubles_the_buckets_of_stages_1_and_2() -> None:
    job = make_job(seq_len=16)
    trace = trace_job(job)
    plain, doubled = (make_candidate(2, overlap_comm=on, reduce_bucket_size=10**7) for on in (False, True))
    one = bill(job, trace, columns_of([plain, doubled], job))
    assert one.buckets[:, 1].max() == 2 * one.buckets[:, 0].max() == 2 * 4 * 10**7
