"""Stored trials: begin, end, and close after their tuner died."""

from __future__ import annotations

import datetime
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome
from autotune.problem.space import SearchSpace
from autotune.search.dashboard import flat, tell
from autotune.search.distributions import told
from autotune.search.records import CANDIDATE, CLAIM, LEFT, OUTCOME, ROLE, TUNER
from autotune.search.tuners import Tuners

_BEGINNERS = 8  # tuners with different spaces that may begin a study's first trials at once


def begin(
    study: optuna.Study,
    candidate: Candidate,
    space: SearchSpace | None,
    *,
    role: str,
    note: str,
    tuner: str,
    claim: bool = False,
) -> optuna.Trial:
    """Store in one step that a candidate is being tried.

    Args:
        study: the study.
        candidate: the candidate.
        space: values of this space are passed to Optuna; None passes the candidate's values only.
        role: the trial's role.
        note: reason for the trial.
        tuner: this tuner's name.
        claim: store only a claim, which `confirm` turns into a trial and `withdraw` removes.
    """
    knobs: dict[str, Any] = dict(candidate.knobs)
    attributes = {CLAIM if claim else CANDIDATE: knobs, ROLE: role, "note": note, "started": now(), TUNER: tuner}
    for left in reversed(range(_BEGINNERS)):
        parameters, kinds = told(candidate, space, _stored_distributions(study))
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=parameters, distributions=kinds, user_attrs=attributes
        )
        try:
            return optuna.Trial(study, study._storage.create_new_trial(study._study_id, template_trial=template))
        except ValueError:  # a peer tuner with another space has stored other choices since
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def _stored_distributions(study: optuna.Study) -> dict[str, BaseDistribution]:
    """Return the distributions by name, each from the first trial that has it."""
    found: dict[str, BaseDistribution] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, kind in trial.distributions.items():
            found.setdefault(name, kind)
    return found


def confirm(trial: optuna.Trial, candidate: Candidate) -> None:
    trial.set_user_attr(CANDIDATE, dict(candidate.knobs))


def withdraw(study: optuna.Study, trial: optuna.Trial | FrozenTrial) -> None:
    """Remove a claim that came too late, so that it leaves no record."""
    with suppress(UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def came_first(
    trials: Sequence[FrozenTrial],
    mine: optuna.Trial,
    candidate: Candidate,
    role: str,
    known: Container[int],
    tuners: Tuners,
) -> bool:
    """Return True if a peer tuner claimed the same candidate earlier and is measuring it or has finished."""
    knobs = dict(candidate.knobs)
    for other in trials:
        if other.number >= mine.number or other.number in known or other.user_attrs.get(ROLE) != role:
            continue
        if other.user_attrs.get(CANDIDATE, other.user_attrs.get(CLAIM)) != knobs:
            continue
        stored = other.user_attrs.get(OUTCOME)
        if stored is not None:
            if Outcome.from_json(stored).kind.says_something_of_the_candidate:
                return True
        elif not other.state.is_finished() and not tuners.is_gone(other.user_attrs.get(TUNER)):
            return True
    return False


def end(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> bool:
    """Store a trial's outcome, then its state, which cannot be changed afterwards.

    The outcome survives if this tuner is killed between the two writes, or if a peer closes the trial.

    Returns:
        False if a peer tuner has already closed the trial because this tuner's lease had expired.
    """
    try:
        trial.set_user_attr(OUTCOME, outcome.to_json())
    except UpdateFinishedTrialError:
        return False
    try:
        for name, value in flat(outcome, hardware).items():
            trial.set_user_attr(name, value)
        end_as_stored(study, trial, outcome, hardware)
    except (UpdateFinishedTrialError, ValueError):  # Optuna raises ValueError if a trial is ended twice
        if not study._storage.get_trial(trial._trial_id).state.is_finished():
            raise
    return True


def end_as_stored(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> None:
    """End a trial whose outcome is stored, in the form that samplers expect."""
    if not outcome.kind.says_something_of_the_candidate:
        study.tell(trial, state=TrialState.FAIL)
        return
    tell(study, trial, outcome, hardware)


def close(study: optuna.Study, left: FrozenTrial, hardware: Hardware, outcome: Outcome) -> bool:
    """Close a dead tuner's trial with this outcome, and return whether it was unfinished.

    A trial with a stored outcome keeps that outcome.
    """
    storage, stored = study._storage, left.user_attrs.get(OUTCOME)
    with suppress(UpdateFinishedTrialError, ValueError):  # a peer closed it first, or its tuner was alive
        if stored is not None:
            end_as_stored(study, optuna.Trial(study, left._trial_id), Outcome.from_json(stored), hardware)
            return False
        # stored under another name, because its tuner may be alive and store its outcome at this moment
        storage.set_trial_user_attr(left._trial_id, LEFT, outcome.to_json())
        storage.set_trial_state_values(left._trial_id, TrialState.FAIL)
        return True
    return False


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
