"""What batches of many lengths leave in the caching allocator, held against a replay of its rules."""

from typing import Any

import numpy as np
import pytest

from autotune.predict.predictor import Predictor, kept_records
from autotune.problem.candidate import EXPANDABLE
from autotune.problem.hardware import named_hardware
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace

UNIFORM = tuple((tokens, 1) for tokens in range(40, 101, 4))


def batches_of(lengths: tuple[tuple[int, int], ...], rows: int, shape: tuple[int, int]) -> Any:
    """Batches' lengths in tokens: trainings x batches of random rows."""
    tokens, counts = np.array(lengths).T
    return np.random.default_rng(7).choice(tokens, size=(*shape, rows), p=counts / counts.sum()).max(axis=2)


def records(batches: Any) -> Any:
    """Of each training, the sum of the lengths that were the longest so far."""
    longest = np.maximum.accumulate(batches, axis=1)
    before = np.concatenate([np.zeros((len(batches), 1)), longest[:, :-1]], axis=1)
    return (batches * (batches > before)).sum(axis=1)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_formula_is_the_mean_of_the_records(rows: int) -> None:
    found = records(batches_of(UNIFORM, rows, (10_000, 60))) / UNIFORM[-1][0] - 1
    mean, deviation = kept_records(UNIFORM, np.array([float(rows)]), batches=60)
    assert mean[0] == pytest.approx(found.mean(), rel=0.03)
    assert deviation[0] == pytest.approx(found.std(), rel=0.03)


def test_batches_of_one_length_leave_nothing() -> None:
    assert kept_records(((512, 9),), np.array([1.0, 8.0]))[0] == pytest.approx([0, 0])
    cut, _ = kept_records(((100, 1), (512, 1000)), np.array([1.0]))
    assert cut[0] < 0.001, "rows cut at one length hardly ever begin with a shorter one"
    few, _ = kept_records(((100, 1000), (512, 1)), np.array([1.0]), batches=10**6)
    assert few[0] == pytest.approx(100 / 512, rel=0.01)


def test_nvml_shows_them_and_a_limit_hardly_concerns_them() -> None:
    hardware = named_hardware("b200", 2)
    same = make_job(precision="bf16", seq_len=SEQ_LEN)
    varied = make_job(precision="bf16", seq_len=SEQ_LEN, lengths=((SEQ_LEN // 2, 10_000), (SEQ_LEN, 1)))
    candidate = make_candidate(0, 4096)
    one, many = (Predictor(job, hardware, recorded_trace(job)).predict(candidate) for job in (same, varied))
    assert many.allocated_bytes == pytest.approx(one.allocated_bytes)
    assert many.peak_bytes > 1.05 * one.peak_bytes
    assert one.needed_bytes < many.needed_bytes < one.needed_bytes + 0.2 * (many.peak_bytes - one.peak_bytes)
    width = [(p.peak_interval[1] - p.peak_interval[0]) / p.peak_bytes for p in (one, many)]
    assert width[1] > width[0]
    grows = Predictor(varied, hardware, recorded_trace(varied)).predict(candidate.but(**{EXPANDABLE: True}))
    assert grows.peak_bytes == pytest.approx(one.peak_bytes)
