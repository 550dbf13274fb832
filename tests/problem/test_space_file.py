"""A search space as text: what its values mean, and which file, line and key an error names."""

from pathlib import Path

import pytest
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.problem import space as space_file
from autotune.problem.candidate import is_read
from autotune.problem.space import load_space, parse_space, shipped_spaces
from tests.conftest import make_job


def values(text: str) -> tuple[object, ...]:
    """Of the only knob of a space."""
    (domain,) = parse_space(f"knobs: {{{text}}}").knobs.values()
    return domain.values


def test_the_promised_spaces_are_shipped_and_valid() -> None:
    assert list(shipped_spaces()) == [
        "classic",
        "cpu_demo",
        "default",
        "full",
        "lossy",
        "low_memory",
        "nvme",
        "zero2",
        "zero3",
    ]
    for name, path in shipped_spaces().items():
        space = load_space(name)
        assert (space.name, space.text) == (name, path.read_text())
        assert space.about


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: the file is empty; expected `knobs:` and their values"),
        ("- a\n", ":1: expected `knobs:` and their values, found list"),
        ("5", ":1: expected `knobs:` and their values, found int"),
        (
            "knobs:\n  zero_stag: [1]\n",
            ":2: zero_stag: unknown knob; did you mean zero_stage or zero_optimization?; other DeepSpeed keys are dotted",
        ),
        ("knobs:\n  zero_stage: [1, 4]\n", ":2: zero_stage: 4 is out of range: expected 0 to 3"),
        ("knobs:\n  zero_stage: [-1]\n", ":2: zero_stage: -1 is out of range: expected 0 to 3"),
        ("knobs:\n  reduce_bucket_size: [0]\n", ":2: reduce_bucket_size: 0 is out of range: expected at least 1"),
        ("knobs:\n  zero_stage: [one]\n", ":2: zero_stage: expected a whole number, found 'one'"),
        ("knobs:\n  zero_stage: [1e999]\n", ":2: zero_stage: expected a whole number, found '1e999'"),
        ("knobs:\n  zero_stage: [true]\n", ":2: zero_stage: expected a whole number, found True"),
        ("knobs:\n  zero_stage: [1.5]\n", ":2: zero_stage: expected a whole number, found 1.5"),
        ("knobs:\n  zero_stage: []\n", ":2: zero_stage: has no values"),
        ("knobs:\n  zero_stage: [1, 1]\n", ":2: zero_stage: names a value twice"),
        ("knobs:\n  zero_stage: [1]\n  zero_stage: [2]\n", ":3: zero_stage: is given twice"),
        (
            "knobs:\n  zero_stage: [1]\n  zero_optimization.stage: [2]\n",
            ":3: zero_optimization.stage: is given twice (its short name and its DeepSpeed key are one knob)",
        ),
        ("knobs:\n  overlap_comm: [1]\n", ":2: overlap_comm: expected true or false, found 1"),
        (
            "knobs:\n  offload_param: [gpu]\n",
            ":2: offload_param: expected one of none, cpu, nvme, found 'gpu'; did you mean cpu?",
        ),
        (
            "knobs:\n  offload_param: [cup]\n",
            ":2: offload_param: expected one of none, cpu, nvme, found 'cup'; did you mean cpu?",
        ),
        ("knobs:\n  reduce_bucket_size: {from: 5, to: 1}\n", ":2: reduce_bucket_size: has no values"),
        (
            "knobs:\n  reduce_bucket_size: {from: 1, to: 9, scal: 2}\n",
            ":2: reduce_bucket_size.scal: unknown; did you mean scale?; expected values, when, from, to, scale",
        ),
        (
            "knobs:\n  reduce_bucket_size:\n    from: a\n    to: 9\n",
            ":3: reduce_bucket_size.from: expected a whole number, found a",
        ),
        (
            "knobs:\n  reduce_bucket_size:\n    from: 1\n    to: true\n",
            ":4: reduce_bucket_size.to: expected a whole number, found True",
        ),
        ("knobs:\n  reduce_bucket_size: {from: 1}\n", ":2: reduce_bucket_size.to: expected a value, found {'from': 1}"),
        (
            "knobs:\n  reduce_bucket_size: {from: 1.0, to: 9, scale: pow2}\n",
            ":2: reduce_bucket_size.from: expected a whole number, found 1.0",
        ),
        (
            "knobs:\n  reduce_bucket_size:\n    from: 1\n    to: 9\n    scale: cubic\n",
            ":5: reduce_bucket_size.scale: expected 'linear' or 'pow2', found cubic",
        ),
        (
            "knobs:\n  reduce_bucket_size: {from: -.inf, to: 9}\n",
            ":2: reduce_bucket_size.from: expected a whole number, found -inf",
        ),
        (
            "knobs:\n  gradient_clipping: [.nan]\n",
            ":2: gradient_clipping: expected a number, a word or true/false, found nan",
        ),
        *(
            (
                f"knobs:\n  zero_stage: [0, 2]\n  overlap_comm: {{values: [true], when: {{zero_stage: {raw}}}}}\n",
                f":3: overlap_comm.when.zero_stage: {said}",
            )
            for raw, said in (
                ("[[2]]", "expected a whole number, found [2]"),
                ("{a: 1}", "expected a whole number, found {'a': 1}"),
                ("two", "expected a whole number, found 'two'"),
                ("9", "9 is out of range: expected 0 to 3"),
                ("true", "expected a whole number, found True"),
            )
        ),
        (
            "knobs:\n  reduce_bucket_size: {from: 1, to: 10001}\n",
            ":2: reduce_bucket_size: 10001 values are too many: list fewer, or give scale: pow2",
        ),
        (
            "knobs:\n  reduce_bucket_size: {values: [1], to: 9}\n",
            ":2: reduce_bucket_size.to: unknown; expected values, when",
        ),
        ("knobs:\n  reduce_bucket_size: {values: 1}\n", ":2: reduce_bucket_size.values: expected a list, found 1"),
        (
            "knobs:\n  zero_optimization.stage3_max_liv: [1]\n",
            ":2: zero_optimization.stage3_max_liv: DeepSpeed knows no such ZeRO key; did you mean stage3_max_live_parameters or stage3_max_reuse_distance or stage?",
        ),
        (
            "knobs:\n  flops.profile: [1]\n",
            ":2: flops.profile: a space sets no section 'flops' of DeepSpeed; did you mean flops_profiler or compile?",
        ),
        (
            "knobs:\n  gradient_cliping: [1]\n",
            ":2: gradient_cliping: unknown knob; did you mean gradient_clipping or gradient_accumulation_steps or gradient_predivide_factor?; other DeepSpeed keys are dotted",
        ),
        (
            "knobs:\n  gradient_clipping: [null]\n",
            ":2: gradient_clipping: expected a number, a word or true/false, found None",
        ),
        (
            "knobs:\n  sub_group_size:\n    values: [1]\n    when: {zero_stag: 3}\n",
            ":4: sub_group_size.when: no zero_stag of this space is one of [3]",
        ),
        (
            "knobs:\n  zero_stage: [1]\n  sub_group_size: {values: [1], when: {zero_stage: 3}}\n",
            ":3: sub_group_size.when: no zero_stage of this space is one of [3]",
        ),
        ("knobs:\n  sub_group_size: {values: [1], when: 3}\n", ":2: sub_group_size.when: expected a mapping, found 3"),
        ("fixed:\n  zero_stage: [1]\n", ":2: zero_stage: expected a whole number, found [1]"),
        (
            "fixed:\n  bf16: {enabled: true}\n",
            ":2: bf16: expected a number, a word or true/false, found {'enabled': True}",
        ),
        (
            "knob:\n  zero_stage: [1]\n",
            ":1: knob: unknown; did you mean knobs?; expected name, about, lossy, at_once, knobs, fixed, levers",
        ),
        ("knobs: [1]\n", ":1: knobs: expected a mapping, found [1]"),
        ("name: x\nknobs: [1]\n", ":2: knobs: expected a mapping, found [1]"),
        (
            "nam: x\n",
            ":1: nam: unknown; did you mean name?; expected name, about, lossy, at_once, knobs, fixed, levers",
        ),
        (
            "abuot: x\n",
            ":1: abuot: unknown; did you mean about?; expected name, about, lossy, at_once, knobs, fixed, levers",
        ),
        (
            "fixd: x\n",
            ":1: fixd: unknown; did you mean fixed?; expected name, about, lossy, at_once, knobs, fixed, levers",
        ),
        ("name: x\nfixed:\n  zero_stage: 9\n", ":3: zero_stage: 9 is out of range: expected 0 to 3"),
        (
            "knobs:\n  reduce_bucket_size: {values: [1], from: 2}\n",
            ":2: reduce_bucket_size.from: unknown; expected values, when",
        ),
        (
            "knobs:\n  reduce_bucket_size: {values: [1], scale: 2}\n",
            ":2: reduce_bucket_size.scale: unknown; did you mean values?; expected values, when",
        ),
        (
            "knobs:\n  attention: [flash_attention]\n",
            ":2: attention: expected one of eager, sdpa, flash_attention_2, flash_attention_3, flex_attention, found 'flash_attention'; did you mean flash_attention_3?",
        ),
        ("fixed: 3\n", ":1: fixed: expected a mapping, found 3"),
        ("name: x\n", ":1: knobs: the space has no knobs"),
        (
            "a: [\n",
            ":2: not YAML (expected the node content, but found '<stream end>'); expected `knobs:` and their values",
        ),
        (
            "a: \x00",
            ': not YAML (unacceptable character #x0000: special characters are not allowed in "<unicode string>", position 3); '
            "expected `knobs:` and their values",
        ),
        ("knobs: {lora: [fast]}", ":1: lora: LoRA fast: expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32"),
        ("knobs: {lora: [true]}", ":1: lora: expected none, a rank, or r=16,targets=all-linear, found True"),
        ("a: 2020-99-99\n", ": not YAML that can be read (month must be in 1..12); expected `knobs:` and their values"),
        ("&a [*a]", ":1: not YAML (an alias lies within what it names); expected `knobs:` and their values"),
        ("1: 2\n", ":1: 1: Keys should be strings, found 1"),
        ("? [1]\n: 2\n", ":1: not YAML (found unhashable key); expected `knobs:` and their values"),
    ],
)
def test_errors_name_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_space(text, "my.yaml")
    assert str(caught.value) == f"my.yaml{message}"


