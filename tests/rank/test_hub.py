"""The process that reads a configuration from the Hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.models import resolve_model


def test_an_unreachable_hub_is_an_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.rank.hub", "nobody/nothing-of-that-name"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert set(json.loads(done.stdout.splitlines()[-1])) == {"error"}
    with pytest.raises(UserError, match="'nobody/nothing-of-that-name' could not be read from the Hub"):
        resolve_model("nobody/nothing-of-that-name")


@pytest.mark.parametrize("flags", [[], ["--trust-remote-code"]])
def test_a_configuration_is_plain_json(tmp_path: Path, flags: list[str]) -> None:
    folder = tmp_path / "of" / "mine"  # transformers takes a folder for a Hub id
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "transformers_version": "1"}')
    command = [sys.executable, "-m", "autotune.rank.hub", *flags, "of/mine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    config = json.loads(done.stdout.splitlines()[-1])["config"]
    assert config["hidden_size"] == 64
    assert config["_name_or_path"] == "of/mine"
    assert "transformers_version" not in config
