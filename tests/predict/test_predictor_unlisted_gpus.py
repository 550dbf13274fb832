"""A GPU that is no row of the table is predicted as a GPU, and less surely."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune.executors.local import _rates
from autotune.predict.calibration import overhead_prior
from autotune.predict.predictor import Predictor
from autotune.predict.step_time import CPU_TFLOPS, DeviceRates
from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.hardware import named_hardware
from tests.conftest import make_candidate, make_job

KNOWN = named_hardware("h100", 4)
NAMES = ("NVIDIA GX200 480GB", "NVIDIA GX500", "NVIDIA H100 80GB HBM3 MIG 7g.80gb", "GRID A100D-80C", "A + B")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_never_a_cpu_rank(name: str) -> None:
    job = make_job(ranks=4, precision="bf16", model="llama-3.1-8b", seq_len=2048)
    trace = closed_form_trace(job, "no trace")
    unlisted = dataclasses.replace(KNOWN, facts=None, name=name)
    assert DeviceRates.of(unlisted, job).flops > 50 * CPU_TFLOPS * 1e12
    predictors = [Predictor(job, hardware, trace) for hardware in (KNOWN, unlisted)]
    of_known, of_unlisted = (one.predict(make_candidate(stage=3, micro_batch=4)) for one in predictors)
    assert of_known.step_seconds / 10 < of_unlisted.step_seconds < 10 * of_known.step_seconds
    low, high = of_unlisted.step_interval
    assert low < of_known.step_seconds < high
    notes = predictors[1].notes()
    assert any(note.startswith(f"{name} is not in autotune's table of GPUs: its rates are ") for note in notes)
    assert not any("table of GPUs" in note for note in predictors[0].notes())
    facts = unlisted.gpu_facts
    assert facts is not None
    sure = dataclasses.replace(unlisted, rates={**vars(facts), "doubt": 0.0})
    of_sure = Predictor(job, sure, trace).predict(make_candidate(stage=3, micro_batch=4))
    assert of_sure.step_seconds == pytest.approx(of_unlisted.step_seconds)
    assert high > 1.01 * of_sure.step_interval[1]


def test_its_context_and_network_are_those_of_its_kind() -> None:
    slice_ = dataclasses.replace(KNOWN, facts=None, name="NVIDIA H100 80GB HBM3 MIG 7g.80gb", count=1)
    assert overhead_prior(slice_, 1) == overhead_prior(named_hardware("h100", 1), 1)
    two = named_hardware("h200", 16, nodes=2)
    unlisted = dataclasses.replace(two, facts=None, name="NVIDIA H200 NVL")
    assert unlisted.network_gb_per_s == two.network_gb_per_s


def test_a_share_of_an_estimated_peak_is_not_said() -> None:
    job = make_job(ranks=4, precision="bf16")
    assert _rates(job, make_candidate(), KNOWN, 1e4)[1] is not None
    tflops, mfu = _rates(job, make_candidate(), dataclasses.replace(KNOWN, facts=None, name="NVIDIA GX500"), 1e4)
    assert (tflops is not None and np.isfinite(tflops), mfu) == (True, None)