def test_a_text_without_a_file() -> None:
    with pytest.raises(UserError, match=r"^<space>:1: zero_stage: has no values$"):
        parse_space("knobs: {zero_stage: []}")
    assert parse_space("knobs: {zero_stage: [1]}").name == "<space>"


def test_what_a_space_says_of_itself() -> None:
    text = "name: mine\nabout: for a talk\nfixed: {zero_stage: 1}"
    space = parse_space(text, "file.yaml")
    assert (space.name, space.about, space.text) == ("mine", "for a talk", text)
    bare = parse_space("knobs: {zero_stage: [1]}", "/somewhere/file.yaml")
    assert (bare.name, bare.about) == ("file", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zero_stage: [0, 3]", (0, 3)),
        ("zero_stage: 2", (2,)),  # one value needs no list
        ("zero_optimization.stage: [1]", (1,)),
        ("overlap_comm: [true, false]", (True, False)),
        ("reduce_bucket_size: [5.0e+8, 7]", (500_000_000, 7)),  # a float of YAML's
        ("reduce_bucket_size: [5e8, 1]", (500_000_000, 1)),  # which YAML reads as a word
        ("offload_param: [null, cpu, nvme]", ("none", "cpu", "nvme")),
        ("attention: [eager, sdpa]", ("eager", "sdpa")),
        ("lora: [none, 8, 'targets=q_proj+v_proj,r=16']", ("none", "r=8", "r=16,targets=q_proj+v_proj")),
        ("lora: [null]", ("none",)),
        ("gradient_clipping: [0.5, x, true, 1]", (0.5, "x", True, 1)),  # any other key of DeepSpeed's: as written
        # ranges
        ("reduce_bucket_size: {from: 1, to: 4}", (1, 2, 3, 4)),
        ("reduce_bucket_size: {from: 1, to: 4, scale: linear}", (1, 2, 3, 4)),
        ("reduce_bucket_size: {from: 1, to: 16, scale: pow2}", (1, 2, 4, 8, 16)),
        ("reduce_bucket_size: {from: 3, to: 15, scale: pow2}", (4, 8)),
        ("reduce_bucket_size: {from: 1, to: 10000}", (*range(1, 10_001),)),
    ],
)
def test_what_values_mean(text: str, expected: tuple) -> None:
    found = values(text)
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]


