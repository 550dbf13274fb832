import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.models import resolve_model, shipped_models


def test_the_promised_models_are_there() -> None:
    names = set(shipped_models())
    families = ("gemma-2", "gemma-3", "llama-3", "qwen2.5", "qwen3", "mistral", "phi", "gpt2", "smollm")
    assert all(any(name.startswith(family) for name in names) for family in families)
    assert {"gemma-2-2b", "tiny-gemma-2", "tiny-llama"} <= names
    assert len(names) >= 18


def test_names_hub_ids_and_case() -> None:
    assert resolve_model("Gemma-2-2B") is resolve_model("google/gemma-2-2b")
    with pytest.raises(UserError, match="did you mean gemma-2-2b"):
        resolve_model("gema-2-2b")
    with pytest.raises(UserError, match="empty"):
        resolve_model(" ")


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_model(str(tmp_path)).config == config
    assert resolve_model(str(tmp_path / "config.json")).name == tmp_path.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "model_type"),
        ('{"a": 1}', "model_type"),
        ('{"model_type": "x", "auto_map": {}}', "trust"),
    ],
)
def test_malformed_configurations(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        resolve_model(str(tmp_path))


def test_code_of_its_own_only_by_the_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "auto_map": {}}')
    assert resolve_model(str(tmp_path), trust_remote_code=True).trust_remote_code


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/config.json", "nowhere.json"])
def test_paths_that_are_not_there(name: str) -> None:
    with pytest.raises(UserError, match="no model at"):
        resolve_model(name)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in .*: expected the folder of a transformers model"):
        resolve_model(str(tmp_path))
