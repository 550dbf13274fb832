"""What DeepSpeed keeps at each stage: against real engines as recorded, and by hand for a model of a hundred elements.

No test here imports torch; tests/predict/test_zero_memory_live.py makes engines now.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.predict.features import columns_of
from autotune.predict.trace_data import BACKWARD, FORWARD, Pass, Trace
from autotune.predict.zero_memory import (
    MemoryEstimate,
    bypassing,
    estimate_memory,
    gathered_bytes,
    persistent,
    saved_bytes,
)
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, Lora, Script, ScriptProfile
from autotune.problem.knobs import READ, Release
from autotune.problem.models import resolve_model
from autotune.versions import release
from tests.conftest import make_candidate, make_job
from tests.predict.passes import peaks_of
from tests.predict.recorded import recorded_trace

DATA = Path(__file__).parents[2] / "benchmarks/data"
MEASURED = json.loads((DATA / "live_tensors_cpu.json").read_text())["rows"]
OLDER = sorted(DATA.glob("live_tensors_deepspeed-*_cpu.json"))  # counted under older versions of DeepSpeed
WITH_OWN_KEYS = json.loads((DATA / "live_tensors_keys_cpu.json").read_text())["rows"]


# -- real engines, as recorded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "least"), [(MEASURED, 60), (WITH_OWN_KEYS, 35)])
def test_live_bytes_of_real_engines_are_met(rows: list[dict], least: int) -> None:
    errors = errors_of(rows, READ)
    assert len(errors) >= least
    assert np.median(errors) < 0.02
    assert max(errors) < 0.08


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_live_bytes_under_older_versions_are_met(path: Path) -> None:
    recorded = json.loads(path.read_text())
    errors = errors_of(recorded["rows"], release(recorded["deepspeed"]))
    assert len(errors) == 45
    assert np.median(errors) < 0.02  # the trace is of a newer transformers than they ran with
    assert max(errors) < 0.08


def errors_of(rows: list[dict], deepspeed: Release) -> list[float]:
    """By how much of what was counted each prediction is off."""
    errors = []
    for row in rows:
        model, base = resolve_model(row["model"]), row.get("base_config", {})
        job = Job(model, row["ranks"], row["seq_len"], row["precision"], base_config=base)
        one = estimate_memory(job, recorded_trace(job), columns_of([Candidate.of(row["candidate"])], job, deepspeed))
        at = [i for i, name in enumerate(one.moments) if name != "init"]
        predicted = float(peaks_of(one)[at, 0].max() + one.terms["host"][0])
        errors.append(abs(predicted / max(row["live"].values()) - 1))
    return errors


# -- by hand -------------------------------------------------------------------------------------------------------------
#
# 100 trainable elements, the largest parameter has 60. In bf16 over two ranks the whole is 200 bytes, a rank's part 50
# elements. A bucket of 40 elements takes 80 bytes, and only the largest parameter does not fit into it.

NO_FLOPS = {"flops": (0, 0), "attention": (0, 0), "moved": ((0, 0), (0, 0)), "operators": (0, 0)}
PLAIN = Pass([FORWARD, BACKWARD, BACKWARD], [1000, 1000, -100], [10, 20, 5], [0, 0, 120], (0, 0), **NO_FLOPS)
SPARING = Pass([FORWARD, BACKWARD], [300, 400], [1, 2], [0, 120], (0, 0), **NO_FLOPS)
TRACE = Trace([30, 60, 10], 0, PLAIN, SPARING, largest=60)
BATCH = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
STAGE_3 = {
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 40,
    "sub_group_size": 35,
    "zero_optimization.stage3_prefetch_bucket_size": 5,
    "zero_optimization.stage3_max_reuse_distance": 40,
}
ACCUMULATING = {"gradient_accumulation_steps": 2}
OUT = {"offload_optimizer": "cpu"}


def bill_of(knobs: dict, job: Job | None = None, trace: Trace = TRACE, device: str = "cpu") -> MemoryEstimate:
    job = job or make_job(precision="bf16")
    small = {"reduce_bucket_size": 40, "contiguous_gradients": True, "overlap_comm": False}
    return estimate_memory(job, trace, columns_of([Candidate.of({**BATCH, **small, **knobs})], job), device)


def states_of(one: MemoryEstimate) -> float:
    return float((one.terms["master weights"] + one.terms["optimizer states"])[0])


def bill_under(config: dict, knobs: dict, device: str = "cpu", **job: object) -> MemoryEstimate:
    """With keys of the user's own config."""
    return bill_of(knobs, make_job(**{"precision": "bf16", **job}, base_config=config), device=device)


