"""Sandboxes that an executor creates for its trials."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors import machine
from autotune.executors.machine import protection_of, remove_scratch, trial_sandbox
from autotune.problem.candidate import Candidate
from autotune.problem.job import ScriptProfile
from autotune.rank.sandbox import Protection, Sandbox
from autotune.script.parse_command import read_command
from autotune.script.script import Script
from tests.conftest import make_job


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Protection], None]:
    """Has this machine offer one protection."""
    return lambda protection: monkeypatch.setattr(machine, "_available", lambda *_: protection)


def sandbox_of(cwd: Path, study: Path, *words: str, unprotected: bool = False) -> Sandbox:
    (cwd / "train.py").write_text("")
    script = Script(argv=("train.py", *words), cwd=str(cwd))
    job = dataclasses.replace(make_job(), script=script)
    return trial_sandbox(study, job, Candidate(()), study, unprotected=unprotected)


def test_a_view_shows_everything_but_the_study(tmp_path: Path, offer: Callable[[Protection], None]) -> None:
    offer(Protection.LANDLOCK)
    cwd = tmp_path / "home" / "project"
    for name in ("data/x", "runs/sft/weights", "runs/mine/study.db", "../lib.py"):
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(name)
    (cwd / "latest").symlink_to("data")
    view = sandbox_of(cwd, cwd / "runs" / "mine").script_cwd
    assert sorted(os.listdir(view)) == ["data", "latest", "runs", "train.py"]
    assert os.listdir(view / "runs") == ["sft"], "no script sees the study"
    for name in ("data/x", "latest/x", "runs/sft/weights", "../lib.py"):
        assert (view / name).read_text().endswith(name.removeprefix("latest/"))
    assert not (view / "data").is_symlink(), "new files can be written there"


def test_an_overlay_needs_no_view(tmp_path: Path, offer: Callable[[Protection], None]) -> None:
    offer(Protection.OVERLAY)
    sandbox = sandbox_of(tmp_path, tmp_path / "study")
    assert sandbox.script_cwd == tmp_path
    assert os.listdir(sandbox.folder) == ["files"]


@pytest.mark.parametrize("protection", [Protection.OVERLAY, Protection.LANDLOCK])
def test_the_output_folder_that_an_argument_file_names_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offer: Callable[[Protection], None], protection: Protection
) -> None:
    offer(protection)
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere" / "vocab.json").write_text("{}")
    (tmp_path / "project" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    for named in ("../elsewhere", str(tmp_path / "elsewhere"), "../nowhere"):
        Path("mine.yaml").write_text(f"output_dir: {named}\n")
        job = dataclasses.replace(make_job(), script=read_command(["train.py", "mine.yaml"], []).script)
        sandbox = trial_sandbox(tmp_path / "study", job, Candidate(()), tmp_path / "study", unprotected=False)
        (copy,) = sandbox.files.glob(".autotune-arguments/*/mine.yaml")
        if protection is Protection.OVERLAY:
            assert copy.read_text() == f"output_dir: {named}\n", "its layers take what is written there"
            continue
        own = sandbox.files / ".autotune-output"
        assert str(own) in copy.read_text()
        assert list(own.glob("*")) == ([] if "nowhere" in named else [own / "vocab.json"])


def test_without_protection_a_trial_needs_consent(tmp_path: Path, offer: Callable[[Protection], None]) -> None:
    offer(Protection.NONE)
    with pytest.raises(UserError, match=r"^this machine cannot keep .* --unprotected"):
        sandbox_of(tmp_path, tmp_path / "study")
    assert sandbox_of(tmp_path, tmp_path / "study", unprotected=True).protection is Protection.NONE


def test_every_trial_has_the_same_path_and_finds_nothing_of_the_last(
    tmp_path: Path, offer: Callable[[Protection], None]
) -> None:
    offer(Protection.LANDLOCK)
    first = sandbox_of(tmp_path, tmp_path / "study")
    (first.script_cwd / "left").touch()
    os.chmod(first.script_cwd, 0o500)
    second = sandbox_of(tmp_path, tmp_path / "study")
    assert second.script_cwd == first.script_cwd
    assert not (second.script_cwd / "left").exists()
    remove_scratch(tmp_path / "study")
    assert os.listdir(tmp_path / "study") == []


def test_kept_and_swap_folders_outlive_a_trial(tmp_path: Path, offer: Callable[[Protection], None]) -> None:
    offer(Protection.OVERLAY)
    (tmp_path / "nvme").mkdir()
    swapped = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    profile = {"config": {"zero_optimization": {"stage": 3, "offload_param": swapped}}}
    job = dataclasses.replace(
        make_job(), script=Script(argv=("train.py",), cwd=str(tmp_path), profile=ScriptProfile.from_json(profile))
    )
    kept = str(tmp_path / "checkpoint")
    made = trial_sandbox(tmp_path / "s", job, Candidate(()), tmp_path / "s", unprotected=False, kept=[kept])
    assert made.writable == (kept, str(tmp_path / "nvme" / "zero_stage_3"))
    assert all(map(os.path.isdir, made.writable))


def test_this_machine_has_a_protection(tmp_path: Path) -> None:
    """CI has overlayfs; a container without namespaces has Landlock or nothing, and says so."""
    found = protection_of(tmp_path, tmp_path / "study", unprotected=True)
    if os.getuid() == 0 and Path("/proc/filesystems").read_text().count("overlay"):
        assert found is Protection.OVERLAY
    assert os.listdir(tmp_path / "study") == []


def test_lines_of_a_sitecustomize_hide_no_protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "print('hello\\nlandlock')"]
    monkeypatch.setattr(machine, "bound_command", lambda *_: words)
    assert protection_of(tmp_path, tmp_path / "study", unprotected=False) is Protection.LANDLOCK
