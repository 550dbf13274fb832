"""The table of knobs: what each needs, what it changes, and what becomes of one that a job cannot have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.predict.features import installed_deepspeed
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.problem.knobs import KNOBS, ZERO, RequirementInputs, lossy_of, refusal, short_name
from autotune.problem.space import fitted, load_space, parse_space, shipped_spaces, unmet
from autotune.util import inquiry
from tests.conftest import make_job

ONE, TWO_NODES = named_hardware("a100-80", 8), named_hardware("a100-80", 16, nodes=2)
CPU, ALONE = detect("cpu", 2), named_hardware("a100-80", 1)
RATIO = ZERO + "offload_optimizer.ratio"
HPZ = ZERO + "zero_hpz_partition_size"


def job_on(hardware: Hardware, **changes: Any) -> Any:
    return make_job(hardware.count, **{"precision": "bf16", "model": "llama-3.2-1b", **changes})


def written(space: str, hardware: Hardware = ONE, **changes: Any) -> Any:
    return fitted(parse_space(space), job_on(hardware, **changes), hardware)


# -- against the installed DeepSpeed -------------------------------------------------------------------------------------


def leaves(model: Any, prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{field.alias or name}"


def keys_of_deepspeed() -> set[str]:
    """Dotted paths of its config classes."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    return {
        *leaves(DeepSpeedZeroConfig, ZERO),
        *leaves(DeepSpeedZeroOffloadOptimizerConfig, f"{ZERO}offload_optimizer."),
        *leaves(DeepSpeedZeroOffloadParamConfig, f"{ZERO}offload_param."),
        *leaves(ZenFlowConfig, f"{ZERO}zenflow."),
        *leaves(DeepSpeedBF16Config, "bf16."),
        *leaves(DeepSpeedFP16Config, "fp16."),
        *leaves(CompileConfig, "compile."),
    }


def test_knobs_are_known_to_the_installed_deepspeed_as_their_versions_say() -> None:
    theirs, own = keys_of_deepspeed(), installed_deepspeed()
    sections = tuple({f"{path.rpartition('.')[0]}." for path in theirs})
    checked = 0
    for name, knob in KNOBS.items():
        if knob.path and knob.path.startswith(sections):
            assert (knob.path in theirs) == (knob.since <= own), name
            checked += 1
    assert checked > 40


def test_what_changes_nothing_is_deepspeeds_default() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    for name, knob in KNOBS.items():
        leaf = name.removeprefix(ZERO)
        if knob.off is not None and leaf in fields:
            assert fields[leaf] == knob.off, name


def test_every_knob_says_where_it_is_read_and_names_are_unique() -> None:
    assert len({knob.short for knob in KNOBS.values() if knob.short}) == sum(bool(k.short) for k in KNOBS.values())
    for name, knob in KNOBS.items():
        assert knob.read.where, name
        assert short_name(knob.path or name) == name
        assert knob.read.of is None or list(KNOBS).index(knob.read.of) < list(KNOBS).index(name), "read after it"


# -- names ---------------------------------------------------------------------------------------------------------------


# -- what is read, and what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"bf16.bf16_master_weights_and_grads": True, "zero_stage": 2}, "bf16.bf16_optimizer_states"),
        ({"bf16.bf16_master_weights_and_grads": True, "zero_stage": 2, "offload_optimizer": "cpu"}, ""),
        ({"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True, "zero_stage": 2}, ""),
        ({RATIO: 0.5, ZERO + "offload_optimizer.super_offload": True}, "super_offload"),
        ({"zero_stage": 1, ZERO + "compute_grad_norm": False, "data_types.grad_accum_dtype": "fp32"}, "32-bit"),
        ({"zero_stage": 2, ZERO + "compute_grad_norm": False, "data_types.grad_accum_dtype": "fp32"}, ""),
        ({"compile.offload_opt_states": True, "offload_optimizer": "cpu"}, "offload_optimizer"),
    ],
)
def test_what_deepspeed_refuses_together_is_no_candidate(knobs: dict[str, Any], why: str) -> None:
    assert why in refusal(knobs)
    assert bool(refusal(knobs)) == bool(why)


