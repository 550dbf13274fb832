"""Models by name, folder, file, Hub id and function. No weights, no network, no transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem import models
from autotune.problem.models import ModelSpec, resolve_model, shipped_models, workload_spec


def test_the_promised_models_are_there() -> None:
    names = set(shipped_models())
    families = ("gemma-2", "gemma-3", "llama-3", "qwen2.5", "qwen3", "mistral", "phi", "gpt2", "smollm")
    assert all(any(name.startswith(family) for name in names) for family in families)
    assert {"gemma-2-2b", "tiny-gemma-2", "tiny-llama"} <= names
    assert len(names) >= 18
    for name, spec in shipped_models().items():
        assert spec.name == name
        assert spec.config["model_type"]


@pytest.mark.parametrize("name", ["gemma-2-2b", "Gemma-2-2B", "google/gemma-2-2b", "GOOGLE/Gemma-2-2b"])
def test_a_shipped_model_by_name_or_hub_id(name: str) -> None:
    assert resolve_model(name) is shipped_models()["gemma-2-2b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (" ", "the model's name is empty: give a shipped name (`autotune models`), a folder or a Hub id"),
        (
            "gema-2-2b",
            "unknown model 'gema-2-2b'; did you mean gemma-2-2b or gemma-2-27b or gemma-2-9b? (`autotune models` ",
        ),
        ("zzz", "unknown model 'zzz' (`autotune models` lists the names)"),
        ("./nowhere", "no model at ./nowhere: expected a folder with config.json, or that file"),
        ("~/nowhere-at-all", "no model at ~/nowhere-at-all: expected a folder with config.json, or that file"),
        ("nowhere.json", "no model at nowhere.json: expected a folder with config.json, or that file"),
    ],
)
def test_names_that_are_nobodys(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert str(caught.value).startswith(message)


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    expected = ModelSpec(tmp_path.name, config, str(file.resolve()), None, False)
    assert resolve_model(str(tmp_path)) == expected
    assert resolve_model(str(file)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{\n",
            ":2: not JSON (Expecting property name enclosed in double quotes); expected a transformers config.json",
        ),
        ("[]", ': no "model_type"; expected a transformers config.json like the Hub\'s'),
        ('{"a": 1}', ': no "model_type"; expected a transformers config.json like the Hub\'s'),
        ('{"model_type": 1}', ': no "model_type"; expected a transformers config.json like the Hub\'s'),
        (
            '{"model_type": "x", "auto_map": {}}',
            " contains code to run (auto_map): add --trust-remote-code if you trust it",
        ),
    ],
)
def test_malformed_configurations(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == f"{file}{message}"


def test_code_of_its_own_only_by_the_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "auto_map": {}}')
    spec = resolve_model(str(tmp_path), trust_remote_code=True)
    assert spec.trust_remote_code
    assert spec.config == {"model_type": "x", "auto_map": {}, "_name_or_path": str(tmp_path.resolve())}, "where it is"


def test_an_empty_folder_and_a_file_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == f"no config.json in {tmp_path}: expected the folder of a transformers model"
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=rf"{tmp_path}/config\.json cannot be read \(it is no UTF-8 text\)"):
        resolve_model(str(tmp_path))


# -- the Hub, which a process of its own reads -----------------------------------------------------------------------


class FakeHub:
    """Answers in place of `autotune.rank.hub_config`; tests/rank/test_hub_config.py runs the real one."""

    def __init__(self, stdout: str, returncode: int = 0) -> None:
        self.stdout, self.returncode = stdout, returncode
        self.command: list[str] = []

    def __call__(
        self, command: list[str], *, stdout: int, text: bool, encoding: str, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        assert stdout == subprocess.PIPE
        assert text
        assert Path(env["PYTHONPATH"].split(os.pathsep)[0], "autotune").is_dir()
        self.command = command
        return subprocess.CompletedProcess(command, self.returncode, self.stdout)


@pytest.mark.parametrize(("trust", "flags"), [(False, []), (True, ["--trust-remote-code"])])
def test_a_hub_id_is_read_by_another_process(monkeypatch: pytest.MonkeyPatch, trust: bool, flags: list[str]) -> None:
    hub = FakeHub('a word of warning\n{"config": {"model_type": "llama"}}\n')
    monkeypatch.setattr(models.subprocess, "run", hub)
    assert resolve_model("me/my-llama", trust_remote_code=trust) == ModelSpec(
        "my-llama", {"model_type": "llama"}, "me/my-llama", None, trust
    )
    without_code = [] if trust else ["--unprotected"]  # reading a config runs none of the repository's code
    words = [*without_code, "autotune.rank.hub_config", *flags, "me/my-llama"]
    *before, folder = hub.command[: -len(words)]
    assert hub.command[-len(words) :] == words
    assert "autotune.rank.sandbox" in before, "remote code is confined"
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("name", "hub", "message"),
    [
        ("me/x", FakeHub('{"error": "no such thing"}'), "no such thing; a folder with its config.json works offline"),
        (
            "a-long-organisation/gemma-2-2",
            FakeHub('{"error": "no"}'),
            "no; did you mean gemma-2-2b or gemma-2-27b or gemma-2-9b?",
        ),
        (
            "me/x",
            FakeHub(json.dumps({"error": "y" * 300})),
            "y" * 200 + "; a folder with its config.json works offline",
        ),
        ("me/x", FakeHub("", 1), "no answer, exit status 1; a folder with its config.json works offline"),
        ("me/x", FakeHub("Killed\n", -9), "no answer, exit status -9; a folder with its config.json works offline"),
    ],
)
def test_what_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch, name: str, hub: FakeHub, message: str) -> None:
    monkeypatch.setattr(models.subprocess, "run", hub)
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert str(caught.value) == f"model {name!r} could not be read from the Hub: {message}"


# -- a user's own function -----------------------------------------------------------------------------------------------


def test_a_workload_is_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_a.py").write_text("def build():\n    pass\n")
    spec = workload_spec("mine_a:build")
    assert (spec.name, spec.config) == ("build", {})
    path, digest = spec.source.split()
    assert Path(path) == tmp_path / "mine_a.py"
    assert len(digest) == 12
    assert workload_spec("mine_a:build") == spec
    (tmp_path / "mine_a.py").write_text("def build():\n    return 1\n")
    assert workload_spec("mine_a:build") != spec


@pytest.mark.parametrize(
    ("text", "has_it"),
    [
        ("def build(): ...", True),
        ("from elsewhere import other, build", True),
        ("def builder(): ...", False),
        ("# def build()", False),
    ],
)
def test_where_a_function_may_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, has_it: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_c.py").write_bytes(text.encode() + b"\n# \xff: no UTF-8")
    if has_it:
        assert workload_spec("mine_c:build").name == "build"
    else:
        with pytest.raises(UserError, match=r"--workload mine_c:build: .*mine_c\.py has no build"):
            workload_spec("mine_c:build")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("mine_a", "--workload mine_a: expected package.module:function"),
        ("mine_a:", "--workload mine_a:: expected package.module:function"),
        ("mine_b:build", "--workload mine_b:build: no module mine_b here or installed"),
        ("mine_b.inner:build", "--workload mine_b.inner:build: no module mine_b.inner here or installed"),
        ("mine_b:inner:build", "--workload mine_b:inner:build: no module mine_b here or installed"),
        (".relative:build", "--workload .relative:build: no module .relative here or installed"),
    ],
)
def test_what_is_no_workload(wrong: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        workload_spec(wrong)
    assert str(caught.value) == message


def test_the_current_folder_is_looked_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_d.py").write_text("def build(): ...\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    workload_spec("mine_d:build")
    workload_spec("mine_d:build")
    assert sys.path.count("") == 1
    assert sys.path[0] == ""
