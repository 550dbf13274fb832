"""Read a database's trials as rows, and keep little of those that have ended.

Optuna creates an ORM object for every parameter and attribute, about 25 per trial, which takes most of the time to read
a large study. Its cache keeps every trial of a study. Based on Optuna 5.0.0 (`storages/_rdb/storage.py`, `_get_trials` and
`_build_frozen_trial_from_trial_model`).
"""

from __future__ import annotations

import functools
import json
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

_MOST_IDS = 500  # ids per statement; SQLite before 3.32 allows 999 variables
_BLOCK = 64  # trials that are read together when one of them is needed again

# cached: a space has few distributions, while a study stores one per parameter
_distribution = functools.lru_cache(maxsize=1024)(json_to_distribution)


class RowStorage(optuna.storages.RDBStorage):
    """Optuna's storage that reads many trials at once as rows.

    The cache of Optuna gets a `StoredTrial` for each trial that has ended, without its texts.
    """

    # fields of the ended trials that were read last, by trial id
    _fields: Mapping[int, dict[str, Any]] = MappingProxyType({})

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """Return the study's trials with included or greater ids, with one query per table."""
        ids = {one for one in included_trial_ids if one <= trial_id_greater_than}
        if states is not None or len(ids) > _MOST_IDS:  # Optuna's cache requests neither for an autotune study
            return super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
        wanted: list[ColumnElement[bool]] = [models.TrialModel.study_id == study_id]
        if trial_id_greater_than > -1:
            wanted.append(or_(models.TrialModel.trial_id.in_(ids), models.TrialModel.trial_id > trial_id_greater_than))
        with _create_scoped_session(self.scoped_session) as session:
            models.StudyModel.find_or_raise_by_id(study_id, session)
            found = _read(session, wanted)
        if ended := _ended(found):
            self._fields = ended
        return [StoredTrial(one, self) if one._trial_id in ended else one for one in found]

    def fields(self, trial_id: int) -> dict[str, Any]:
        """Return the fields of an ended trial, by their names in Optuna's class."""
        found = self._fields
        if trial_id not in found:
            found = self._fields = self._read_block(trial_id)
        return found[trial_id]

    def _read_block(self, trial_id: int) -> dict[int, dict[str, Any]]:
        first, column = trial_id // _BLOCK * _BLOCK, models.TrialModel.trial_id
        with _create_scoped_session(self.scoped_session) as session:
            return _ended(_read(session, [column >= first, column < first + _BLOCK]))


def _ended(trials: Iterable[FrozenTrial]) -> dict[int, dict[str, Any]]:
    """Return the fields of the trials that have ended, by trial id."""
    return {one._trial_id: vars(one) for one in trials if one.state.is_finished()}


class StoredTrial(FrozenTrial):
    """A trial that has ended, whose fields are read from the database again when they are needed.

    Optuna's cache keeps an object for every trial of a study, and the fields of one take 3 KiB. Copies and pickles are
    Optuna's own trials.
    """

    __slots__ = ("_distributions", "_number", "_storage", "_trial_id", "state")

    def __init__(self, trial: FrozenTrial, storage: RowStorage) -> None:
        self._trial_id, self._number, self.state = trial._trial_id, trial.number, trial.state
        self._distributions, self._storage = trial.distributions, storage

    def __getattr__(self, name: str) -> Any:
        """Return a field that is not kept."""
        fields = {} if name.startswith("__") else self._storage.fields(self._trial_id)
        if name not in fields:
            raise AttributeError(name)
        return fields[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make one of Optuna's trials."""
        return object.__new__, (FrozenTrial,), self._storage.fields(self._trial_id)

    def __eq__(self, other: object) -> bool:
        """Return True if all fields are equal."""
        if not isinstance(other, FrozenTrial):
            return NotImplemented
        theirs = other._storage.fields(other._trial_id) if isinstance(other, StoredTrial) else vars(other)
        return self._storage.fields(self._trial_id) == theirs

    __hash__ = FrozenTrial.__hash__


class StoredAttributes(Mapping[str, Any]):
    """Attributes of a trial that has ended as stored texts, parsed when they are read.

    They cannot be set: a trial that is not copied is read-only by Optuna's contract (`get_trials(deepcopy=False)`), and its
    fields are read from the database again. Copies and pickles are dicts.
    """

    __slots__ = ("_texts",)

    def __init__(self, stored: Iterable[tuple[str, str]]) -> None:
        self._texts = dict(stored)

    def __getitem__(self, key: str) -> Any:
        """Return a parsed value, a new object for each call."""
        return json.loads(self._texts[key])

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._texts)

    def __len__(self) -> int:
        """Return the number of attributes."""
        return len(self._texts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make a dict of the same attributes."""
        return dict, (dict(self),)


@functools.lru_cache(maxsize=256)
def _distributions(stored: tuple[tuple[str, str], ...]) -> dict[str, BaseDistribution]:
    """Return distributions by name, one object for all trials with the same; finished trials are never changed."""
    return {name: _distribution(text) for name, text in stored}


def _read(session: Session, wanted: list[ColumnElement[bool]]) -> list[FrozenTrial]:
    trial, param, value = models.TrialModel, models.TrialParamModel, models.TrialValueModel
    step = models.TrialIntermediateValueModel

    def rows(model: Any, *columns: Any) -> defaultdict[int, list[Any]]:
        """Return the model's rows by trial, in stored order."""
        (key,) = model.__table__.primary_key.columns
        asked = select(model.trial_id, *columns).join(trial, model.trial_id == trial.trial_id).where(*wanted)
        found: defaultdict[int, list[Any]] = defaultdict(list)
        for trial_id, *rest in session.execute(asked.order_by(key)):
            found[trial_id].append(rest)
        return found

    def attributes(model: Any) -> defaultdict[int, list[Any]]:
        return rows(model, model.key, model.value_json)

    params = rows(param, param.param_name, param.param_value, param.distribution_json)
    values = rows(value, value.objective, value.value, value.value_type)
    steps = rows(step, step.step, step.intermediate_value, step.intermediate_value_type)
    user, system = attributes(models.TrialUserAttributeModel), attributes(models.TrialSystemAttributeModel)
    made = []
    one: Any  # Optuna's models are declared for SQLAlchemy 1
    for one in session.scalars(select(trial).where(*wanted).order_by(trial.trial_id)):
        at, finished = one.trial_id, one.state.is_finished()
        named = [(sys.intern(name), stored, text) for name, stored, text in params[at]]
        shared = _distributions(tuple((name, text) for name, _, text in named))
        kinds = shared if finished else dict(shared)
        texts = [(sys.intern(key), text) for key, text in user[at]]
        told: Any = StoredAttributes(texts) if finished else {key: json.loads(text) for key, text in texts}
        ends = sorted(values[at], key=lambda row: row[0])
        made.append(
            FrozenTrial(
                number=one.number,
                state=one.state,
                value=None,
                values=[value.stored_repr_to_value(stored, kind) for _, stored, kind in ends] or None,
                datetime_start=one.datetime_start,
                datetime_complete=one.datetime_complete,
                params={name: kinds[name].to_external_repr(stored) for name, stored, _ in named},
                distributions=kinds,
                user_attrs=told,
                system_attrs={sys.intern(key): json.loads(text) for key, text in system[at]},
                intermediate_values={
                    number: step.stored_repr_to_intermediate_value(stored, kind) for number, stored, kind in steps[at]
                },
                trial_id=at,
            )
        )
    return made