def test_refused_settings_are_not_in_a_space() -> None:
    text = (
        "{lossy: true, knobs: {zero_stage: [2], offload_optimizer: [none, cpu], bf16_master_weights_and_grads: [true]}}"
    )
    assert [one["offload_optimizer"] for one in parse_space(text).families()] == ["cpu"]
    with pytest.raises(UserError, match=r"refuses every setting.*bf16_optimizer_states"):
        parse_space("{lossy: true, knobs: {zero_stage: [2], bf16_master_weights_and_grads: [true]}}")


def test_a_knob_is_decided_after_what_it_depends_on_however_it_is_written() -> None:
    space = parse_space("{knobs: {zero_stage: [3], compile.deepcompile: [false, true], compile: [false, true]}}")
    found = [(one["compile"], one.get("compile.deepcompile")) for one in space.families()]
    assert found == [(False, None), (True, False), (True, True)]


# -- conditions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value", "hardware", "changes", "why"),
    [
        (HPZ, 8, ONE, {}, "more than one node"),
        (HPZ, 8, TWO_NODES, {}, ""),
        (HPZ, 3, TWO_NODES, {}, "divide the 8 ranks"),
        (HPZ, 16, TWO_NODES, {}, "divide the 8 ranks"),
        (HPZ, 1, ONE, {}, ""),
        (RATIO, 0.5, ONE, {}, ""),
        (RATIO, 0.5, ONE, {"optimizer": "lion"}, "Adam, not lion"),
        (RATIO, 1.0, ONE, {"optimizer": "lion"}, ""),
        (ZERO + "offload_optimizer.super_offload", True, CPU, {}, "CUDA"),
        (ZERO + "compute_grad_norm", False, ONE, {"base_config": {"gradient_clipping": 1.0}}, "gradient_clipping"),
        (ZERO + "compute_grad_norm", False, ONE, {}, "gradient_clipping: 0"),  # DeepSpeed's own is 1
        (
            ZERO + "compute_grad_norm",
            False,
            ONE,
            {"base_config": {"gradient_clipping": "auto"}},
            "gradient_clipping: 0",
        ),
        (ZERO + "compute_grad_norm", False, ONE, {"base_config": {"gradient_clipping": 0.0}}, ""),
        ("bf16.bf16_master_weights_and_grads", True, ONE, {"precision": "fp16"}, "bf16, not fp16"),
        ("communication_data_type", "bf16", ONE, {"precision": "fp32"}, "losses may differ"),
        ("communication_data_type", "fp32", ONE, {}, ""),
        (ZERO + "round_robin_gradients", True, named_hardware("a100-80", 1), {}, "more than one rank"),
    ],
)
def test_what_a_setting_needs(knob: str, value: Any, hardware: Hardware, changes: dict[str, Any], why: str) -> None:
    around = RequirementInputs.of(job_on(hardware, **changes), hardware)
    said = unmet(knob, value, around)
    assert why in said
    assert bool(said) == bool(why)


