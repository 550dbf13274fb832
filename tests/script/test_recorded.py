"""A recorded job supplies no code, no path and no word of a command, whoever made the study."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.job import Script, ScriptProfile
from autotune.script.recorded import (
    RecordedJob,
    check_candidate,
    data_of,
    is_data,
    job_to_train,
    recorded_job,
    with_findings,
)
from autotune.script.script import typed_words
from tests.conftest import make_candidate, make_job

BATCH = "train_micro_batch_size_per_gpu"
TYPED = Script(("train.py", "--bs", "8", "--trust_remote_code", "False"), "/")
PROFILE = ScriptProfile(
    micro_batch=8,
    found_flags={BATCH: "--bs"},
    spellings={"--ckpt": [None, "--ckpt"], "--liger": ["--no-liger", "--liger"], "--x": ["--x=off", "--x=on"]},
    variables={"NCCL_ALGO": "Ring"},
)


def test_findings_of_a_probe_run_are_data() -> None:
    assert is_data(PROFILE, TYPED)
    script = with_findings("s", replace(TYPED, profile=PROFILE, flags=((BATCH, "--bs"),)), TYPED)
    assert (script.argv, dict(script.flags)) == (TYPED.argv, {BATCH: "--bs"})
    assert script.profile.variables == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    "planted",
    [
        {"found_flags": {"activation_checkpointing": "--trust_remote_code"}},
        {"found_flags": {BATCH: "--output_dir=/tmp/batch"}},
        {"found_flags": {"train_batch_size": "--model"}},
        {"spellings": {"--ckpt": [None, "--trust_remote_code"]}},
        {"spellings": {"--ckpt": [None, "--ckpt=/tmp/x"]}},
        {"variables": {"LD_PRELOAD": "evil.so"}},
        {"variables": {"NCCL_NET_PLUGIN": "/tmp/evil.so"}},
        {"model_config": {"attn_implementation": "evil/kernel"}},
    ],
)
def test_what_could_load_a_program_is_no_finding(planted: dict[str, Any]) -> None:
    profile = ScriptProfile(**planted)
    assert not is_data(profile, TYPED)
    if "model_config" not in planted:
        (name,) = planted
        assert getattr(data_of(profile, TYPED), name) == {}


def test_a_variable_with_a_path_is_set_by_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(TYPED, profile=ScriptProfile(variables={"CUDA_HOME": "/opt/cuda"}))
    with pytest.raises(UserError, match=r"CUDA_HOME=/opt/cuda, .* Set CUDA_HOME in front of autotune"):
        with_findings("s", known, TYPED)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert with_findings("s", known, TYPED).profile.variables == {"CUDA_HOME": "/opt/cuda"}


def test_a_training_gets_no_code_and_no_path_of_a_recorded_job() -> None:
    job = make_job(1)
    data = json.loads(json.dumps(job.to_json()))
    data["workload"] = "evil:build"
    data["model"]["config"] = {"auto_map": {"AutoConfig": "evil.Config"}}
    data["base_config"] = {"csv_monitor": {"output_path": "/home/x"}, "gradient_clipping": 1.0}
    recorded = recorded_job(data)
    assert isinstance(recorded, RecordedJob)
    with pytest.raises(UserError, match=r"supplies no code, and this one names workload evil:build"):
        recorded.order()
    order = job_to_train(recorded, TYPED).order()
    assert (order.get("workload"), order["model"]["config"]) == (None, {})
    assert order["base_config"] == {"gradient_clipping": 1.0}


def test_a_candidate_with_a_path_is_refused() -> None:
    check_candidate("s", make_candidate(1))
    with pytest.raises(UserError, match="supplies no path"):
        check_candidate("s", make_candidate(1, **{"csv_monitor.output_path": str(Path("x"))}))


def test_a_flag_that_carries_the_batch_by_default_is_printed_and_typed_again() -> None:
    profile = ScriptProfile(micro_batch=4, accumulation=2, found_flags={BATCH: "--max_tokens"}, flag_times={BATCH: 8})
    known = Script(("train.py",), "/", profile=profile)
    assert typed_words(known) == ["train.py", "--max_tokens", "32"]
    with pytest.raises(UserError, match=r"changes its batch by --max_tokens, which is not on the command line"):
        with_findings("s", known, Script(("train.py",), "/"))
    assert with_findings("s", known, Script(tuple(typed_words(known)), "/")).profile == profile
    telling = replace(profile, found_flags={BATCH: "--batch_size"})
    assert with_findings("s", replace(known, profile=telling), Script(("train.py",), "/")).profile == telling
