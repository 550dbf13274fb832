"""What older DeepSpeed keeps otherwise, in the bill of memory; tests/predict/test_zero_memory_live.py makes engines of the installed
one."""

import numpy as np
import pytest

from autotune.predict import predictor as predicting
from autotune.predict.features import columns_of
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.predict.zero_memory import estimate_memory
from autotune.problem.hardware import named_hardware
from autotune.problem.knobs import READ, Release
from tests.conftest import make_candidate, make_job
from tests.predict.passes import peaks_of
from tests.predict.recorded import SEQ_LEN, recorded_trace


def peak(stage: int, deepspeed: Release, precision: str = "bf16", **knobs: object) -> float:
    job = make_job(precision=precision, seq_len=SEQ_LEN)
    one = estimate_memory(job, recorded_trace(job), columns_of([make_candidate(stage, 4, **knobs)], job, deepspeed))
    return float(peaks_of(one)[[i for i, name in enumerate(one.moments) if name != "init"], 0].max())


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (0, "fp32"), (3, "fp32")])
def test_most_is_the_same_in_all_versions(stage: int, precision: str) -> None:
    knobs = {"reduce_bucket_size": 1, "overlap_comm": False}
    assert peak(stage, (0, 16, 0), precision, **knobs) == pytest.approx(peak(stage, READ, precision, **knobs), abs=4)


def test_stage_0_in_bf16_sums_in_32_bits_until_0_17_5() -> None:
    """A whole copy of the gradients in 32 bits, but only a part of masters and moments: of two ranks the half."""
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    elements = sum(recorded_trace(job).parameters)
    kept = {
        version: estimate_memory(job, recorded_trace(job), columns_of([make_candidate(0)], job, version))
        for version in ((0, 17, 5), (0, 17, 6))
    }
    old, new = (float((one.resident() - one.terms["weights"])[0]) / elements for one in kept.values())
    assert (old, new) == pytest.approx((4 + 12 / 2, 12), rel=0.01)


def test_gradients_of_stage_0_stay_until_0_18_5() -> None:
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    whole = 2 * sum(recorded_trace(job).parameters)
    forward = {}
    for version in ((0, 17, 6), (0, 18, 6)):
        one = estimate_memory(job, recorded_trace(job), columns_of([make_candidate(0)], job, version))
        forward[version] = max(peaks_of(one)[at, 0] for at, name in enumerate(one.moments) if name == "forward")
    assert forward[0, 17, 6] - forward[0, 18, 6] == pytest.approx(whole)


def test_buckets_stand_beside_all_activations_until_0_17_2() -> None:
    buckets = {"reduce_bucket_size": 5_000_000, "overlap_comm": True, "contiguous_gradients": True}
    early, late = peak(2, (0, 16, 9), **buckets), peak(2, (0, 17, 3), **buckets)
    assert early > late
    assert early - late <= 2 * 2 * 5_000_000


@pytest.mark.parametrize(("version", "pinned"), [((0, 16, 9), 0.0), ((0, 19, 3), 0.0), ((0, 19, 5), 1.0)])
def test_what_is_pinned_where_the_config_is_silent(version: Release, pinned: float) -> None:
    columns = columns_of([make_candidate(3)], make_job(), version)
    assert (columns.pinned_optimizer[0], columns.pinned_param[0]) == (pinned, pinned)


def test_low_masters_are_not_read_before_0_18_3() -> None:
    job = make_job(precision="bf16", base_config={"bf16": {"bf16_master_weights_and_grads": True}})
    masters = [columns_of([make_candidate(1)], job, version).master[0] for version in ((0, 18, 2), (0, 18, 3))]
    assert masters == [4.0, 2.0]


@pytest.mark.slow
def test_a_newer_library_makes_predictions_wider_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    job, hardware = make_job(model="llama-3.2-1b", precision="bf16"), named_hardware("rtx4090", 2)
    candidates = [make_candidate(2), make_candidate(3)]
    known = traced_predictor(job, hardware)
    monkeypatch.setattr(predicting, "unknown_newer", lambda interpreter: ["deepspeed 0.20.0 is newer than 0.19"])
    unknown = Predictor(job, hardware, known.trace)
    ours, theirs = known.table(candidates), unknown.table(candidates)
    sigmas = [one.step_sigma(one.prepare(candidates)) for one in (known, unknown)]
    assert np.all(theirs.peak_sigma > 1.1 * ours.peak_sigma)
    assert "deepspeed 0.20.0 is newer than 0.19" in unknown.notes()
    assert np.all(sigmas[1] > 1.5 * sigmas[0])
