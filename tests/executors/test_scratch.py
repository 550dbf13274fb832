"""What a script that is measured sees of the folder it is called from."""

import dataclasses
import os
from pathlib import Path

from autotune.executors.scratch import scratch_folder
from autotune.problem.candidate import Candidate
from autotune.problem.script import Script
from tests.conftest import make_job


def seen(cwd: Path, study: Path) -> dict[str, str]:
    (cwd / "train.py").write_text("")
    script = Script(argv=(str(cwd / "train.py"),), cwd=str(cwd))
    found = scratch_folder(study, dataclasses.replace(make_job(), script=script), Candidate(()))
    assert found.parent == study.resolve()
    return {entry.name: os.readlink(entry) for entry in found.iterdir()}


def test_everything_but_what_holds_the_study(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    study = tmp_path / "runs" / "mine" / "trial-1"
    study.mkdir(parents=True)
    assert seen(tmp_path, study) == {name: str(tmp_path / name) for name in ("data", "train.py")}


def test_a_study_elsewhere_hides_nothing_but_a_link_that_leads_to_it(tmp_path: Path) -> None:
    cwd, far = tmp_path / "project", tmp_path / "far"
    (far / "mine").mkdir(parents=True)
    cwd.mkdir()
    (cwd / "runs").symlink_to(far)
    (cwd / "weights").symlink_to(tmp_path / "gone")
    assert set(seen(cwd, far / "mine")) == {"train.py", "weights"}


def test_a_folder_that_is_a_link_itself(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "runs").mkdir(parents=True)
    link.symlink_to(real)
    assert seen(link, link / "runs") == {"train.py": str(link / "train.py")}
