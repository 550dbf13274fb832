"""What is not known of DeepSpeed: keys, versions, and the defaults that are carried here against its own."""

from typing import Any

import pytest

from autotune.predict import zero_memory
from autotune.predict.features import PINS_BY_DEFAULT, installed_deepspeed
from autotune.predict.trace import traced_predictor
from autotune.predict.zero_memory import unread_keys, unread_knobs
from autotune.problem.candidate import ZERO_DEFAULTS
from autotune.problem.hardware import named_hardware
from autotune.problem.knobs import READ
from tests.conftest import make_candidate, make_job

ZERO = "zero_optimization."


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, []),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "zero_hpz_partition_size": 1}}, []),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, [ZERO + "zero_hpz_partition_size"]),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, [ZERO + "zenflow"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, [ZERO + "zero_quantized_weights"]),
        ({"zero_optimization": {"zero_quantized_weights": False}}, []),
        (
            {"zero_optimization": {"mics_shard_size": 4, "of_tomorrow": "yes"}},
            [ZERO + "mics_shard_size", ZERO + "of_tomorrow"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3, "super_offload": True}}},
            [ZERO + "offload_optimizer.ratio", ZERO + "offload_optimizer.super_offload"],
        ),
        ({"torch_autocast": {"enabled": True}}, ["torch_autocast"]),
        ({"compile": {"deepcompile": False}, "tensor_parallel": {}}, []),
        ({"zero_optimization": "auto"}, []),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False}},
            ["activation_checkpointing.cpu_checkpointing"],
        ),
        ({"fp8": {"enabled": True}}, ["fp8"]),
    ],
)
def test_keys_that_no_formula_reads(config: dict[str, Any], found: list[str]) -> None:
    assert unread_keys(config) == found


def test_keys_of_candidates() -> None:
    assert unread_knobs(make_candidate(3)) == []
    assert unread_knobs(make_candidate(3, **{ZERO + "stage3_prefetch_bucket_size": 10})) == []
    assert unread_knobs(make_candidate(3, **{ZERO + "zero_quantized_weights": True})) == [
        ZERO + "zero_quantized_weights"
    ]


def test_where_such_a_key_is_set_states_are_less_certain() -> None:
    hardware = named_hardware("rtx4090", 2)
    knobs = {ZERO + "zero_quantized_weights": True}
    plain, own = make_candidate(3, 1), make_candidate(3, 1, **knobs)
    base = {"zero_optimization": {"zero_quantized_weights": True}}
    known = traced_predictor(make_job(model="llama-3.2-1b", precision="bf16"), hardware)
    unknown = traced_predictor(make_job(model="llama-3.2-1b", precision="bf16", base_config=base), hardware)
    by_candidate, by_base = known.table([plain, own]), unknown.table([plain])
    assert by_candidate.peak_sigma[1] > 1.2 * by_candidate.peak_sigma[0]
    assert by_base.peak_sigma[0] > 1.2 * by_candidate.peak_sigma[0]
    sigmas = [float(one.step_sigma(one.prepare([plain]))[0]) for one in (known, unknown)]
    assert sigmas[1] > 1.3 * sigmas[0]
    assert known.notes() == []
    assert unknown.notes() == ["zero_optimization.zero_quantized_weights is not modelled: intervals are wider"]


def test_an_unknown_optimizer_is_uncertain_too() -> None:
    job = make_job(precision="bf16", base_config={"optimizer": {"type": "Shampoo"}})
    assert traced_predictor(job, named_hardware("rtx4090", 2)).notes() == [
        "optimizer shampoo is not modelled: intervals are wider"
    ]


# -- against the installed DeepSpeed -------------------------------------------------------------------------------------


def fields(model: Any) -> dict[str, Any]:
    """Names as they are written in a config, with their defaults."""
    return {field.alias or name: field.default for name, field in model.model_fields.items()}


def test_defaults_that_are_carried_are_deepspeeds_own() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    its = fields(DeepSpeedZeroConfig)
    for name, value in ZERO_DEFAULTS.items():
        assert float(its[name.removeprefix(ZERO)]) == value, name
    for stage, expected in ((0, False), (1, False), (2, False), (3, True)):
        assert DeepSpeedZeroConfig(stage=stage).overlap_comm is expected


def test_offloading_pins_and_moves_all_unless_told_otherwise() -> None:
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    optimizer, parameters = fields(DeepSpeedZeroOffloadOptimizerConfig), fields(DeepSpeedZeroOffloadParamConfig)
    pins = installed_deepspeed() >= PINS_BY_DEFAULT
    assert (optimizer["pin_memory"], optimizer["ratio"], parameters["pin_memory"]) == (pins, 1.0, pins)
    assert {*optimizer, *parameters} - zero_memory._MODELLED_OFFLOAD_KEYS <= {
        "ratio",
        "super_offload",
        "cpuadam_cores_perc",
    }


# Known, and in no formula: what they change was not worked out.
UNREAD = {
    "zenflow",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zero_hpz_partition_size",
    "round_robin_gradients",
    "leaf_module",
    "legacy_stage1",
    "save_muon_momentum_buffer_in_memory",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
}


GONE = {"mics_shard_size", "mics_hierarchical_params_gather"}  # from newer ones; not in _MODELLED_KEYS, so unread, too


def test_every_key_of_zero_is_either_read_or_known_to_be_unread() -> None:
    """A new one of a newer DeepSpeed has to be sorted here."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    its = set(fields(DeepSpeedZeroConfig))
    if installed_deepspeed() >= READ:
        assert its - zero_memory._MODELLED_KEYS == UNREAD
        assert zero_memory._MODELLED_KEYS - its == set()
    assert its - zero_memory._MODELLED_KEYS <= UNREAD | GONE


def test_dtypes_are_written_as_deepspeed_writes_them() -> None:
    from deepspeed.runtime.config import DtypeEnum

    from autotune.predict.features import _WIDTHS

    names = {
        name.removeprefix("torch."): one.value.itemsize
        for one in DtypeEnum
        for name in one._all_values
        if isinstance(name, str) and one.name != "int8"
    }
    assert names == _WIDTHS
