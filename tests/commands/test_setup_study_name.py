"""The name of a study that nobody has named: another for whatever makes another job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.commands.setup import name_since_edits, study_folder, study_name
from autotune.errors import UserError
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script
from autotune.problem.models import resolve_model
from autotune.script.profile import unknown_job
from autotune.script.source_digests import digests
from tests.conftest import make_job


def test_what_makes_another_job_makes_another_name(tmp_path: Path) -> None:
    hardware = detect("cpu", 2)
    job = unknown_job(Script(("train.py", "--lr", "1"), str(tmp_path)), hardware)
    longer = unknown_job(Script(("train.py", "--lr", "2"), str(tmp_path)), hardware)
    capped = replace(hardware, memory_cap_bytes=2**30)
    names = [
        study_name(job, hardware),
        study_name(longer, hardware),
        study_name(job, hardware, 16),
        study_name(job, hardware, 32),
        study_name(job, hardware, "free"),
        study_name(job, capped),
        study_name(make_job(), hardware),
        study_name(make_job(seq_len=64), hardware),
        study_name(make_job(global_batch_size=16), hardware),
    ]
    assert len(set(names)) == len(names)
    assert names[0] == f"train-2xcpu-{job.script.key[:6]}"  # type: ignore[union-attr]


@pytest.mark.parametrize("folder", ["mine", "-2", ".hidden", "x" * 150, "naïve 模型"])
@pytest.mark.parametrize("typed", [".", "..", "there"])
def test_a_model_in_any_folder_has_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, typed: str
) -> None:
    there = tmp_path / folder
    (there / "sub").mkdir(parents=True)
    (there / "config.json").write_text(json.dumps(resolve_model("tiny-llama").config))
    monkeypatch.chdir(there / "sub" if typed == ".." else there if typed == "." else tmp_path)
    model = resolve_model(f"./{folder}" if typed == "there" else typed)
    assert model.name == folder
    name = study_name(Job(model, 2, 64, "fp32"), detect("cpu", 2))
    assert study_folder(Path("runs"), name) == Path("runs") / name
    assert name.startswith(folder.lstrip(".-")[:80])


@pytest.mark.parametrize("name", ["", "-x", "--force", ".x", "a/b", "a\nb", "x" * 121, "probe", "launch"])
def test_a_name_that_no_study_can_have(name: str) -> None:
    with pytest.raises(UserError) as caught:
        study_folder(Path("runs"), name)
    assert "\n" not in str(caught.value)


def test_an_edited_file_makes_another_name_that_the_same_text_finds_again(tmp_path: Path) -> None:
    runs, job = tmp_path / "runs", unknown_job(Script(("train.py",), str(tmp_path)), detect("cpu", 2))

    def call(text: str) -> tuple[str, list[str]]:
        """The name that a call with this text of model.py has; and its folder remembers the text."""
        (tmp_path / "model.py").write_text(text)
        name, lines = name_since_edits("base", runs, job)
        memory = runs / name / "probe.json"
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(json.dumps({"profile": {"sources": digests(["model.py"], tmp_path)}}))
        return name, lines

    assert call("1") == ("base", [])

    second, lines = call("2")
    assert second != "base"
    assert lines == [f"model.py was edited since study base: this call uses study {second} (--force resumes base)"]
    assert call("3")[0] not in ("base", second)
    assert call("2") == (second, lines)
    assert call("1") == ("base", [])
    named = unknown_job(Script(("train.py",), str(tmp_path)), detect("cpu", 2))
    (runs / "base" / "probe.json").write_text(json.dumps({"profile": {}}))  # of an earlier version
    assert name_since_edits("base", runs, named) == ("base", [])


def test_another_value_of_a_variable_that_the_script_reads_makes_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, job = tmp_path / "runs", unknown_job(Script(("train.py",), str(tmp_path)), detect("cpu", 2))

    def call(value: str | None) -> tuple[str, list[str]]:
        """The name that a call with this BATCH_SIZE has; its folder remembers the value."""
        monkeypatch.delenv("BATCH_SIZE", raising=False)
        if value is not None:
            monkeypatch.setenv("BATCH_SIZE", value)
        name, lines = name_since_edits("base", runs, job)
        memory = runs / name / "probe.json"
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(json.dumps({"profile": {"environment": {"BATCH_SIZE": value}}}))
        return name, lines

    assert call("2") == ("base", [])
    second, lines = call("4")
    assert lines == [
        f"BATCH_SIZE is 4 instead of 2 since study base: this call uses study {second} (--force resumes base)"
    ]
    third, lines = call(None)
    assert len({"base", second, third}) == 3
    assert lines[0].startswith("BATCH_SIZE is not set instead of 2 since study base")
    assert call("4")[0] == second
    assert call("2") == ("base", [])
