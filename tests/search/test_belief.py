"""The belief about untried candidates, from the predictor and measurements."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.search.belief import REPEAT_SPEED, Belief, KnobKernel, Point, above, expected_gain, explain
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace

CANDIDATES = [
    Candidate.of(
        {
            "zero_stage": stage,
            "train_micro_batch_size_per_gpu": size,
            "gradient_accumulation_steps": 1,
            "contiguous_gradients": whole,
        }
    )
    for stage in (0, 1, 2, 3)
    for size in (1, 2, 4, 8)
    for whole in (True, False)
]
PREDICTED = np.array([0.1 * c.stage + 0.2 * math.log2(c.micro_batch) for c in CANDIDATES])
KERNEL = KnobKernel(CANDIDATES)


def points(truth: np.ndarray, places: list[int], call: int = 0) -> list[Point]:
    return [Point(at, float(truth[at]), REPEAT_SPEED, call) for at in places]


def test_without_measurements_the_prediction_is_the_mean_with_a_doubt() -> None:
    believed = explain(KERNEL, PREDICTED, [])
    assert np.corrcoef(believed.mean, PREDICTED)[0, 1] > 0.99
    assert (believed.sigma > 0.1).all()
    assert believed.trust == pytest.approx(0.5)


def test_measured_candidates_are_known_and_others_less_sure() -> None:
    truth = PREDICTED + 0.3
    believed = explain(KERNEL, PREDICTED, points(truth, [0, 9, 18, 27]))
    assert believed.mean[[0, 9, 18, 27]] == pytest.approx(truth[[0, 9, 18, 27]], abs=0.03)
    assert believed.sigma[[0, 9, 18, 27]].max() < 0.03 < np.median(believed.sigma)


def test_predictor_that_is_right_gains_trust_and_one_that_is_wrong_loses_it() -> None:
    places = [0, 5, 10, 15, 20, 25, 30]
    assert explain(KERNEL, PREDICTED, points(PREDICTED + 0.01, places)).trust > 0.99
    shuffled = np.random.default_rng(1).permutation(4 * PREDICTED)
    wrong = explain(KERNEL, 4 * PREDICTED, points(shuffled, places))
    assert wrong.trust < 0.1
    alone = explain(KERNEL, np.zeros(len(CANDIDATES)), points(shuffled, places))
    assert wrong.mean == pytest.approx(alone.mean, abs=0.3)


def test_error_of_a_stage_is_shared_by_its_candidates_only() -> None:
    stage = np.array([c.stage for c in CANDIDATES])
    truth = PREDICTED - 0.4 * (stage == 2)
    measured = [at for at, c in enumerate(CANDIDATES) if c.micro_batch in (1, 4) and c.get("contiguous_gradients")]
    error = explain(KERNEL, PREDICTED, points(truth, measured)).mean - PREDICTED
    assert error[stage == 2].mean() < -0.3
    assert abs(error[stage != 2].mean()) < 0.05


def test_second_order_knobs_matter_as_little_as_they_have_mattered() -> None:
    whole = np.array([bool(c.get("contiguous_gradients")) for c in CANDIDATES])
    pairs = [0, 1, 10, 11, 20, 21]
    without = explain(KERNEL, PREDICTED, points(PREDICTED, pairs))
    strong = explain(KERNEL, PREDICTED, points(PREDICTED + 0.3 * whole, pairs))
    untried = 31
    assert without.sigma[untried] < strong.sigma[untried]


def test_speeds_of_an_earlier_call_may_all_be_off() -> None:
    now = explain(KERNEL, PREDICTED, points(PREDICTED + 0.3, [0, 9, 18]))
    before = explain(KERNEL, PREDICTED, points(PREDICTED + 0.3, [0, 9, 18], call=1))
    assert before.sigma[0] > 2 * now.sigma[0]
    both = explain(KERNEL, PREDICTED, [*points(PREDICTED + 0.3, [0, 9, 18], call=1), *points(PREDICTED, [0])])
    assert abs(both.mean[9] - PREDICTED[9]) < 0.1, "the candidate of both calls shows the machine's speed"


def test_oom_raises_the_peak_of_similar_candidates() -> None:
    capacity = float(PREDICTED[-1]) + 0.05
    before = explain(KERNEL, PREDICTED, points(PREDICTED, [0]), scale=0.5)
    out = above(capacity, float(before.mean[-1]), float(before.sigma[-1]), len(CANDIDATES) - 1)
    assert out.value > capacity
    after = explain(KERNEL, PREDICTED, [*points(PREDICTED, [0]), out], scale=0.5)
    assert (after.mean[-4:] > before.mean[-4:]).all()
    assert after.probability_below(capacity)[-1] < before.probability_below(capacity)[-1]


@pytest.mark.parametrize(("bound", "mean", "least"), [(0.0, 5.0, 10.0), (0.0, 0.0, 0.05), (100.0, 0.0, 0.0)])
def test_bound_below_the_belief_says_nothing_and_one_above_is_the_value(
    bound: float, mean: float, least: float
) -> None:
    found = above(bound, mean, 0.1, 0)
    assert max(bound, mean) <= found.value < max(bound, mean) + 0.2
    assert least <= found.sigma < math.inf


def test_belief_of_a_candidate_becomes_the_one_cut_at_its_bound() -> None:
    mean, sigma, bound = 0.3, 0.2, 0.4
    point = above(bound, mean, sigma, 0)
    precision = 1 / sigma**2 + 1 / point.sigma**2
    drawn = np.random.default_rng(0).normal(mean, sigma, 400_000)
    cut = drawn[drawn > bound]
    assert (mean / sigma**2 + point.value / point.sigma**2) / precision == pytest.approx(cut.mean(), rel=0.01)
    assert precision**-0.5 == pytest.approx(cut.std(), rel=0.02)


def test_expected_gain_is_that_of_a_normal_distribution() -> None:
    drawn = np.random.default_rng(0).normal(-0.1, 0.2, 200_000)
    assert expected_gain(np.array([-0.1]), np.array([0.2]))[0] == pytest.approx(np.maximum(drawn, 0).mean(), rel=0.02)


def test_one_candidate_and_knobs_that_some_lack() -> None:
    assert explain(KnobKernel(CANDIDATES[:1]), PREDICTED[:1], []).mean == pytest.approx(PREDICTED[:1])
    some = [CANDIDATES[0], CANDIDATES[1].but(reduce_bucket_size=5e8)]
    assert np.isfinite(explain(KnobKernel(some), PREDICTED[:2], points(PREDICTED, [1])).mean).all()


SAVING = [make_candidate(2, 1), make_candidate(3, 1), make_candidate(3, 1, offload_optimizer="cpu")]


def of_hosts(share: float, device: str = "cuda", **changes: Any) -> tuple[list[float], list[bool]]:
    """(host share, host_hopeless) where a host has that share of the weights' bytes; two ranks on each of two nodes."""
    job = make_job(4, precision="bf16", seq_len=SEQ_LEN, **changes)
    trace = recorded_trace(job)
    weights = 2 * sum(trace.parameters)
    two = named_hardware("a100-80gb", 4, nodes=2, host_memory_bytes=int(share * weights))
    two = dataclasses.replace(two, device=device)
    belief = Belief(Predictor(job, two, trace), SAVING)
    limit = np.full(len(SAVING), float(two.ceiling_bytes))
    kept = belief.table().host_bytes * job.ranks / two.nodes
    return belief._host_share(kept).tolist(), belief.forecast([], [], {}, limit).host_hopeless.tolist()


def test_a_host_that_cannot_hold_the_weights_saves_nothing_of_stage_3() -> None:
    held, host = of_hosts(0.5)
    assert held[:2] == pytest.approx([0, 2], rel=1e-3), "all weights once a node, however many ranks it has"
    assert host[:2] == [False, True]
    config = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}
    held, host = of_hosts(0.5, base_config=config)
    assert (held[:2], host[:2]) == ([0, 0], [False, False]), "nothing is gathered"
    assert of_hosts(0.5, "cpu") == ([0, 0, 0], [False, False, False]), "host and device are one"


def test_a_host_that_holds_the_weights_is_large_enough_whatever_its_processes_are_guessed_to_have() -> None:
    held, host = of_hosts(2.0)
    assert held[1] == pytest.approx(0.5, rel=1e-3)
    assert not host[1], "2 GiB a rank are more than all of it"
    assert host[2], "what is offloaded has to leave room for these"
