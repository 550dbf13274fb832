"""A study whose founder died before it had said what it is of."""

from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import UserError
from autotune.problem.hardware import detect
from autotune.problem.space import load_space
from autotune.search import study
from autotune.search.storage import default_storage, open_storage
from autotune.search.study import StudyStore, wait_for_study_metadata
from tests.conftest import make_candidate, make_job

SPACE = load_space("cpu_demo")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_FOUNDING_SECONDS", 0.1)


def begun(folder: Path, **options: Any) -> tuple[StudyStore, bool]:
    return StudyStore.create_or_resume(
        "s", default_storage(folder), folder, make_job(**options), detect("cpu", 2), SPACE
    )


class Killed(BaseException):
    pass


@pytest.mark.few(2)
@pytest.mark.parametrize("after", range(5))
def test_whoever_comes_next_founds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    left = iter(range(after))
    write = study.set_attribute

    def killed(*given: Any) -> None:
        if next(left, None) is None:
            raise Killed
        write(*given)

    monkeypatch.setattr(study, "set_attribute", killed)
    with pytest.raises(Killed):
        begun(tmp_path, seq_len=64)
    monkeypatch.setattr(study, "set_attribute", write)
    if after < 3:
        with pytest.raises(UserError, match="died before its first trial: run it again"):
            StudyStore.load("s", default_storage(tmp_path))

    store, resumed = begun(tmp_path)
    assert not resumed
    assert wait_for_study_metadata(store.study)
    assert store.job == make_job(), "nothing of the one that died counts"
    store.start(make_candidate(), SPACE)
    again, resumed = begun(tmp_path)
    assert resumed
    assert len(again.records()) == 1


def test_the_study_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    storage = open_storage(default_storage(tmp_path))
    theirs = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    theirs.set_user_attr("owner", "somebody")
    with pytest.raises(UserError, match="not made by autotune"):
        begun(tmp_path)
    assert theirs.user_attrs == {"owner": "somebody"}