def test_what_a_job_cannot_have_is_left_out_and_said() -> None:
    left, notes = written("{knobs: {zero_stage: [3], zero_hpz_partition_size: [1, 2, 4]}}")
    assert HPZ not in left.knobs
    assert notes == [f"{HPZ} 2, {HPZ} 4 needs more than one node: left out"]
    some, notes = written("{knobs: {zero_stage: [3], zero_hpz_partition_size: [1, 3, 4]}}", TWO_NODES)
    assert some.knobs[HPZ].values == (1, 4)
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("text", "hardware", "why"),
    [
        ("{fixed: {zero_stage: 3, zero_hpz_partition_size: 8}}", ONE, "needs more than one node; leave it out"),
        (
            "{lossy: true, fixed: {zero_stage: 3, offload_optimizer.ratio: 0.5}}",
            ONE,
            "needs stage 3 with offload_optimizer cpu",
        ),
        ("{fixed: {zero_stage: 3, compile: true, compile.deepcompile: true}}", CPU, "CUDA"),
        ("{fixed: {zero_stage: 3, compile.deepcompile: true}}", ONE, "it needs stages 1 to 3 with compile true"),
    ],
)
def test_what_is_fixed_by_hand_is_refused(text: str, hardware: Hardware, why: str) -> None:
    with pytest.raises(UserError) as caught:
        written(text, hardware)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_the_users_own_config_only_what_deepspeed_fails_with_is_refused() -> None:
    superoffload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}
    with pytest.raises(UserError, match=r"your own DeepSpeed config.*is for CUDA alone"):
        written("{knobs: {zero_stage: [3]}}", CPU, base_config=superoffload)
    ignored = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, "compile": {"deepcompile": True}}
    assert written("{knobs: {zero_stage: [3]}}", base_config=ignored).notes == []
    alone = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "communication_data_type": "fp32"}
    assert written("{knobs: {zero_stage: [2]}}", ALONE, base_config=alone).notes == []


@pytest.mark.parametrize(
    "text",
    [
        "{fixed: {zero_stage: 2, offload_optimizer: cpu, contiguous_gradients: true}}",
        "{fixed: {offload_param: none}, knobs: {zero_stage: [1, 2]}}",
        "{fixed: {stage3_prefetch_bucket_size: 1000000}, knobs: {zero_stage: [1, 2]}}",
    ],
)
def test_what_a_stage_ignores_may_stand_in_a_space(text: str) -> None:
    left, (note,) = written(text)
    assert "left out" in note
    assert left.candidates(make_job())


def test_a_value_that_another_knob_refers_to_stays() -> None:
    text = "{knobs: {zero_stage: [2], round_robin_gradients: [false, true], "
    text += "overlap_comm: {values: [true, false], when: {round_robin_gradients: [false]}}}}"
    left, _ = written(text, ALONE)
    assert left.knobs["zero_optimization.round_robin_gradients"].values == (False,)
    assert left.knobs["overlap_comm"].values == (True, False)


def test_a_second_partition_of_nothing_is_refused() -> None:
    some, _ = written("{knobs: {zero_stage: [3], zero_hpz_partition_size: [0, 1, 4]}}", TWO_NODES)
    assert some.knobs[HPZ].values == (1, 4)


def test_a_study_is_read_where_other_packages_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "has", lambda name: False)
    space = parse_space("{fixed: {attention: flash_attention_2}, knobs: {zero_stage: [2]}}")
    with pytest.raises(UserError, match="flash_attn"):
        fitted(space, make_job(), ONE)
    assert fitted(space, make_job(), ONE, here=False).space.knobs["attention"].values == ("flash_attention_2",)


# -- versions ------------------------------------------------------------------------------------------------------------


def test_a_knob_of_another_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inquiry.version
    monkeypatch.setattr(inquiry, "version", lambda name: "0.18.2" if name == "deepspeed" else before(name))
    text = "{knobs: {zero_stage: [2], parameter_alignment: [true, false]}}"
    with pytest.raises(UserError, match=r"is not known to deepspeed 0\.18\.2: 0\.19\.7 or newer knows it"):
        written(text)
    shipped = dataclasses.replace(parse_space(text), shipped=True)  # written for every DeepSpeed
    left, notes = fitted(shipped, job_on(ONE), ONE)
    assert list(left.knobs) == ["zero_stage"]
    assert "0.19.7 or newer" in notes[0]


# -- knobs that change arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.lossy])
def test_a_lossy_knob_needs_a_space_that_says_so(name: str) -> None:
    knob = KNOBS[name]
    value = {bool: "true", float: "0.5"}.get(knob.kind, "fp32")  # type: ignore[arg-type]
    text = f"knobs: {{zero_stage: [3], offload_optimizer: [cpu], bf16_master_weights_and_grads: [false], {name}: [{value}]}}"
    text = text.replace("bf16_master_weights_and_grads: [false], bf16.bf16_master", "bf16.bf16_master")
    if name == "bf16.bf16_optimizer_states":
        text = text.replace("and_grads: [false]", "and_grads: [true]")
    with pytest.raises(UserError) as caught:
        parse_space(text, "mine.yaml")
    assert "mine.yaml:1" in str(caught.value)
    assert "losses may differ" in str(caught.value)
    assert parse_space(f"lossy: true\n{text}").lossy