@pytest.mark.parametrize(
    ("knobs", "job", "parameters", "gradients", "optimizer"),
    [
        # Adam: 32-bit master weights and two states, 12 bytes an element; fp32 trains without a copy at stage 0 alone
        ({"zero_stage": 0}, {}, 200, 0, 1200),
        ({"zero_stage": 0}, {"precision": "fp32"}, 400, 0, 800),
        ({"zero_stage": 3}, {}, 100, 100, 600),
        # other optimizers' states: one of 4 bytes; one that is not known is taken for Adam
        *(({"zero_stage": 0}, {"optimizer": name}, 200, 0, 800) for name in ("lion", "sgd", "adagrad")),
        ({"zero_stage": 0}, {"base_config": {"optimizer": {"type": "Lamb"}}}, 200, 0, 1200),
        # offloaded: the optimizer is gone; stages 1 and 2 send one parameter's gradient at a time
        ({"zero_stage": 1, **OUT}, {}, 200, 120, 0),
        ({"zero_stage": 3, **OUT}, {}, 100, 0, 0),
        ({"zero_stage": 3, "offload_param": "cpu"}, {}, 0, 100, 600),
    ],
)
def test_what_is_there_all_the_time(knobs: dict, job: dict, parameters: int, gradients: int, optimizer: int) -> None:
    one = bill_of(knobs, make_job(**{"precision": "bf16", **job}))
    assert (one.terms["weights"][0], one.terms["gradients"][0], states_of(one)) == (parameters, gradients, optimizer)


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    """`single_partition_of_fp32_groups` of 0.19.8: 35,232 elements on 4 ranks, whether `ep_size` is 1 or 2."""
    elsewhere = dataclasses.replace(
        make_job(4, precision="bf16"), script=Script(("t.py",), "/", profile=ScriptProfile(experts_elsewhere=60))
    )
    one = bill_of({"zero_stage": 2}, elsewhere)
    assert (one.terms["weights"][0], states_of(one)) == (200, 12 * (100 + 60) / 4), (
        "weights stay those of the rank's own experts"
    )


@pytest.mark.parametrize(
    ("config", "precision", "copied"), [({}, "fp32", 400), ({"bf16": {"enabled": False}}, "bf16", 200)]
)
def test_ddp_keeps_gradients_a_second_time_in_every_precision(config: dict, precision: str, copied: int) -> None:
    job = make_job(precision=precision, base_config=config, torch_alone=True)
    one = bill_of({"zero_stage": 0}, job)
    assert one.terms["gradients"][0] == copied
    assert bill_of({"zero_stage": 0}, dataclasses.replace(job, ranks=1)).terms["gradients"][0] == 0
    end = [i for i, name in enumerate(one.moments) if name == "backward"][-1]
    assert one.terms["copies"][end, 0] == copied, (
        "gradients, and none of the flat copies that DeepSpeed's stage 0 makes"
    )


FSDP = {"zero_stage": 3, "contiguous_gradients": False}


@pytest.mark.parametrize(
    ("config", "parameters", "optimizer", "gradients"),
    [({}, 4 * 50, 8 * 50, 4), ({"bf16": {"enabled": False}}, 2 * 50, 4 * 50, 2)],
)
def test_fsdps_shards_are_its_masters(config: dict, parameters: int, optimizer: int, gradients: int) -> None:
    job = make_job(precision="bf16", base_config=config, torch_alone=True)
    one = bill_of(FSDP, job)
    assert (one.terms["weights"][0], one.terms["gradients"][0], states_of(one)) == (parameters, 0, optimizer)
    # 60 elements have gradients at the third moment: 40 wait in the unit's 16 bits, 20 are shared by two ranks
    assert one.terms["copies"][2, 0] == 2 * 40 + gradients * 20 / 2
    at = one.moments.index("step")
    assert one.terms["copies"][at, 0] == gradients * 50
    between = bill_of({**FSDP, **ACCUMULATING}, job)
    assert between.terms["gradients"][0] == gradients * 50
    assert (between.terms["copies"][2, 0], between.terms["copies"][at, 0]) == (2 * 40, 0)


