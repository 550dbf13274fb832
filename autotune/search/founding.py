"""A study's first attributes: what it is of. Written one by one, so a process that dies among them leaves some of them."""

from __future__ import annotations

import time
from typing import Any

import optuna
from optuna.study import StudyDirection

from autotune.errors import UserError
from autotune.interpreter import other_python
from autotune.problem.hardware import Hardware
from autotune.problem.space import SearchSpace
from autotune.search.attributes import attributes, set_attribute

_NEEDED = ("fingerprint", "hardware", "space")  # no study can be read without
_FIRST = (*_NEEDED, "python")
_LAST = "objective"  # of the attributes with which a study begins
_FOUNDING_SECONDS = 3.0  # within which a study that was just made says what it is of


def found(study: optuna.Study, mark: dict[str, Any], hardware: Hardware, space: SearchSpace) -> None:
    """Stores what a study is of.

    Args:
        mark: its fingerprint.
    """
    first = {"fingerprint": mark, "hardware": hardware.to_json(), "space": space.text, "python": other_python()}
    for key, value in {**first, _LAST: "samples per second, all ranks"}.items():
        set_attribute(study, key, value)


def await_founding(study: optuna.Study) -> bool:
    """Whether the study has been founded, by us or by whoever else has trials in it; waits for one that was just made. False
    where its founder is gone: then anybody may found it."""
    until = time.monotonic() + _FOUNDING_SECONDS
    while _LAST not in study.user_attrs and not study.get_trials(deepcopy=False):
        if not _ours(study):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _ours(study: optuna.Study) -> bool:
    """Whether a study without trials may be one of ours that was never founded; the pieces of a long attribute have names that
    begin with its own."""
    return study.direction is StudyDirection.MAXIMIZE and all(key.startswith(_FIRST) for key in study.user_attrs)


def check_founded(study: optuna.Study, shown: str) -> None:
    """Raises UserError where a study cannot be read: it is somebody else's, or its founder has died before it was founded."""
    told = attributes(study)
    if all(key in told for key in _NEEDED):
        return
    if await_founding(study):
        raise UserError(f"{shown} was not made by autotune")
    raise UserError(f"{shown} was begun by a run that died before its first trial: run it again")
