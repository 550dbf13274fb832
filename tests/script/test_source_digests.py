"""The user's own files that a study is of."""

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.models import resolve_model, shipped_models, workload_spec
from autotune.script.profile import unknown_job
from autotune.script.source_digests import (
    Findings,
    digests,
    edited,
    edited_since,
    imported,
    sources_of,
    stored_findings,
)
from autotune.search.fingerprint import changes, fingerprint, merged_fingerprint
from tests.conftest import make_job

HARDWARE = detect("cpu", 2)


def written(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_was_edited_since(tmp_path: Path) -> None:
    written(tmp_path, a="1", b="1", c="1")
    before = digests(["a.py", "b.py", tmp_path / "c.py"], tmp_path)
    assert list(before) == ["a.py", "b.py", "c.py"], "as they are called below the folder"
    assert edited_since(before, tmp_path) == []
    written(tmp_path, b="2")
    (tmp_path / "c.py").unlink()  # what is gone tells nothing
    assert edited_since(before, tmp_path) == ["b.py"]
    assert edited(before, {"new.py": "x", "a.py": before["a.py"]}) == []


def test_a_modules_imports_are_followed(tmp_path: Path) -> None:
    (tmp_path / "lib/deep").mkdir(parents=True)
    for name in ("lib/__init__.py", "lib/deep/__init__.py"):
        (tmp_path / name).write_text("")
    written(tmp_path, work="import os, torch\nfrom lib import net\nimport lib.deep.data as d\n", unused="")
    written(
        tmp_path, lib__net="from . import parts\nfrom .deep import more\nimport work\n", lib__parts="def broken(:\n"
    )
    written(tmp_path, lib__deep__data="from .. import far\n", lib__deep__more="", lib__far="")
    found = {str(path.relative_to(tmp_path)) for path in imported(tmp_path / "work.py", [tmp_path])}
    modules = {"work", "lib/__init__", "lib/net", "lib/parts", "lib/far"}
    assert found == {f"{name}.py" for name in (*modules, "lib/deep/__init__", "lib/deep/data", "lib/deep/more")}


def test_a_workloads_imports_are_of_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    written(tmp_path, mine_to_tune="import mine_too\ndef make(): ...\n", mine_too="WIDTH = 1\n")
    job = Job(workload_spec("mine_to_tune:make"), 2, 8, "fp32", workload="mine_to_tune:make")
    before = fingerprint(job, HARDWARE)
    assert set(before["sources"]) == {"mine_to_tune.py", "mine_too.py"}
    written(tmp_path, mine_too="WIDTH = 4096\n")
    assert changes(before, fingerprint(job, HARDWARE)) == ["mine_too.py was edited"]


def test_a_models_own_code_is_of_its_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {**shipped_models()["tiny-llama"].config, "auto_map": {"AutoModel": "modeling.Net"}}
    (folder / "config.json").write_text(json.dumps(config))
    written(folder, modeling="1")
    job = Job(resolve_model(str(folder), trust_remote_code=True), 2, 8, "fp32")
    before = fingerprint(job, HARDWARE)
    written(folder, modeling="2")
    assert changes(before, fingerprint(job, HARDWARE)) == [f"{folder}/modeling.py was edited"]


def test_what_an_earlier_version_did_not_keep_is_unknown(tmp_path: Path) -> None:
    """Nor is it in the job, whose JSON names studies and is compared with theirs."""
    script = Script(("train.py",), str(tmp_path), profile=ScriptProfile(sources={"train.py": "12"}))
    job = unknown_job(script, HARDWARE)
    old = unknown_job(dataclasses.replace(script, profile=ScriptProfile.from_json({})), HARDWARE)
    assert sources_of(job) == {"train.py": "12"}
    assert job.to_json() == old.to_json()
    assert changes(fingerprint(old, HARDWARE), fingerprint(job, HARDWARE)) == []
    assert merged_fingerprint(fingerprint(old, HARDWARE), fingerprint(job, HARDWARE))["sources"] == {"train.py": "12"}
    assert "sources" not in fingerprint(make_job(), HARDWARE)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "[" * 100_000, '{"profile": {"sources": [1]}}', '{"profile": 3}', "\0", "\udcff"]
)
def test_damaged_findings_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(text, errors="surrogateescape")
    assert stored_findings(path) == Findings()
    assert stored_findings(tmp_path / "missing") == Findings()