@pytest.mark.parametrize(("config", "width"), [({}, 4), ({"bf16": {"enabled": False}}, 2)])
def test_fsdps_frozen_shards_are_as_wide_as_the_others(config: dict, width: int) -> None:
    job = make_job(precision="bf16", base_config=config, torch_alone=True)
    one = bill_of(FSDP, job, trace=dataclasses.replace(TRACE, frozen=20))
    assert one.terms["weights"][0] == width * (100 + 20) / 2
    assert one.terms["holes"][0] == 0


def test_fsdp2_shards_the_base_of_adapters_as_it_is_loaded() -> None:
    job = make_job(precision="bf16", torch_alone=True, lora=Lora(8))
    one = bill_of(FSDP, job, trace=dataclasses.replace(TRACE, frozen=20))
    assert one.terms["weights"][0] == (4 * 100 + 2 * 20) / 2


def test_fsdp_offloads_gradients_with_the_rest() -> None:
    job = make_job(precision="bf16", torch_alone=True)
    one = bill_of({**FSDP, **OUT, "offload_param": "cpu"}, job)
    assert (one.terms["weights"][0], one.terms["gradients"][0], states_of(one)) == (0, 0, 0)
    assert one.terms["copies"][2, 0] == 2 * 40


def test_frozen_parameters_are_partitioned_at_stage_3_alone_and_train_nothing() -> None:
    frozen = dataclasses.replace(TRACE, frozen=20)
    for stage, parameters, optimizer in ((0, 240, 1200), (1, 240, 600), (2, 240, 600), (3, 120, 600)):
        one = bill_of({"zero_stage": stage}, trace=frozen)
        assert (one.terms["weights"][0], states_of(one)) == (parameters, optimizer)


MOMENTS = ("forward", "backward", "backward", "forward", "backward", "backward", "step", "init")
# of a candidate without checkpointing: forward; backward before its first gradient, with 120 bytes of gradients, at its
# end; the step; the engine's making
RUN = [0, 1, 2, 5, 6, 7]