@pytest.mark.parametrize(
    ("text", "is_range"), [("[1, 2]", False), ("{values: [1, 2]}", False), ("{from: 1, to: 2}", True)]
)
def test_what_is_a_range(text: str, is_range: bool) -> None:
    domain = parse_space(f"knobs: {{train_micro_batch_size_per_gpu: {text}}}").knobs["train_micro_batch_size_per_gpu"]
    assert domain.values == (1, 2)
    assert domain.is_range is is_range


def test_conditions_by_either_name_and_of_one_value_or_more() -> None:
    space = parse_space(
        """
knobs:
  zero_stage: [1, 2, 3]
  overlap_comm: {values: [true], when: {zero_optimization.stage: [2, 3]}}
  sub_group_size: {from: 1, to: 2, when: {zero_stage: 3}}
"""
    )
    assert space.knobs["overlap_comm"].when == (("zero_stage", (2, 3)),)
    assert space.knobs["sub_group_size"].when == (("zero_stage", (3,)),)
    assert space.knobs["zero_stage"].when == ()


@pytest.mark.parametrize(
    ("knob", "values", "written", "meant"),
    [
        ("reduce_bucket_size", "[5e8, 5e7]", "5e8", 500_000_000),
        ("reduce_bucket_size", "[500000000, 5e7]", "[5.0e+8]", 500_000_000),
        ("zero_stage", "[1, 2]", "2.0", 2),
        ("offload_optimizer", "[null, cpu]", "null", "none"),
        ("lora", "[none, 16]", "16", "r=16"),
    ],
)
def test_conditions_are_written_as_values_are(knob: str, values: str, written: str, meant: object) -> None:
    text = f"knobs:\n  zero_stage: [3]\n  {knob}: {values}\n  overlap_comm: {{values: [true], when: {{{knob}: {written}}}}}\n"
    space = parse_space(text.replace("  zero_stage: [3]\n", "") if knob == "zero_stage" else text)
    assert space.knobs["overlap_comm"].when == ((knob, (meant,)),)


