"""What a script that is measured sees of the folder it is called from."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from autotune.executors.scratch import clear, scratch_folder
from autotune.problem.candidate import Candidate
from autotune.problem.script import Script
from autotune.problem.typed import read_command
from tests.conftest import make_job


def shown(cwd: Path, study: Path) -> Path:
    (cwd / "train.py").write_text("")
    script = Script(argv=(str(cwd / "train.py"),), cwd=str(cwd))
    return scratch_folder(study, dataclasses.replace(make_job(), script=script), Candidate(()), study)


def seen(cwd: Path, study: Path) -> dict[str, str]:
    """Every entry, and where it leads; what is no link is a folder."""
    root = shown(cwd, study)
    entries = [path for path in root.rglob("*") if path.is_symlink() or not any(path.iterdir())]
    return {str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else "" for path in entries}


def linked(folder: Path, *names: str) -> dict[str, str]:
    return {name: str(folder / name) for name in names}


def test_everything_but_the_study_and_what_holds_it_is_a_folder_of_links(tmp_path: Path) -> None:
    """`runs/` is a usual place for people's own checkpoints too."""
    (tmp_path / "data").mkdir()
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    (tmp_path / "runs" / "mine").mkdir()
    assert seen(tmp_path, tmp_path / "runs" / "mine") == linked(tmp_path, "data", "train.py", "runs/sft")


def test_a_study_at_any_depth(tmp_path: Path) -> None:
    study = tmp_path / "a" / "b" / "c" / "mine"
    study.mkdir(parents=True)
    for name in ("a/one", "a/b/two"):
        (tmp_path / name).write_text("")
    assert seen(tmp_path, study) == {**linked(tmp_path, "a/one", "a/b/two", "train.py"), "a/b/c": ""}


def test_a_study_elsewhere_is_hidden_behind_a_link_too(tmp_path: Path) -> None:
    cwd, far = tmp_path / "project", tmp_path / "far"
    (far / "mine").mkdir(parents=True)
    (far / "sft").mkdir()
    cwd.mkdir()
    (cwd / "runs").symlink_to(far)
    (cwd / "weights").symlink_to(tmp_path / "gone")
    (cwd / "study").symlink_to(far / "mine")
    (cwd / "trials").symlink_to(far / "mine" / "trials")
    assert seen(cwd, far / "mine") == linked(cwd, "train.py", "weights", "runs/sft")


def test_links_that_lead_around_in_circles(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "up").symlink_to(tmp_path)
    (tmp_path / "here").symlink_to(".")
    (tmp_path / "also").symlink_to(tmp_path / "runs")
    assert seen(tmp_path, tmp_path / "runs" / "mine") == {**linked(tmp_path, "train.py"), "runs": ""}


def test_a_link_to_a_neighbour_is_one_again(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "latest").symlink_to("step-5")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    found = seen(tmp_path, tmp_path / "runs" / "mine")
    assert (found["latest"], found["step-5"]) == ("step-5", str(tmp_path / "step-5"))


def test_called_from_inside_the_study(tmp_path: Path) -> None:
    (tmp_path / "trials" / "0").mkdir(parents=True)
    assert set(seen(tmp_path, tmp_path)) == {"train.py", "trials"}


def test_a_folder_that_is_a_link_itself(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "runs" / "mine").mkdir(parents=True)
    link.symlink_to(real)
    assert seen(link, link / "runs" / "mine") == {**linked(link, "train.py"), "runs": ""}


def test_the_output_folder_that_a_file_of_arguments_names_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's copy of the file names another folder, which holds what the user's does."""
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "vocab.json").write_text("{}")
    (tmp_path / "project" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    for named in ("../elsewhere", str(tmp_path / "elsewhere"), "../nowhere"):
        (tmp_path / "project" / "mine.yaml").write_text(f"output_dir: {named}\n")
        found = read_command(["train.py", "mine.yaml"], [])
        job = dataclasses.replace(make_job(), script=found.script)
        scratch = scratch_folder(tmp_path / "study", job, Candidate(()), tmp_path / "study")
        shown_there = scratch / ".autotune-output"
        expected = [] if "nowhere" in named else [shown_there / "vocab.json"]
        assert list(shown_there.glob("*")) == expected


# -- the folders above -----------------------------------------------------------------------------------------------------


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Where a user calls from, in a project, below a home folder."""
    home = tmp_path.resolve() / "home"
    for name in ("proj/data/train.json", "proj/out/log.txt", "proj/lib.py", "proj/examples/x", "elsewhere/y"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    return home / "proj" / "examples"


@pytest.mark.parametrize("study", ["proj/examples/runs/mine", "proj/runs/mine", "far/mine"])
def test_the_folders_above_are_where_the_user_has_them(examples: Path, study: str) -> None:
    home = examples.parents[1]
    (home / study).mkdir(parents=True)
    (home / study).with_name("sft").touch()
    (home / "current").symlink_to("proj/examples")
    found = shown(examples, home / study)
    assert (found.name, found.parent.name, found.parents[1].name) == ("examples", "proj", "home")
    for name in ("../data/train.json", "../lib.py", "../../elsewhere/y", "x"):
        assert (found / name).read_text() == (examples / name).read_text()
    assert not any((found.parent / name).is_symlink() for name in (".", "..", "examples"))
    ours = found.parents[1] / study
    assert not ours.exists(), "no script sees the study"
    assert ours.with_name("sft").exists()


def test_what_may_be_shown_of_the_folders_above_is_bounded(
    examples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("autotune.executors.scratch._MOST_BESIDE", 3)
    monkeypatch.setattr("autotune.executors.scratch._MOST_PARENTS", 2)
    found = shown(examples, tmp_path / "study")
    assert sorted(os.listdir(found.parent)) == ["examples"], "the project has four entries"
    assert sorted(os.listdir(found.parents[1])) == [".autotune-links", "elsewhere", "proj"]
    assert found.parents[2] == (tmp_path / "study").resolve()


def test_a_folder_above_that_cannot_be_read_is_passed_through(
    examples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: str) -> object:
        if str(path) == str(examples.parent):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    found = shown(examples, tmp_path / "study")
    assert os.listdir(found.parent) == ["examples"]
    assert (found / "../../elsewhere/y").read_text() == "elsewhere/y"


def test_the_root_folder_is_never_shown(tmp_path: Path) -> None:
    job = dataclasses.replace(make_job(), script=Script(argv=("/train.py",), cwd="/tmp"))
    found = scratch_folder(tmp_path / "study", job, Candidate(()), tmp_path / "study")
    assert found == (tmp_path / "study" / "scratch").resolve()


# -- one trial after another -----------------------------------------------------------------------------------------------


def test_every_trial_has_the_same_path_and_finds_nothing_of_the_last(examples: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    first = shown(examples, study)
    (first / "mine").write_text("")
    (first.parent / "out").unlink()
    assert shown(examples, study) == first
    assert not (first / "mine").exists()
    assert (first / "../out/log.txt").exists()
    clear(study)
    assert list(study.iterdir()) == []
    clear(study)
    assert (examples / "../out/log.txt").exists()


def test_what_cannot_be_removed_is_in_nobodys_way(
    examples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trial was killed while it was cleaned away, or a network disk keeps a file that is open."""
    study = tmp_path / "study"
    (shown(examples, study) / "mine").write_text("")
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", lambda *_, **__: None)
        clear(study)
        assert len(list(study.glob("*/**/mine"))) == 1
        assert not (shown(examples, study) / "mine").exists()
    clear(study)
    assert list(study.iterdir()) == []