@pytest.mark.parametrize(
    ("knobs", "buckets", "temporaries"),
    [
        # stage 0 holds all gradients and reduces them in a flat copy; its step copies them and the parameters to 32 bits
        ({"zero_stage": 0}, [0, 0, 0, 0, 0, 0], [0, 0, 120, 400, 600, 0]),
        # stage 1: its own part, and beside it what is too large for a bucket; accumulating it keeps all, and the buckets;
        # before the step a gradient's norm is taken in 64 bits, of at most a part (50 elements)
        ({"zero_stage": 1, **ACCUMULATING}, [80, 80, 80, 80, 80, 0], [200, 200, 220, 100, 500, 0]),
        ({"zero_stage": 1, "contiguous_gradients": False}, [0, 0, 80, 80, 0, 0], [0, 0, 120, 200, 500, 0]),
        # stage 2: its own part, and another that accumulates; what waits in a bucket is still whole
        ({"zero_stage": 2, **ACCUMULATING}, [0, 0, 80, 80, 0, 0], [100, 100, 200, 200, 500, 0]),
        # offloaded: a gradient's norm is taken in 64 bits, of at most a part (50 elements); the step is the host's
        ({"zero_stage": 1, **OUT, **ACCUMULATING}, [80, 80, 80, 80, 80, 0], [200, 200, 620, 500, 200, 0]),
        # stage 3: its bucket stands all the time, beside it the flat copy and a rank's share of that; it steps, and is
        # made, by sub-groups of 35 elements, and takes the norm of the largest parameter's part (30 elements)
        ({"zero_stage": 3, **STAGE_3}, [80, 80, 200, 200, 80, 0], [0, 0, 0, 0, 240, 40]),
        ({"zero_stage": 3, **STAGE_3, "reduce_bucket_size": 90}, [180, 180, 180, 450, 180, 0], [0, 0, 0, 0, 240, 40]),
        ({"zero_stage": 3, **STAGE_3, "contiguous_gradients": False}, [0, 0, 120, 120, 0, 0], [0, 0, 80, 80, 240, 40]),
        ({"zero_stage": 3, **STAGE_3, **OUT}, [80, 80, 200, 200, 80, 0], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_what_comes_and_goes(knobs: dict, buckets: list[int], temporaries: list[int]) -> None:
    one = bill_of(knobs)
    assert one.moments == MOMENTS
    assert one.terms["reduce bucket"][RUN, 0].tolist() == buckets
    assert one.terms["copies"][RUN, 0].tolist() == temporaries


@pytest.mark.parametrize(("elements", "norm"), [(10, 8 * 10), (50, 8 * 50), (60, 8 * 50)])
def test_the_norm_of_an_offloaded_gradient_comes_with_it(elements: int, norm: int) -> None:
    """Early in backward no large gradient has been made yet."""
    run = dataclasses.replace(
        TRACE.plain, gradients=[2.0 * elements if made else 0.0 for made in TRACE.plain.gradients]
    )
    one = bill_of({"zero_stage": 2, **OUT}, trace=dataclasses.replace(TRACE, plain=run))
    assert one.terms["copies"][[1, 2], 0].tolist() == [0, norm]


@pytest.mark.parametrize(
    ("knobs", "buckets", "temporaries"),
    [
        # 32 bits: nothing is copied for the step's arithmetic
        ({"zero_stage": 0}, [0, 0, 0, 0, 0, 0], [0, 0, 120, 800, 400, 0]),
        ({"zero_stage": 3, **STAGE_3}, [160, 160, 160, 400, 160, 0], [0, 0, 0, 0, 240, 0]),
    ],
)
def test_what_comes_and_goes_in_32_bits(knobs: dict, buckets: list[int], temporaries: list[int]) -> None:
    one = bill_of(knobs, make_job(precision="fp32"))
    assert one.terms["reduce bucket"][RUN, 0].tolist() == buckets
    assert one.terms["copies"][RUN, 0].tolist() == temporaries


def test_stage_0_reduces_in_pieces_of_half_a_billion_elements() -> None:
    huge = dataclasses.replace(TRACE, parameters=[10**9], largest=10**9)
    one = bill_of({"zero_stage": 0}, trace=huge)
    assert one.terms["copies"][5, 0] == 2 * 10**9 + 2 * 5 * 10**8


@pytest.mark.parametrize(
    ("knobs", "job", "expected"),
    [
        # the largest parameter and a prefetch: 65 elements
        ({}, {}, [130, 130, 130, 130, 0, 0]),
        (
            {"zero_optimization.stage3_max_reuse_distance": 150},
            {},
            [160, 160, 160, 160, 0, 0],
        ),  # 75 elements stay, and 5
        ({}, {"ranks": 1}, [0, 0, 0, 0, 0, 0]),  # a part that is the whole is not copied
    ],
)
def test_parameters_that_stage_3_holds_whole(knobs: dict, job: dict, expected: list[int]) -> None:
    one = bill_of({"zero_stage": 3, **STAGE_3, **knobs}, make_job(**{"precision": "bf16", **job}))
    assert one.terms["gathered parameters"][RUN, 0].tolist() == expected
    assert not bill_of({"zero_stage": 2}).terms["gathered parameters"].any()


def test_activations_grow_with_the_micro_batch() -> None:
    one = bill_of({"zero_stage": 1})
    assert one.terms["activations"][:, 0].tolist() == [1030, 1060, 0, 0, 0, 0, 0, 0], "never less than nothing"
    spared = bill_of({"zero_stage": 1, "activation_checkpointing": True, "train_micro_batch_size_per_gpu": 5})
    assert spared.terms["activations"][:, 0].tolist() == [0, 0, 0, 305, 410, 0, 0, 0]
    assert spared.terms["copies"][:, 0].tolist() == [0, 0, 0, 0, 220, 100, 500, 0], "only its own moments"
    assert spared.terms["reduce bucket"][:, 0].tolist() == [0, 0, 0, 0, 80, 80, 0, 0]
    same = bill_of(
        {"zero_stage": 1, "activation_checkpointing": True}, trace=dataclasses.replace(TRACE, checkpointed=None)
    )
    assert same.terms["activations"][:, 0].tolist() == [0, 0, 0, 1030, 1060, 0, 0, 0, 0], "not traced: as without"


@pytest.mark.parametrize(
    ("knobs", "host"),
    [
        ({"zero_stage": 3}, 0),
        # states and master weights (12 bytes an element of the part), and both copies that travel (2 + 4)
        ({"zero_stage": 3, **OUT}, 600 + 300),
        ({"zero_stage": 3, "offload_param": "cpu"}, 100),
        ({"zero_stage": 3, "offload_optimizer": "nvme"}, 300),  # states lie on the drive
        # stages 1 and 2 pin one parameter's gradient; stage 2 accumulates there
        ({"zero_stage": 2, **OUT}, 600 + 300 + 120),
        ({"zero_stage": 2, **OUT, **ACCUMULATING}, 600 + 300 + 120 + 100),
    ],
)
def test_host_memory(knobs: dict, host: int) -> None:
    assert bill_of(knobs).terms["host"].tolist() == [host]


def test_a_trace_whose_columns_do_not_fit_is_refused() -> None:
    torn = dataclasses.replace(PLAIN, gradients=[0])
    with pytest.raises(ValueError, match="shorter"):
        bill_of({"zero_stage": 1}, trace=dataclasses.replace(TRACE, plain=torn))


def test_a_peak_is_the_sum_of_its_parts() -> None:
    one = bill_of({"zero_stage": 3, **STAGE_3})
    # parameters 100, gradients 100, optimizer 600, and of each moment buckets, gathered, temporaries and activations
    assert peaks_of(one)[RUN, 0].tolist() == [
        800 + 80 + 130 + 0 + 1030,
        800 + 80 + 130 + 0 + 1060,
        800 + 200 + 130 + 0 + 0,
        800 + 200 + 130 + 0 + 0,
        800 + 80 + 0 + 240 + 0,
        800 + 0 + 0 + 40 + 0,
    ]


# -- keys of the user's own config ---------------------------------------------------------------------------------------

FUSED = {"optimizer": {"type": "AdamW"}}
FOREACH = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
SUM_32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SEND_32 = {"communication_data_type": "fp32"}
LOW_MASTERS = {"bf16": {"bf16_master_weights_and_grads": True}}
LOW_STATES = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.mark.parametrize(
    ("config", "knobs", "parameters", "gradients", "optimizer"),
    [
        # BF16_Optimizer has the sums of all gradients in 32 bits, from the beginning; other stages those of a part
        (SUM_32, {"zero_stage": 1}, 200, 400, 600),
        (SUM_32, {"zero_stage": 3}, 100, 200, 600),
        (SEND_32, {"zero_stage": 3}, 100, 100, 600),
        # masters of 2 bytes, states of 8 or of 4
        (LOW_MASTERS, {"zero_stage": 2}, 200, 0, 500),
        (LOW_STATES, {"zero_stage": 3}, 100, 100, 300),
        (LOW_STATES, {"zero_stage": 0}, 200, 0, 1200),  # masters are DeepSpeed's ZeRO's: none at stage 0
        # Adagrad leaves a state of the model's own parameters behind
        ({"optimizer": {"type": "Adagrad"}}, {"zero_stage": 2}, 200, 0, 400 + 200),
    ],
)
def test_what_own_keys_leave_there_all_the_time(
    config: dict, knobs: dict, parameters: int, gradients: int, optimizer: int
) -> None:
    one = bill_under(config, knobs)
    assert (one.terms["weights"][0], one.terms["gradients"][0], states_of(one)) == (parameters, gradients, optimizer)


@pytest.mark.parametrize(
    ("config", "knobs", "buckets", "temporaries"),
    [
        # DeepSpeed's FusedAdam makes stage 0 FP16_Optimizer: gradients in 32 bits twice, 24 bytes an element in all
        (FUSED, {"zero_stage": 0}, [0, 0, 0, 0, 0, 0], [0, 0, 120, 400, 1000, 0]),
        # gradients of 2 bytes wait for the end of backward, are sent in 2 bytes, and are kept until the step
        (SUM_32, {"zero_stage": 1, **ACCUMULATING}, [0, 0, 0, 0, 0, 0], [200, 200, 200, 400, 200, 0]),
        # stage 2: one flat buffer of 4 bytes, also from the host; a bucket is copied to be sent
        (SUM_32, {"zero_stage": 2, **OUT}, [0, 0, 160, 160, 0, 0], [0, 0, 600, 600, 0, 0]),
        # stage 3: what is scattered out of a bucket is converted
        (SUM_32, {"zero_stage": 3, **STAGE_3}, [80, 80, 280, 280, 80, 0], [0, 0, 0, 0, 240, 0]),
        # a copy in the dtype that is sent; stage 3 has its bucket in it
        (SEND_32, {"zero_stage": 3, **STAGE_3}, [160, 160, 600, 600, 160, 0], [0, 0, 0, 0, 240, 40]),
        # masters of 2 bytes: nothing is converted for the step, and stage 3 begins with less
        (LOW_STATES, {"zero_stage": 3, **STAGE_3}, [80, 80, 200, 200, 80, 0], [0, 0, 0, 0, 240, 0]),
    ],
)
def test_what_comes_and_goes_by_own_keys(config: dict, knobs: dict, buckets: list[int], temporaries: list[int]) -> None:
    one = bill_under(config, knobs)
    assert one.terms["reduce bucket"][RUN, 0].tolist() == buckets
    assert one.terms["copies"][RUN, 0].tolist() == temporaries


@pytest.mark.parametrize(
    ("config", "knobs", "on_cpu", "on_gpu"),
    [
        # torch's foreach: a root of 4 bytes an element, beside the gradients; at stages 1 and 2 what was there before is more
        (FOREACH, {"zero_stage": 0}, 600, 1000),
        (FOREACH, {"zero_stage": 2}, 500, 500),
        (FOREACH, {"zero_stage": 3, **STAGE_3}, 240, 280),
        ({"optimizer": {"type": "Adagrad"}}, {"zero_stage": 2}, 500, 600),
    ],
)
def test_what_torchs_optimizers_take_to_step(config: dict, knobs: dict, on_cpu: int, on_gpu: int) -> None:
    steps = [bill_under(config, knobs, device).terms["copies"][RUN[4], 0] for device in ("cpu", "cuda")]
    assert steps == [on_cpu, on_gpu]


@pytest.mark.parametrize(
    ("knobs", "host"),
    [
        # 50 elements: masters and gradients of 200 bytes take blocks of 256, the 16-bit copy of 100 one of 128, and a
        # gradient of 120 one of 128; states of 400 bytes are not pinned
        ({"zero_stage": 2, **OUT}, 256 + 256 + 128 + 128 + 400),
        # sub-groups of 35 and of 15 elements: 140 bytes and 60; masters are not pinned, the flat buffer of 100 bytes is
        ({"zero_stage": 3, **OUT, "sub_group_size": 35}, 200 + 256 + 64 + 128 + 400),
        # parts of 30, 60 and 10 elements over two ranks stay behind in the allocator, beside the flat buffer
        ({"zero_stage": 3, "offload_param": "cpu"}, 128 + 32 + 64 + 16),
    ],
)
def test_pinned_memory_comes_in_powers_of_two(knobs: dict, host: float) -> None:
    assert bill_of(knobs, device="cuda").terms["host"].tolist() == [host]


def test_without_pinning_nothing_is_rounded() -> None:
    section = {"device": "cpu", "pin_memory": False}
    config = {"zero_optimization": {"offload_optimizer": section, "offload_param": section}}
    for knobs in ({"zero_stage": 2, **OUT, **ACCUMULATING}, {"zero_stage": 3, **OUT, "offload_param": "cpu"}):
        assert bill_under(config, knobs, "cuda").terms["host"] == bill_under(config, knobs).terms["host"]


def test_while_gradients_are_pinned_their_original_is_there_too() -> None:
    # low states: 200 bytes of them come later than the 100 of an unpinned original; no state at all would not
    low, plain = (
        bill_under(LOW_STATES, {"zero_stage": 2, **OUT}, "cuda"),
        bill_of({"zero_stage": 2, **OUT}, device="cuda"),
    )
    assert low.terms["host"][0] == 128 + 128 + 128 + 128 + 200
    assert plain.terms["host"][0] - low.terms["host"][0] == 2 * 128 + 200


# -- the two rules of their own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket", "grads", "expected"),
    [
        (5, 1e9, 200),  # every parameter is larger
        (10, 1e9, 180),  # one as large as the bucket fits
        (59, 1e9, 120),
        (60, 1e9, 0),
        (40, 70, 70),  # no more than there is yet
    ],
)
def test_gradients_that_pass_the_bucket_by(bucket: int, grads: float, expected: float) -> None:
    job = make_job(precision="bf16")
    columns = columns_of([Candidate.of({"zero_stage": 1, "reduce_bucket_size": bucket})] * 2, job)
    assert bypassing(TRACE, columns, 2.0, grads, np.array([True, False])).tolist() == [expected, 0]


@pytest.mark.parametrize(
    ("reuse", "prefetch", "elements"),
    [
        (40, 5, 65),  # the largest parameter is needed whole, and the next is prefetched
        (160, 5, 85),  # half the distance (forward and backward) stays
        (0, 50, 50),  # nothing is kept for a later use
    ],
)
def test_the_turn_from_forward_to_backward(reuse: int, prefetch: int, elements: int) -> None:
    zero = "zero_optimization.stage3_"
    knobs = {
        "zero_stage": 3,
        f"{zero}max_reuse_distance": reuse,
        f"{zero}prefetch_bucket_size": prefetch,
        f"{zero}param_persistence_threshold": 0,
    }
    columns = columns_of([Candidate.of(knobs)] * 2, make_job())
    assert gathered_bytes(TRACE, columns, 2.0).tolist() == [2 * elements] * 2


@pytest.mark.parametrize(
    ("config", "gathers"),
    [
        ({}, True),
        ({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}, False),
        ({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": False}}, False),  # an older name
    ],
)
def test_a_save_gathers_all_weights_at_stage_3(config: dict[str, Any], gathers: bool) -> None:
    candidates = [Candidate.of({"zero_stage": stage}) for stage in (2, 3)]
    job = make_job(precision="bf16", base_config=config)
    found = saved_bytes(job, dataclasses.replace(TRACE, frozen=7), columns_of(candidates, job)).tolist()
    least = 2 * (sum(TRACE.parameters) + 7)
    assert found[0] == 0
    assert (least <= found[1] < 1.2 * least) if gathers else found[1] == 0


@pytest.mark.parametrize(("threshold", "elements"), [(0, 0), (39, 0), (40, 40), (10**5, 100)])
def test_small_parameters_are_always_whole(threshold: int, elements: int) -> None:
    knobs = {"zero_stage": 3, "zero_optimization.stage3_param_persistence_threshold": threshold}
    trace = dataclasses.replace(TRACE, parameters=[60], frozen=40, frozen_sizes=[40])
    assert persistent(trace, columns_of([Candidate.of(knobs)], make_job())).tolist() == [elements]


# -- what holds for any model --------------------------------------------------------------------------------------------

traces = st.builds(
    lambda sizes, frozen: Trace(sizes, frozen, PLAIN, SPARING, largest=max(sizes)),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
    st.integers(0, 10**6),
)
knobs = st.fixed_dictionaries(
    {
        "zero_stage": st.integers(0, 3),
        "gradient_accumulation_steps": st.sampled_from([1, 2]),
        "activation_checkpointing": st.booleans(),
        "reduce_bucket_size": st.sampled_from([10, 10**4, 10**9]),
        "sub_group_size": st.sampled_from([10, 10**4, 10**9]),
        "contiguous_gradients": st.booleans(),
        "overlap_comm": st.booleans(),
        "offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
        "offload_param": st.sampled_from(["none", "cpu"]),
    }
)


@given(traces, knobs, st.sampled_from([1, 2, 8]), st.sampled_from(["bf16", "fp32"]))
def test_no_part_is_negative_and_a_candidate_is_billed_alike_among_others(
    trace: Trace, one: dict, ranks: int, precision: str
) -> None:
    job = make_job(ranks, precision=precision)
    candidates = [make_candidate(0), Candidate.of(one), make_candidate(3)]
    together = estimate_memory(job, trace, columns_of(candidates, job))
    alone = estimate_memory(job, trace, columns_of(candidates[1:2], job))
    assert peaks_of(together)[:, 1].tolist() == peaks_of(alone)[:, 0].tolist()
    assert together.terms["host"][1] == alone.terms["host"][0]
    assert min(size.min() for size in together.terms.values()) >= 0


@given(traces, knobs, st.sampled_from([2, 8]))
def test_more_sequences_and_fewer_ranks_never_take_less(trace: Trace, one: dict, ranks: int) -> None:
    job = make_job(ranks, precision="bf16")
    few, many = (Candidate.of({**one, "train_micro_batch_size_per_gpu": size}) for size in (1, 4))
    both = estimate_memory(job, trace, columns_of([few, many], job))
    assert (peaks_of(both)[:, 1] >= peaks_of(both)[:, 0]).all()
    halved = estimate_memory(dataclasses.replace(job, ranks=ranks // 2), trace, columns_of([few, many], job))
    assert (halved.resident() >= both.resident()).all()
