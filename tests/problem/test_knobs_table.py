"""What the table of knobs says of each: in words, as it is read, and when it is refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from autotune.problem import knobs
from autotune.problem.knobs import KNOBS, ZERO, facts, refusal
from tests.conftest import made_anew

RATIO, SUPER_OFFLOAD = ZERO + "offload_optimizer.ratio", ZERO + "offload_optimizer.super_offload"
STATES, ACTIVATIONS = "compile.offload_opt_states", "compile.offload_activation"
STAGES = range(4)
BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Of a knob that another one depends on: what it may be.
VALUES = {"offload_optimizer": ("none", "cpu", "nvme"), "offload_param": ("none", "cpu", "nvme")}
SWITCHES = (True, False, "fp32", "bf16")


@pytest.fixture
def made() -> Any:
    return made_anew(knobs)


def stages_in(words: str) -> set[int]:
    """Of `stage 3`, `stages 1 and 2`, `stages 1 to 3`; all of them where there is none."""
    if not words:
        return set(STAGES)
    if one := re.fullmatch(r"stage (\d)", words):
        return {int(one[1])}
    two = re.fullmatch(r"stages (\d) (and|to) (\d)", words)
    assert two, words
    low, high = int(two[1]), int(two[3])
    assert (high == low + 1) if two[2] == "and" else (high > low + 1), words
    assert low > 0, "all stages need no words"
    return set(range(low, high + 1))


def test_a_knob_is_read_where_its_words_say(made: Any) -> None:
    """`autotune spaces` and every refusal print these words."""
    form = re.compile(
        r"(?P<stages>stages? \d(?: (?:and|to) \d)?)?(?: with )?(?:(?P<other>\S+) (?P<values>\S+(?: or \S+)*))?"
    )
    checked = 0
    for name, knob in made.KNOBS.items():
        if knob.read.where == "everywhere" or "contiguous" in name or "zenflow" in name:
            continue  # those are looked at below
        said = form.fullmatch(knob.read.where)
        assert said, knob.read.where
        stages, other = stages_in(said["stages"] or ""), said["other"]
        allowed = said["values"].split(" or ") if other else []
        assert other is None or set(allowed) <= {str(value).lower() for value in VALUES.get(other, SWITCHES)}
        assert knob.read.of == (None if other in VALUES else other), "it is drawn after what it depends on"
        for stage, value in itertools.product(STAGES, VALUES.get(other, SWITCHES)):
            setting = {"zero_stage": stage, **({other: value} if other else {})}
            expected = stage in stages and (not other or str(value).lower() in allowed)
            assert knob.read.holds(setting) == expected, (name, knob.read.where, setting)
            checked += 1
    assert checked > 300


def test_every_knob_is_in_the_table_under_its_path_with_what_it_was_given(made: Any) -> None:
    assert list(made.KNOBS) == list(KNOBS)
    for name, knob in made.KNOBS.items():
        assert name in made.SHORT_NAMED or knob.path == name
        if "stage3_" in name:
            assert (knob.read.where, knob.read.holds({"zero_stage": 2})) == ("stage 3", False)
    everywhere = {name for name, knob in made.KNOBS.items() if knob.read.where == "everywhere"}
    own = {name for name, knob in made.KNOBS.items() if knob.path is None}
    assert everywhere == own | {*BATCH, "zero_stage", "communication_data_type"}
    gather = made.KNOBS[ZERO + "stage3_allgather_sequential"]
    assert (gather.kind, gather.off, gather.since) == (bool, False, (0, 18, 5))


@pytest.mark.parametrize(
    ("name", "knobs", "read"),
    [
        # what others decide where they are not said: nothing is offloaded, nothing is switched on, a job may compile
        (ZERO + "offload_optimizer.pin_memory", {"zero_stage": 2}, False),
        ("bf16.bf16_optimizer_states", {"bf16.bf16_master_weights_and_grads": True}, True),
        ("contiguous_gradients", {"zero_stage": 0}, False),
        ("contiguous_gradients", {"zero_stage": 1}, True),
        ("contiguous_gradients", {"zero_stage": 2, "offload_optimizer": "cpu"}, False),
        ("contiguous_gradients", {"zero_stage": 3, "offload_optimizer": "cpu"}, True),
        (ZERO + "zenflow.overlap_step", {"zero_stage": 2}, False),
        (ZERO + "zenflow.overlap_step", {ZERO + "zenflow.topk_ratio": 0.1}, True),
        # keys of a user's own config that are no knobs
        (ZERO + "stage3_gather_16bit_weights_on_model_save", {"zero_stage": 2}, False),
        (ZERO + "stage3_gather_16bit_weights_on_model_save", {"zero_stage": 3}, True),
        (ZERO + "load_from_fp32_weights", {"zero_stage": 0}, False),
        (ZERO + "load_from_fp32_weights", {"zero_stage": 1}, True),
        (ZERO + "offload_optimizer.buffer_count", {"zero_stage": 2}, False),
        (ZERO + "offload_optimizer.buffer_count", {"zero_stage": 2, "offload_optimizer": "cpu"}, True),
        (ZERO + "offload_param.buffer_count", {"zero_stage": 2, "offload_param": "cpu"}, False),
        (ZERO + "offload_param.buffer_count", {"zero_stage": 3, "offload_param": "cpu"}, True),
        (ZERO + "offload_param.buffer_count", {"zero_stage": 3}, False),
        ("wall_clock_breakdown", {"zero_stage": 0}, True),
    ],
)
def test_what_is_read_under_others(made: Any, name: str, knobs: dict[str, Any], read: bool) -> None:
    assert made.is_read(name, knobs) is read


NO_NORM, SUMS = {ZERO + "compute_grad_norm": False}, {"data_types.grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({STATES: True}, ""),
        ({STATES: False, "offload_optimizer": "cpu"}, ""),
        ({STATES: True, "offload_optimizer": "none"}, ""),
        ({STATES: True, "offload_optimizer": "cpu"}, f"{STATES} cannot be combined with offload_optimizer"),
        ({STATES: True, ACTIVATIONS: False}, ""),
        ({STATES: False, ACTIVATIONS: True}, ""),
        ({STATES: True, ACTIVATIONS: True}, f"{STATES} cannot be combined with {ACTIVATIONS}"),
        ({SUPER_OFFLOAD: True}, ""),
        ({SUPER_OFFLOAD: True, RATIO: 1.0}, ""),
        ({SUPER_OFFLOAD: True, RATIO: 0.99}, "a ratio below 1 is not for super_offload"),
        ({"zero_stage": 1, **NO_NORM, **SUMS}, "compute_grad_norm: false is not for stage 1 with 32-bit sums"),
        ({"zero_stage": 1, **NO_NORM}, ""),
        ({"zero_stage": 1, ZERO + "compute_grad_norm": True, **SUMS}, ""),
    ],
)
def test_settings_that_deepspeed_refuses_and_their_neighbours(setting: dict[str, Any], why: str) -> None:
    assert refusal(setting) == why


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "train_micro_batch_size_per_gpu",
            {"values": "whole number", "read at": "everywhere", "in the config": "train_micro_batch_size_per_gpu"},
        ),
        (
            "liger_kernel",
            {
                "values": "true or false",
                "read at": "everywhere",
                "changes nothing at": "false",
                "needs": "CUDA devices, a task with a language-model head, the package liger_kernel",
                "in the config": "nowhere: it is of the model or the environment",
            },
        ),
        (
            ZERO + "zenflow.topk_ratio",
            {
                "values": "0 to 1",
                "read at": "stages 1 to 3 with offload_optimizer cpu",
                "needs": "CUDA devices, DeepSpeed's Adam, a training script",
                "since deepspeed": "0.17.5",
                "changes what is computed": "most of a gradient is applied later than the step that made it",
                "in the config": ZERO + "zenflow.topk_ratio",
            },
        ),
    ],
)
def test_what_autotune_spaces_says_of_a_knob(name: str, told: dict[str, str]) -> None:
    assert facts(KNOBS[name]) == told


def test_every_requirement_is_named_for_people() -> None:
    needs = {need for knob in KNOBS.values() for need in knob.needs}
    for need in needs:
        assert re.fullmatch(r"Require [^,]+\.", (need.__doc__ or "").splitlines()[0]), need.__name__
