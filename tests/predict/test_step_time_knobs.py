"""What knobs beside the usual ones change of a step's seconds, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.predict.calibration import TIME
from autotune.predict.features import columns_of
from autotune.predict.step_time import NVME_GB_PER_S, StepSeconds, StepWork, spend, step_work
from autotune.predict.trace_data import Trace
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.knobs import short_name
from tests.conftest import make_job
from tests.predict.passes import PASS

ONE_NODE, TWO_NODES = named_hardware("a100-80", 8), named_hardware("a100-80", 16, nodes=2)
TRACE = Trace([10**8] * 40 + [10**4] * 1000, 0, PASS, dataclasses.replace(PASS, flops=(1e12, 3e12)), largest=10**8)
LARGE, SMALL = 40 * 10**8, 10**7  # elements of both kinds
BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
NOTHING_KEPT = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def table(hardware: Hardware, knobs: dict[str, Any], **changes: Any) -> tuple[StepWork, StepSeconds]:
    job = make_job(hardware.count, **{"precision": "bf16", "seq_len": 64, **changes})
    named = {short_name(name): value for name, value in {**BATCH, **knobs}.items()}
    c = columns_of([Candidate.of(named)], job)
    k = {name: float(np.exp(prior.mean)) for name, prior in TIME.items()}
    w = step_work(job, hardware, TRACE, c)
    return w, spend(w, c, {**k, "hidden": k["hidden"] / (1 + k["hidden"])})


def work_of(knobs: dict[str, Any], hardware: Hardware = ONE_NODE, **changes: Any) -> StepWork:
    return table(hardware, knobs, **changes)[0]


def test_a_ratio_shares_the_step_between_host_and_device() -> None:
    out = {"zero_stage": 3, "offload_optimizer": "cpu", "sub_group_size": 10**7}
    none, half, whole = (work_of({**out, "offload_optimizer.ratio": ratio}) for ratio in (0.0, 0.5, 1.0))
    assert half.cpu_adam[0] == pytest.approx(0.5 * whole.cpu_adam[0], rel=0.05)
    assert half.optimizer[0] == pytest.approx(0.5 * none.optimizer[0], rel=0.05)
    assert half.pcie_step[0] == pytest.approx(0.5 * whole.pcie_step[0], rel=0.05)
    assert (none.cpu_adam[0], whole.optimizer[0]) == (0, 0)


def test_what_is_kept_at_the_turn_is_not_gathered_again() -> None:
    eager = work_of({"zero_stage": 3, **NOTHING_KEPT})
    kept = work_of({"zero_stage": 3, **NOTHING_KEPT, "stage3_max_reuse_distance": 10**10})
    assert kept.gather_micro[0] == pytest.approx(0.5 * eager.gather_micro[0])
    some = work_of({"zero_stage": 3, **NOTHING_KEPT, "stage3_max_reuse_distance": LARGE + SMALL})
    assert some.gather_micro[0] == pytest.approx(0.75 * eager.gather_micro[0])


def test_persistent_parameters_are_gathered_once_a_step() -> None:
    eager = work_of({"zero_stage": 3, **NOTHING_KEPT})
    persistent = work_of({"zero_stage": 3, **NOTHING_KEPT, "stage3_param_persistence_threshold": 10**5})
    spared = 2 * SMALL / (LARGE + SMALL) / 2
    assert persistent.gather_micro[0] == pytest.approx((1 - spared) * eager.gather_micro[0])
    assert eager.gather_step[0] == 0
    assert persistent.gather_step[0] == pytest.approx(spared / 2 * eager.gather_micro[0])


def test_hpz_gathers_for_backward_within_a_node() -> None:
    far = work_of({"zero_stage": 3, **NOTHING_KEPT}, TWO_NODES)
    near = work_of({"zero_stage": 3, **NOTHING_KEPT, "zero_hpz_partition_size": 8}, TWO_NODES)
    assert near.gather_micro[0] > 0.5 * far.gather_micro[0]
    assert near.gather_micro[0] < 0.95 * far.gather_micro[0]
    assert near.reduce_micro[0] == far.reduce_micro[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_the_dtype_that_is_sent(stage: int) -> None:
    own, wide = (work_of({"zero_stage": stage, **more}) for more in ({}, {"communication_data_type": "fp32"}))
    assert wide.reduce_micro[0] + wide.reduce_step[0] == pytest.approx(2 * (own.reduce_micro[0] + own.reduce_step[0]))


def test_quantized_weights_and_gradients_travel_narrow() -> None:
    plain = work_of({"zero_stage": 3})
    narrow = work_of({"zero_stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True})
    assert narrow.gather_micro[0] == pytest.approx(0.5 * plain.gather_micro[0])
    assert narrow.reduce_micro[0] == pytest.approx(0.25 * plain.reduce_micro[0])


def test_masters_and_states_in_16_bits_are_read_and_written_in_less_time() -> None:
    low = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    wide, narrow = work_of({"zero_stage": 2}), work_of({"zero_stage": 2, **low})
    # 2 x (4 + 8) + 4 + 4 bytes a parameter, against 2 x (2 + 4) + 4 + 4; and 36 for its gradient
    assert narrow.optimizer[0] == pytest.approx(wide.optimizer[0] * 56 / 68)


def test_superoffload_steps_while_backward_goes_on() -> None:
    out = {"zero_stage": 3, "offload_optimizer": "cpu"}
    beside = {**out, "offload_optimizer.super_offload": True}
    (_, plain), (_, hidden) = table(ONE_NODE, out), table(ONE_NODE, beside)
    assert hidden.offload[0] < plain.offload[0]
    assert hidden.offload[0] > 0


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
    assert states.nvme[0] == pytest.approx(bytes_a_step / (NVME_GB_PER_S * 1e9), rel=0.01)
    assert both.nvme[0] > states.nvme[0]
    assert work_of({**out, "offload_optimizer": "cpu"}).nvme[0] == 0.0
