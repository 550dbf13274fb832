"""What knobs beside the usual ones change of a step's seconds, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.predict.features import columns_of
from autotune.predict.step_time import StepWork, step_work
from autotune.predict.trace_data import Trace
from autotune.problem.candidate import Candidate
from autotune.problem.knobs import short_name
from tests.conftest import make_job
from tests.predict.passes import PASS

TRACE = Trace([10**8] * 40 + [10**4] * 1000, 0, PASS, dataclasses.replace(PASS, flops=(1e12, 3e12)), largest=10**8)
LARGE, SMALL = 40 * 10**8, 10**7  # elements of both kinds
BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
NOTHING_KEPT = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def work_of(knobs: dict[str, Any]) -> StepWork:
    job = make_job(8, precision="bf16", seq_len=64)
    named = {short_name(name): value for name, value in {**BATCH, **knobs}.items()}
    return step_work(job, TRACE, columns_of([Candidate.of(named)], job), "cuda")


def test_what_is_kept_at_the_turn_is_not_gathered_again() -> None:
    eager = work_of({"zero_stage": 3, **NOTHING_KEPT})
    kept = work_of({"zero_stage": 3, **NOTHING_KEPT, "stage3_max_reuse_distance": 10**10})
    assert kept.gathered[0] == pytest.approx(0.5 * eager.gathered[0])
    some = work_of({"zero_stage": 3, **NOTHING_KEPT, "stage3_max_reuse_distance": LARGE + SMALL})
    assert some.gathered[0] == pytest.approx(0.75 * eager.gathered[0])


def test_persistent_parameters_are_gathered_once_a_step() -> None:
    eager = work_of({"zero_stage": 3, **NOTHING_KEPT})
    persistent = work_of({"zero_stage": 3, **NOTHING_KEPT, "stage3_param_persistence_threshold": 10**5})
    spared = 2 * SMALL / (LARGE + SMALL) / 2
    assert persistent.gathered[0] == pytest.approx((1 - spared) * eager.gathered[0])
    assert eager.step_gathered[0] == 0
    assert persistent.step_gathered[0] == pytest.approx(spared / 2 * eager.gathered[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_the_dtype_that_is_sent(stage: int) -> None:
    own, wide = (work_of({"zero_stage": stage, **more}) for more in ({}, {"communication_data_type": "fp32"}))
    assert wide.reduced[0] + wide.step_reduced[0] == pytest.approx(2 * (own.reduced[0] + own.step_reduced[0]))


def test_masters_and_states_in_16_bits_are_read_and_written_in_less_time() -> None:
    low = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    wide, narrow = work_of({"zero_stage": 2}), work_of({"zero_stage": 2, **low})
    # 2 x (4 + 8) + 4 + 4 bytes a parameter, against 2 x (2 + 4) + 4 + 4; and 27 for its gradient
    assert narrow.optimizer[0] == pytest.approx(wide.optimizer[0] * 47 / 59)


def test_what_liger_has_fused_is_not_fused_again() -> None:
    """Of one trace: that of a job with Liger's kernels counts them as what they are."""
    plain, compiled = work_of({"zero_stage": 0}), work_of({"zero_stage": 0, "compile": True})
    both = work_of({"zero_stage": 0, "compile": True, "liger_kernel": True})
    assert compiled.moved[0] < both.moved[0] == plain.moved[0]
    assert compiled.starts[0] < both.starts[0] == plain.starts[0]


def test_states_on_nvme_are_read_and_written_once_a_step() -> None:
    out = {"zero_stage": 3, "offload_optimizer": "nvme"}
    states, both = work_of(out), work_of({**out, "offload_param": "nvme"})
    rank_elements = (LARGE + SMALL) / 8
    bytes_a_step = 2 * (4 + 4 + 4) * rank_elements  # master, momentum and variance
    assert states.nvme[0] == pytest.approx(bytes_a_step, rel=0.01)
    assert both.nvme[0] > states.nvme[0]
    assert work_of({**out, "offload_optimizer": "cpu"}).nvme[0] == 0.0
