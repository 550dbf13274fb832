"""A Hub model's configuration, read in a process of its own; a folder stands for the Hub, which tests do not reach."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def ask(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.rank.hub", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout)


CODE = """
from transformers import PretrainedConfig
print("loud")
class OwnConfig(PretrainedConfig):
    model_type = "own-model"
    def __init__(self, width=3, **kwargs):
        super().__init__(**kwargs)
        self.width = width
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model that brings its code."""
    (tmp_path / "configuration_own.py").write_text(CODE)
    config = {"model_type": "own-model", "width": 5, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_configuration_is_completed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    config = ask(str(tmp_path))["config"]
    assert (config["model_type"], config["hidden_size"]) == ("llama", 64)
    assert config["num_attention_heads"] == 32, "transformers' own default"
    assert "transformers_version" not in config


def test_code_runs_only_where_it_is_trusted(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(own / "modules"))
    assert "custom code" in ask(str(own))["error"]
    config = ask("--trust-remote-code", str(own))["config"]
    assert config["width"] == 5
    assert config["_name_or_path"] == str(own)


def test_what_cannot_be_read_is_said_in_one_line() -> None:
    error = ask("nobody/no-such-model")["error"]
    assert error
    assert "\n" not in error
    assert len(error) <= 200