def test_any_deepspeed_key_may_be_fixed_or_tuned() -> None:
    space = parse_space(
        """
knobs:
  zero_stage: [1, 3]
  zero_optimization.stage3_prefetch_bucket_size: {values: [10, 20], when: {zero_stage: [3]}}
  gradient_clipping: [0.5, 1.0]
fixed:
  zero_optimization.round_robin_gradients: true
  bf16.enabled: true
"""
    )
    assert space.knobs["bf16.enabled"].values == (True,)
    found = space.candidates(make_job())
    assert len(found) == 2 * (1 + 2)
    assert all(is_read(knob, one.as_dict) for one in found for knob in one.as_dict)
    config = next(c for c in found if c.stage == 1).ds_config(make_job())
    assert config["zero_optimization"] == {"stage": 1, "round_robin_gradients": True}
    assert config["gradient_clipping"] in (0.5, 1.0)


def test_files_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        load_space("zero22")
    assert str(caught.value) == (
        "no search space 'zero22'; did you mean zero2 or zero3?: "
        "give a file, or classic, cpu_demo, default, full, lossy, low_memory, nvme, zero2, zero3"
    )
    file = tmp_path / "my.yaml"
    file.write_text("knobs:\n  zero_stage: [1]\n")
    assert load_space(str(file)).name == "my"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_space("~/my.yaml").name == "my"
    file.write_text("knobs:\n  zero_stage: []\n")
    with pytest.raises(UserError, match=f"^{file}:2: zero_stage: has no values"):
        load_space(str(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=rf"^search space {file} cannot be read \(it is no UTF-8 text\)"):
        load_space(str(file))
    with pytest.raises(UserError, match=f"^search space {tmp_path} cannot be read"):
        load_space(str(tmp_path))


def test_where_the_shipped_spaces_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "autotune" / "problem" / "space.py"
    monkeypatch.setattr(space_file, "__file__", str(module))
    assert space_file.spaces_folder() == tmp_path / "search_spaces"
    (tmp_path / "autotune" / "search_spaces").mkdir(parents=True)
    assert space_file.spaces_folder() == tmp_path / "autotune" / "search_spaces", "installed"


range_keys = st.sampled_from(["from", "to", "values", "when", "step", "scale", "x"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**10) | st.floats(allow_nan=True) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(range_keys, inner, max_size=4),
    max_leaves=8,
)


def test_trials_of_the_classic_space_are_candidates_of_the_default_one() -> None:
    default, classic = (list(load_space(name).families()) for name in ("default", "classic"))
    assert all(knobs in default for knobs in classic)
