from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.problem.candidate import is_read
from autotune.problem.space_file import load_space, parse_space, shipped_spaces
from tests.conftest import make_job


def test_the_promised_spaces_are_shipped_and_valid() -> None:
    assert set(shipped_spaces()) == {"default", "zero2", "zero3", "low_memory", "nvme", "cpu_demo"}
    for name in shipped_spaces():
        space = load_space(name)
        found = space.candidates(make_job())
        assert len(set(found)) == len(found) > 50
        assert all(is_read(knob, one.as_dict) for one in found for knob in one.as_dict)
        assert space.about


def test_default_holds_every_knob_the_issue_names() -> None:
    knobs = load_space("default").knobs
    for name in (
        "zero_stage",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "contiguous_gradients",
        "overlap_comm",
        "offload_optimizer",
        "offload_param",
        "activation_checkpointing",
    ):
        assert name in knobs


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        ("- a\n", 1, "expected `knobs:`"),
        ("knobs:\n  zero_stag: [1]\n", 2, "unknown knob; did you mean zero_stage"),
        ("knobs:\n  zero_stage: [1, 4]\n", 2, "out of range"),
        ("knobs:\n  zero_stage: [one]\n", 2, "whole number"),
        ("knobs:\n  zero_stage: []\n", 2, "no values"),
        ("knobs:\n  zero_stage: [1, 1]\n", 2, "twice"),
        ("knobs:\n  zero_stage: [1]\n  zero_stage: [2]\n", 3, "given twice"),
        ("knobs:\n  zero_stage: [1]\n  zero_optimization.stage: [2]\n", 3, "given twice"),
        ("knobs:\n  overlap_comm: [1]\n", 2, "true or false"),
        ("knobs:\n  offload_param: [gpu]\n", 2, "none, cpu, nvme"),
        ("knobs:\n  reduce_bucket_size: {from: 5, to: 1}\n", 2, "upside down"),
        ("knobs:\n  reduce_bucket_size: {from: 1, to: 9, stride: 2}\n", 2, "unknown"),
        ("knobs:\n  reduce_bucket_size: {from: a, to: 9}\n", 2, "number"),
        ("knobs:\n  reduce_bucket_size: {from: 0, to: 9, scale: pow2}\n", 2, "pow2"),
        ("knobs:\n  reduce_bucket_size: {from: 1, to: 9, scale: cubic}\n", 2, "linear, pow2 or log"),
        ("knobs:\n  reduce_bucket_size: {from: 1, to: 9, step: 0}\n", 2, "above 0"),
        ("knobs:\n  reduce_bucket_size: {from: 1, to: 100000000}\n", 2, "too many"),
        ("knobs:\n  reduce_bucket_size: {from: 1, to: 9, scale: log, points: 1}\n", 2, "points"),
        ("knobs:\n  reduce_bucket_size: {values: [1], to: 9}\n", 2, "either"),
        ("knobs:\n  zero_optimization.stage3_max_liv: [1]\n", 2, "no such ZeRO key"),
        ("knobs:\n  flops.profile: [1]\n", 2, "no section"),
        ("knobs:\n  sub_group_size: {values: [1], when: {zero_stag: 3}}\n", 2, "no knob of this space"),
        ("knobs:\n  zero_stage: [1]\n  sub_group_size: {values: [1], when: {zero_stage: 3}}\n", 3, "never one of"),
        ("fixed:\n  zero_stage: [1]\n", 2, "one value"),
        ("knob:\n  zero_stage: [1]\n", 1, "unknown section; did you mean knobs"),
        ("knobs: [1]\n", 1, "mapping"),
        ("name: x\n", 1, "no knobs"),
        ("a: [\n", 2, "not YAML"),
    ],
)
def test_errors_name_file_line_and_key(text: str, line: int, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_space(text, "my.yaml")
    message = str(caught.value)
    assert message.startswith(f"my.yaml:{line}:"), message
    assert words in message
    assert "\n" not in message


def test_conditions_ranges_and_any_deepspeed_key() -> None:
    space = parse_space(
        """
knobs:
  zero_stage: [1, 3]
  reduce_bucket_size: {from: 1000, to: 1000000, scale: log, points: 4}
  zero_optimization.stage3_prefetch_bucket_size: {values: [10, 20], when: {zero_stage: [3]}}
  gradient_clipping: [0.5, 1.0]
fixed:
  zero_optimization.round_robin_gradients: true
"""
    )
    assert space.knobs["reduce_bucket_size"].values == (1000, 10_000, 100_000, 1_000_000)
    found = space.candidates(make_job())
    assert len(found) == 4 * 2 * (1 + 2)
    config = next(c for c in found if c.stage == 1).ds_config(make_job())
    assert config["zero_optimization"]["round_robin_gradients"] is True
    assert config["gradient_clipping"] in (0.5, 1.0)
    assert "stage3_prefetch_bucket_size" not in config["zero_optimization"]


@given(batch=st.integers(1, 500), ranks=st.integers(1, 8))
def test_only_exact_factorisations_meet_a_global_batch(batch: int, ranks: int) -> None:
    space = load_space("default")
    try:
        job = make_job(ranks, global_batch_size=batch)
        pairs = space.rungs(job)
    except UserError:
        assert batch % ranks
        return
    assert pairs
    assert all(micro * accumulation * ranks == batch for micro, accumulation in pairs)
    assert len(set(pairs)) == len(pairs)


def test_a_global_batch_that_nothing_meets() -> None:
    space = parse_space("knobs:\n  train_micro_batch_size_per_gpu: [4, 8]\n")
    with pytest.raises(UserError, match="cannot be made from"):
        space.candidates(make_job(global_batch_size=14))


def test_files_and_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean zero2"):
        load_space("zero22")
    (tmp_path / "my.yaml").write_text("knobs:\n  zero_stage: [1]\n")
    assert load_space(str(tmp_path / "my.yaml")).name == "my"
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_space(str(tmp_path / "bytes.yaml"))


range_keys = st.sampled_from(["from", "to", "values", "when", "step", "scale", "x"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**10) | st.floats(allow_nan=True) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(range_keys, inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["knobs", "fixed", "name", "x"]),
        st.dictionaries(
            st.sampled_from(["zero_stage", "overlap_comm", "reduce_bucket_size", "offload_param", "bf16.enabled", "y"]),
            values,
        ),
        max_size=3,
    )
)
def test_any_document_is_a_space_or_a_user_error(document: dict) -> None:
    try:
        parse_space(yaml.safe_dump(document), "f")
    except UserError as error:
        assert str(error).startswith("f")


@given(st.text(max_size=60))
def test_any_text_is_a_space_or_a_user_error(text: str) -> None:
    try:
        parse_space(text, "f")
    except UserError as error:
        assert str(error).startswith("f")


def test_adapters_are_a_knob() -> None:
    space = parse_space(
        "knobs: {zero_stage: [1], lora: [none, 8, 'targets=q_proj+v_proj,r=16'], packing: [true, false]}"
    )
    assert space.knobs["lora"].values == ("none", "r=8", "r=16,targets=q_proj+v_proj")
    wrong = {"fast": "expected r=16", "0": "between 1 and 4096", "true": "found True", "1.5": "found 1.5"}
    for value, message in wrong.items():
        with pytest.raises(UserError, match=f"f:1: lora: .*{message}"):
            parse_space(f"knobs: {{lora: [{value}]}}", "f")
    with pytest.raises(UserError, match="names a value twice"):
        parse_space("knobs: {lora: [8, r=8]}")
