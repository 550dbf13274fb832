"""What is said of the user's own DeepSpeed config when it is read, and that whatever passes goes all the way to an export."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.commands.setup import precision_of
from autotune.errors import UserError
from autotune.predict.zero_memory import optimizer_of_trials
from autotune.problem.ds_config import global_batch_of, ignored_keys, load_ds_config
from autotune.problem.hardware import named_hardware
from autotune.problem.knobs import KNOBS
from autotune.problem.outcome import Measurement
from autotune.problem.space import fitted, load_space
from autotune.rank.ds_config import needed_ops, trial_config
from autotune.results.export import meta, training_arguments
from tests.conftest import make_job


def config_at(path: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = {}
    *parents, leaf = path.split(".")
    section = config
    for parent in parents:
        section = section.setdefault(parent, {})
    section[leaf] = value
    return config


def loaded(tmp_path: Path, config: Any) -> dict[str, Any]:
    file = tmp_path / "ds.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_ds_config(file)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("optimizer", "AdamW", "expected an object, found 'AdamW'"),
        ("optimizer.type", None, "expected a name like AdamW, found None"),
        ("optimizer.type", 7, "expected a name like AdamW, found 7"),
        ("scheduler.type", ["a"], "expected a name like WarmupLR"),
        ("scheduler.params", [], "expected an object, found []"),
        ("bf16", True, "expected an object, found True"),
        ("fp16.enable", True, "DeepSpeed has no such key; did you mean enabled?"),
        ("zero_optimization.stge", 2, "DeepSpeed has no such key; did you mean stage"),
        ("bf16.enabled", 1, "expected true or false, found 1"),
        ("bf16.enabled", "yes", "expected true or false, found 'yes'"),
        ("zero_optimization", None, "expected an object, found None"),
        ("zero_optimization.offload_optimizer", "cpu", "expected an object, found 'cpu'"),
        ("zero_optimization.offload_param.device", "gpu", "expected one of none, cpu, nvme, found 'gpu'"),
        ("zero_optimization.offload_optimizer.ratio", 1.5, "expected a number from 0 to 1, found 1.5"),
        ("zero_optimization.stage", 9, "9 is out of range: expected 0 to 3"),
        ("zero_optimization.stage", True, "expected a whole number, found True"),
        ("zero_optimization.overlap_comm", "true", "expected true or false, found 'true'"),
        ("train_batch_size", -4, "-4 is out of range"),
        ("train_batch_size", 30.5, "expected a whole number"),
        ("train_micro_batch_size_per_gpu", 0, "0 is out of range"),
        ("gradient_accumulation_steps", [8], "expected a whole number, found [8]"),
        ("gradient_clipping", -1, "expected a number at least 0, found -1"),
        ("optimizer.params.lr", float("nan"), "expected a finite number, found nan"),
        ("scheduler.params.betas", [1.0, float("inf")], "expected a finite number, found inf"),
    ],
)
def test_what_deepspeed_could_not_take_is_said_with_file_and_key(
    tmp_path: Path, path: str, value: Any, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, config_at(path, value))
    where = f"{path}.1" if isinstance(value, list) and "finite" in said else path
    assert str(caught.value).startswith(f"{tmp_path / 'ds.json'}: {where}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n\t", "// all of it later", "[" * 100_000, '{"seed": ' + "9" * 5000 + "}"])
def test_a_file_that_says_nothing_or_too_much(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"is empty; expected a DeepSpeed config|not JSON|cannot be read"):
        loaded(tmp_path, text)


def test_zero_as_a_truth_value_is_stage_one_or_zero_as_in_deepspeed(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"zero_optimization": True})["zero_optimization"] == {"stage": 1}
    assert loaded(tmp_path, {"zero_optimization": False})["zero_optimization"] == {"stage": 0}


def test_bf16_and_fp16_together_are_refused_as_in_deepspeed(tmp_path: Path) -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    with pytest.raises(UserError, match="bf16 and fp16 are both enabled, which DeepSpeed refuses"):
        loaded(tmp_path, both)
    assert loaded(tmp_path, {**both, "fp16": {"enabled": "auto"}})
    assert loaded(tmp_path, {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}})


def test_a_misspelt_key_that_deepspeed_ignores_is_named_with_the_known_one() -> None:
    config = {"bp16": {"enabled": True}, "gradient_accumulation_step": 2, "train_iters": 3, "bf16": {"enable": True}}
    assert sorted(ignored_keys(config)) == [
        "warning: DeepSpeed ignores bp16 in your config; did you mean fp16 or bf16?",
        "warning: DeepSpeed ignores gradient_accumulation_step in your config; did you mean gradient_accumulation_steps?",
    ]


@pytest.mark.parametrize("text", ["zero_optimization:\n  stage: 2\n", "# ours\ntrain_batch_size: 8\n"])
def test_yaml_is_named_as_the_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "ds.yaml").write_text(text)
    with pytest.raises(UserError, match="DeepSpeed reads JSON, and this file is YAML"):
        load_ds_config(tmp_path / "ds.yaml")
    (tmp_path / "ds.yaml").write_text('{"train_batch_size": 8}')
    assert load_ds_config(tmp_path / "ds.yaml") == {"train_batch_size": 8}


@pytest.mark.parametrize("text", ['{"a": {"seed": 1, "b": 2, "seed": 3}}', "{seed: 1, // as before\n seed: 1}"])
def test_a_key_that_is_given_twice(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="'seed' is given twice, which DeepSpeed refuses"):
        loaded(tmp_path, text)


@pytest.mark.parametrize("value", [None, "auto", "x", -7, 1e400, [], {"a": 1}, True, 3, 0.5, {}])
def test_any_value_of_a_knob_is_taken_or_refused(tmp_path: Path, value: Any) -> None:
    for path in [*(knob.path for knob in KNOBS.values() if knob.path), "optimizer", "bf16", "fp16"]:
        try:
            loaded(tmp_path, config_at(path, value))
        except UserError as error:
            assert path in str(error)


def measured_with(candidate: Any, job: Any) -> str:
    measured = Measurement(1.0, 0.01, 5, 8.0, 256.0, 2**30)
    about = meta(candidate, job, measured, study="s", trial=0, verified=True, fingerprint={}, headroom=0.05, threads=1)
    return str(about["measured_with_optimizer"])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": {"params": {"lr": 1}}},
        {"optimizer": {"type": "AdamW", "params": None}, "scheduler": {"type": "WarmupLR"}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}},
        {"zero_optimization": {"stage": "auto", "offload_optimizer": None, "overlap_comm": None}},
        {"zero_optimization": {"stage": 3, "offload_param": {}, "offload_optimizer": {"device": "auto"}}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "gradient_clipping": "auto", "seed": 1},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}},
        {"zero_optimization": {"stage": 2.0, "reduce_bucket_size": 5e8, "sub_group_size": 1e12}},
        {"bf16": None, "aio": None, "bp16": {"enabled": True}, "_comment": "ours"},
        {"communication_data_type": None, "data_types": {"grad_accum_dtype": "float32"}},
    ],
)
def test_what_passes_goes_all_the_way(tmp_path: Path, config: dict[str, Any]) -> None:
    hardware = named_hardware("a100-80gb", 4)
    precision, base = precision_of(None, loaded(tmp_path, config), hardware)
    job = make_job(4, precision=precision, base_config=base)
    candidate = fitted(load_space("default"), job, hardware).space.candidates(job)[0]
    assert trial_config(candidate, job)["optimizer"]["type"]
    assert needed_ops([candidate], job, "cuda") is not None
    assert optimizer_of_trials(job).state_bytes
    assert training_arguments(candidate, job)["deepspeed"]
    assert measured_with(candidate, job)


@pytest.mark.parametrize("section", ["AdamW", "auto", None, {"type": "SGD"}])
def test_a_word_in_a_scripts_config_is_no_optimizer_of_ours(section: Any) -> None:
    job = make_job(4, base_config={"optimizer": section})
    candidate = load_space("default").candidates(make_job(4))[0]
    expected = "SGD" if isinstance(section, dict) else job.optimizer
    assert (measured_with(candidate, job), job.optimizer_kind) == (expected, expected.lower())
    assert optimizer_of_trials(job).state_bytes
    assert needed_ops([candidate], job, "cuda") is not None


MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({}, None),
        ({"train_batch_size": 32}, 32),
        ({"train_batch_size": 64, MICRO: 4, STEPS: 8}, 64),
        ({MICRO: 4, STEPS: 8}, 128),
        ({"train_batch_size": "auto", MICRO: 4, STEPS: 8}, 128),
        ({MICRO: 4, STEPS: "auto"}, None),
    ],
)
def test_the_global_batch_that_a_config_says(config: dict[str, Any], batch: int | None) -> None:
    found, words = global_batch_of(config, 4)
    assert found == batch
    assert type(found) in (int, type(None))
    assert bool(words) == (batch is not None)
