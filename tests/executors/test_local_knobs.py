"""Knobs beside the usual ones, turned in real engines of two CPU ranks; their tensors are what the predictor says."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.predict.features import columns_of, installed_deepspeed
from autotune.predict.trace import trace_job
from autotune.predict.zero_memory import estimate_memory
from autotune.problem.candidate import Candidate, job_with_candidate
from autotune.problem.job import Job
from autotune.problem.knobs import KNOBS, short_name
from tests.conftest import Bench, make_candidate, make_job
from tests.predict.passes import peaks_of
from tests.rank.live_rank import live_bytes

CPU_ADAM = {"offload_optimizer": "cpu", "sub_group_size": 100_000}
KEPT = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def predicted_bytes(job: Job, candidate: Candidate) -> float:
    """Of one CPU rank, whose host and device are one."""
    found = estimate_memory(job, trace_job(job), columns_of([candidate], job, installed_deepspeed()))
    at = [i for i, name in enumerate(found.moments) if name != "init"]
    return float(peaks_of(found)[at, 0].max() + found.terms["host"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "knobs"),
    [
        (3, {"offload_optimizer.ratio": 0.5, **CPU_ADAM}),
        (2, LOW),
        (3, {**KEPT, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}),
        (3, {"stage3_param_persistence_threshold": 10**7, "stage3_use_all_reduce_for_fetch_params": True}),
        (2, {"offload_optimizer": "cpu", "round_robin_gradients": True, "allgather_bucket_size": 10**8}),
        (1, {"use_multi_rank_bucket_allreduce": False, "communication_data_type": "fp32", "reduce_scatter": False}),
    ],
    ids=["ratio", "low-states", "eager", "persistent", "round-robin", "reduced"],
)
def test_a_knob_runs_and_takes_what_is_predicted(live_bench: Bench, stage: int, knobs: dict[str, Any]) -> None:
    named = {short_name(name): value for name, value in knobs.items()}
    assert named.keys() <= KNOBS.keys()
    job = live_bench.executor.job = make_job(precision="bf16")
    candidate = make_candidate(stage, 2, **named)
    assert named.keys() <= candidate.as_dict.keys(), "read at this stage"
    outcome = live_bench.run(candidate)
    assert outcome.ok, outcome
    counted = max(live_bytes(outcome.log).values())
    assert predicted_bytes(job, candidate) == pytest.approx(counted, rel=0.08)


@pytest.mark.slow
def test_a_chunked_loss_holds_one_slice_of_the_logits(live_bench: Bench) -> None:
    job = live_bench.executor.job = make_job(precision="bf16", seq_len=512)
    chunked, full = (make_candidate(3, 2, loss=loss) for loss in ("chunked", "full"))
    outcome = live_bench.run(chunked)
    assert outcome.ok, outcome
    counted = max(live_bytes(outcome.log).values())
    assert predicted_bytes(job_with_candidate(job, chunked), chunked) == pytest.approx(counted, rel=0.08)
    assert predicted_bytes(job, full) > 1.5 * counted
