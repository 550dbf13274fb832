"""A Hub model's configuration, read in a process of its own; a folder stands for the Hub, which tests do not reach."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.models import resolve_model
from autotune.rank.hub_config import answer
from tests.rank.conftest import environment

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
    made = tmp_path / "own"
    made.mkdir()
    (made / "configuration_own.py").write_text(CODE)
    config = {"model_type": "own-model", "width": 5, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (made / "config.json").write_text(json.dumps(config))
    return made


def ask(folder: str, trusted: bool) -> dict[str, Any]:
    return answer(folder, trust_remote_code=trusted)


def test_a_configuration_is_completed(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    config = in_rank(ask, str(tmp_path), False)["config"]
    assert (config["model_type"], config["hidden_size"]) == ("llama", 64)
    assert config["num_attention_heads"] == 32, "transformers' own default"
    assert "transformers_version" not in config


def test_code_does_not_run_where_it_is_not_trusted(in_rank: Callable[..., Any], own: Path) -> None:
    error = in_rank(ask, str(own), False)["error"]
    assert re.search("requires you to execute|custom code", error), "transformers' own words, of before 5 and since"


def test_what_cannot_be_read_is_said_in_one_line(in_rank: Callable[..., Any]) -> None:
    error = in_rank(ask, "nobody/no-such-model", False)["error"]
    assert error
    assert "\n" not in error
    assert len(error) <= 200


@pytest.mark.slow
def test_trusted_code_may_print_and_the_answer_is_one_line(own: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.rank.hub_config", "--trust-remote-code", str(own)],
        env={**environment(), "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "loud" in done.stderr
    (line,) = done.stdout.splitlines()
    config = json.loads(line)["config"]
    assert (config["width"], config["_name_or_path"]) == (5, str(own))


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="'nobody/nothing-of-that-name' could not be read from the Hub"):
        resolve_model("nobody/nothing-of-that-name")
