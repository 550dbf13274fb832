"""Trials read as rows are the trials that Optuna reads, and cost a fixed number of statements."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import event

from autotune.commands.study_output import write_study
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.results import tables
from autotune.search.study import StudyStore
from autotune.search.trial_rows import RowStorage, StoredAttributes, StoredTrial
from autotune.search.trials import record_of
from tests.cli_call import call
from tests.conftest import make_candidate
from tests.studies import study_of_every_kind


@pytest.fixture
def store(tmp_path: Path) -> StudyStore:
    """A study with a trial of every kind, one that ran above the ceiling, and one that runs."""
    found = study_of_every_kind(tmp_path / "runs")
    found.start(make_candidate(3, 9), load_space("cpu_demo"))
    return found


def backend(store: StudyStore) -> Any:
    return store.study._storage._backend  # type: ignore[attr-defined]


@pytest.mark.parametrize(("included", "greater"), [(set(), -1), ({1, 3}, 4), (set(), 4), ({1, 99}, 999)])
def test_rows_give_the_trials_that_optuna_gives(store: StudyStore, included: set[int], greater: int) -> None:
    assert isinstance(backend(store), RowStorage)
    asked = (store.study._study_id, None, included, greater)
    theirs = optuna.storages.RDBStorage._get_trials(backend(store), *asked)
    ours = backend(store)._get_trials(*asked)
    assert ours == theirs
    assert [list(one.params) for one in ours] == [list(one.params) for one in theirs], "in the same order"


def test_a_study_that_is_gone_is_a_key_error_as_optuna_s(store: StudyStore) -> None:
    with pytest.raises(KeyError):
        backend(store)._get_trials(99, None, set(), -1)


def statements(store: StudyStore) -> int:
    """That reading all trials takes."""
    seen: list[str] = []
    event.listen(backend(store).engine, "before_cursor_execute", lambda *told: seen.append(told[2]))
    backend(store)._get_trials(store.study._study_id, None, set(), -1)
    return len(seen)


def test_more_trials_take_no_more_statements(store: StudyStore) -> None:
    few = statements(store)
    for size in range(10):
        store.start(make_candidate(1, 1 + size), None)
    assert statements(store) == few


def test_a_record_is_made_once_and_changes_while_its_trial_runs(store: StudyStore) -> None:
    before = store.records()
    assert before == [record for trial in store.study.trials if (record := record_of(trial))]
    assert all(a is b for a, b in zip(before[:-1], store.records()[:-1], strict=True))
    running = before[-1].number
    assert before[-1].outcome is None
    store.finish(running, Outcome(OutcomeKind.INVALID, reason="refused"))
    ended = store.records()[-1]
    assert (ended.number, ended.outcome and ended.outcome.reason) == (running, "refused")


def test_pages_and_tables_are_those_of_optuna_and_rich(
    store: StudyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` and `report`, with every fast way taken and with none."""
    monkeypatch.chdir(tmp_path)

    def outputs() -> tuple[str, str, str]:
        write_study(StudyStore.load("s"), tmp_path / "page.html")
        shown = call(monkeypatch, capsys, "show", "s")[1], call(monkeypatch, capsys, "show", "s", "--json")[1]
        return *shown, (tmp_path / "page.html").read_text()

    monkeypatch.setattr(tables, "_FEW_ROWS", 0)
    fast = outputs()
    assert "oom_device" in fast[0]
    monkeypatch.setattr(tables, "_FEW_ROWS", 10**9)
    monkeypatch.setattr(RowStorage, "_get_trials", optuna.storages.RDBStorage._get_trials)
    assert outputs() == fast


def test_fields_of_ended_trials_are_read_again_when_they_are_needed(store: StudyStore) -> None:
    trials = backend(store)._get_trials(store.study._study_id, None, set(), -1)
    ended = [one for one in trials if one.state.is_finished()]
    assert all(type(one) is StoredTrial and not vars(one) for one in ended)
    whole = [pickle.loads(pickle.dumps(one)) for one in ended]
    assert {type(one) for one in (*whole, *copy.deepcopy(ended))} == {optuna.trial.FrozenTrial}
    backend(store)._fields = {}
    seen: list[str] = []
    event.listen(backend(store).engine, "before_cursor_execute", lambda *told: seen.append(told[2]))
    assert ended == whole
    assert ended[0].params == whole[0].params
    assert 0 < len(seen) < 2 * statements(store), "a block of trials takes as many statements as all"
    assert not hasattr(ended[0], "no_field")


def test_finished_trials_keep_their_attributes_as_texts(store: StudyStore) -> None:
    trials = backend(store)._get_trials(store.study._study_id, None, set(), -1)
    for trial in trials:
        assert isinstance(trial.user_attrs, StoredAttributes) == trial.state.is_finished()
    kept = next(trial.user_attrs for trial in trials if trial.state.is_finished())
    kept["candidate"].clear()
    assert kept["candidate"], "each read parses anew"
    assert kept.get("no such") is None


def test_an_attribute_can_be_set_on_a_copy_only(store: StudyStore) -> None:
    """A trial that is not copied would lose it once other trials are read."""
    ended = [one for one in store.study.get_trials(deepcopy=False) if one.state.is_finished()]
    with pytest.raises(TypeError):
        ended[0].set_user_attr("mine", 1)
    first, second = copy.deepcopy(ended[:2])
    first.set_user_attr("mine", {"note": 1})
    assert (first.user_attrs["mine"], "mine" in second.user_attrs) == ({"note": 1}, False)
    assert first.user_attrs.keys() - {"mine"} == ended[0].user_attrs.keys()