def test_the_mark_is_true_or_false() -> None:
    with pytest.raises(UserError, match="lossy: expected true or false, found yes please"):
        parse_space("{lossy: yes please, knobs: {zero_stage: [1]}}")


def test_only_the_lossy_space_that_is_shipped_has_lossy_knobs() -> None:
    for name in shipped_spaces():
        space = load_space(name)
        has = any(KNOBS[knob].lossy for knob in space.knobs if knob in KNOBS)
        assert (has, space.lossy) == ((True, True) if name == "lossy" else (False, False)), name


def test_what_changes_arithmetic_is_named() -> None:
    knobs = {"bf16.bf16_optimizer_states": True, ZERO + "zero_quantized_weights": False, "zero_stage": 3}
    assert lossy_of(knobs, "bf16") == {"bf16.bf16_optimizer_states": "the optimizer's states are kept in bf16"}
    sums = {"data_types.grad_accum_dtype": "fp32"}
    assert lossy_of(sums, "bf16")
    assert lossy_of(sums, "fp32") == {}


# -- large spaces --------------------------------------------------------------------------------------------------------


def test_of_second_order_knobs_only_so_many_leave_their_first_values() -> None:
    text = "knobs: {zero_stage: [1, 2], activation_checkpointing: [false, true], overlap_comm: [true, false], "
    text += "reduce_bucket_size: [500, 50], allgather_bucket_size: [500, 50, 5]}"
    at_once = {most: sum(1 for _ in parse_space(f"at_once: {most}\n{text}").families()) for most in (0, 1, 2, 3)}
    assert at_once == {0: 4, 1: 4 * 5, 2: 4 * 10, 3: 4 * 12}
    assert sum(1 for _ in parse_space(text).families()) == 4 * 12


@pytest.mark.parametrize("typed", ["-1", "two", "1.5"])
def test_how_many_at_once_is_a_number(typed: str) -> None:
    with pytest.raises(UserError, match="at_once: expected "):
        parse_space(f"{{at_once: {typed}, knobs: {{zero_stage: [1]}}}}")


@pytest.mark.few(8)
@pytest.mark.parametrize("name", shipped_spaces())
@pytest.mark.parametrize("hardware", [ONE, TWO_NODES, CPU], ids=["node", "nodes", "cpu"])
def test_shipped_spaces_are_of_use_and_of_a_size(name: str, hardware: Hardware) -> None:
    job = job_on(hardware, global_batch_size=64)
    candidates = fitted(load_space(name), job, hardware).space.candidates(job)
    assert 0 < len(candidates) < 25_000
    assert all(Candidate.of(one.as_dict) == one for one in candidates[:: max(1, len(candidates) // 200)])


# -- configs -------------------------------------------------------------------------------------------------------------


def test_what_a_stage_refuses_is_not_in_its_config() -> None:
    own = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.4}, "compute_grad_norm": False}}
    job = job_on(ONE, base_config=own)
    two = Candidate.of({"zero_stage": 2, "offload_optimizer": "cpu"}).ds_config(job)["zero_optimization"]
    three = Candidate.of({"zero_stage": 3, "offload_optimizer": "cpu"}).ds_config(job)["zero_optimization"]
    assert two["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert three["offload_optimizer"]["ratio"] == 0.4
    assert (two["compute_grad_norm"], "compute_grad_norm" in three) == (False, False)


def test_a_ratio_is_written_where_deepspeed_reads_it() -> None:
    knobs = {"zero_stage": 3, "offload_optimizer": "cpu", RATIO: 0.3}
    config = Candidate.of(knobs).ds_config(job_on(ONE))
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 0.3, "pin_memory": True}
