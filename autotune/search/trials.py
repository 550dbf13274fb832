"""A trial as it is stored: begun, ended, and closed for somebody else who died in it."""

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

_BEGINNERS = 8  # tuners, each with a space of its own, that may begin a study's first trials at once


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
    """Stores in one step that a candidate is being tried.

    Args:
        space: whose values Optuna is told; None: those of the candidate alone.
        claim: only that it is claimed; `confirm` makes a trial of it, `withdraw` nothing.
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
        except ValueError:  # meanwhile another tuner, with another space, has told the database of other choices
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def _stored_distributions(study: optuna.Study) -> dict[str, BaseDistribution]:
    """By name, as the study's first trial with it has it."""
    found: dict[str, BaseDistribution] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, kind in trial.distributions.items():
            found.setdefault(name, kind)
    return found


def confirm(trial: optuna.Trial, candidate: Candidate) -> None:
    trial.set_user_attr(CANDIDATE, dict(candidate.knobs))


def withdraw(study: optuna.Study, trial: optuna.Trial | FrozenTrial) -> None:
    """A claim that came too late leaves no Record."""
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
    """Whether somebody else has claimed the same before, and is at it or has finished it meanwhile."""
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
    """Stores how a trial ended; False where that is too late: another tuner has taken this one for dead, and closed it.

    The outcome is stored before the trial's state, which nobody can change afterwards: whoever is killed in between loses
    nothing, and neither does who is closed in between.
    """
    try:
        trial.set_user_attr(OUTCOME, outcome.to_json())
    except UpdateFinishedTrialError:
        return False
    try:
        for name, value in flat(outcome, hardware).items():
            trial.set_user_attr(name, value)
        end_as_stored(study, trial, outcome, hardware)
    except (UpdateFinishedTrialError, ValueError):  # Optuna's own word for a trial that is told twice
        if not study._storage.get_trial(trial._trial_id).state.is_finished():
            raise
    return True


def end_as_stored(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> None:
    """Ends a trial whose outcome is stored, as samplers are to see it."""
    if not outcome.kind.says_something_of_the_candidate:
        study.tell(trial, state=TrialState.FAIL)
        return
    tell(study, trial, outcome, hardware)


def close(study: optuna.Study, left: FrozenTrial, hardware: Hardware, outcome: Outcome) -> bool:
    """Closes what a tuner that is gone has left with that outcome; whether it was unfinished. One that was finished but for
    Optuna's state keeps its own."""
    storage, stored = study._storage, left.user_attrs.get(OUTCOME)
    with suppress(UpdateFinishedTrialError, ValueError):  # another tuner was faster, or it was not gone
        if stored is not None:
            end_as_stored(study, optuna.Trial(study, left._trial_id), Outcome.from_json(stored), hardware)
            return False
        # under a name of its own: its tuner may live, and store the outcome in this moment
        storage.set_trial_user_attr(left._trial_id, LEFT, outcome.to_json())
        storage.set_trial_state_values(left._trial_id, TrialState.FAIL)
        return True
    return False


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
