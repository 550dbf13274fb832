"""Variables that a script reads: which belong to its training, and how changes and secrets are shown."""

from dataclasses import replace

import pytest

from autotune.masking import MASK
from autotune.problem.candidate import ACCUMULATION
from autotune.problem.job import Script, ScriptProfile
from autotune.script.environment import changed_variables, own_variables, secrets_of, to_set
from autotune.script.recorded import is_data


def test_variables_of_the_rank_and_of_the_session_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BATCH_SIZE": "2",
        "HF_TOKEN": "secret-of-mine",
        "SLURM_JOB_ID": "7",
        "TORCH_EXTENSIONS_DIR": "/x",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "GRAD_ACC", "LR"):
        monkeypatch.delenv(name, raising=False)
    reported = {
        "BATCH_SIZE": "2",
        "GRAD_ACC": None,
        "RANK": "0",
        "SLURM_JOB_ID": "7",
        "TORCH_EXTENSIONS_DIR": "/x",
        "HF_TOKEN": MASK,
        "LR": "1",
    }
    found = own_variables(reported)
    assert found == {"BATCH_SIZE": "2", "GRAD_ACC": None, "HF_TOKEN": MASK}
    assert to_set(found) == {"BATCH_SIZE": "2"}
    assert secrets_of(found) == ["HF_TOKEN"]
    assert changed_variables(found) == []
    monkeypatch.setenv("BATCH_SIZE", "4")
    monkeypatch.setenv("GRAD_ACC", "")
    monkeypatch.setenv("HF_TOKEN", "another secret")
    assert changed_variables(found) == ["BATCH_SIZE is 4 instead of 2", "GRAD_ACC is '' instead of not set"]
    monkeypatch.delenv("HF_TOKEN")
    assert changed_variables({"HF_TOKEN": MASK}) == [f"HF_TOKEN is not set instead of '{MASK}'"]


def test_a_carrier_that_is_not_set_but_read_stays_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code has a default for it, and the same findings hold for the next call."""
    monkeypatch.delenv("GRAD_ACC", raising=False)
    profile, script = ScriptProfile(found_flags={ACCUMULATION: "$GRAD_ACC"}), Script(("train.py",), ".")
    assert is_data(replace(profile, environment={"GRAD_ACC": None}), script)
    assert not is_data(profile, script)
