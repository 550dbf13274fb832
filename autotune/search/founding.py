"""Write a study's first attributes. They are written one by one, so a killed process may leave only some of them."""

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

_NEEDED = ("fingerprint", "hardware", "space")  # required to read a study
_FIRST = (*_NEEDED, "python")
_LAST = "objective"  # written last, which marks the metadata as complete
_FOUNDING_SECONDS = 3.0  # within which the creator of a new study writes its metadata


def found(study: optuna.Study, mark: dict[str, Any], hardware: Hardware, space: SearchSpace) -> None:
    """Store a study's metadata.

    Args:
        study: the new study.
        mark: its fingerprint.
        hardware: its machine.
        space: its search space.
    """
    first = {"fingerprint": mark, "hardware": hardware.to_json(), "space": space.text, "python": other_python()}
    for key, value in {**first, _LAST: "samples per second, all ranks"}.items():
        set_attribute(study, key, value)


def await_founding(study: optuna.Study) -> bool:
    """Wait for the metadata of a new study, and return False if its creator ended before it wrote them.

    Any tuner may then write the metadata. A study with trials, or of another program, returns True.
    """
    until = time.monotonic() + _FOUNDING_SECONDS
    while _LAST not in study.user_attrs and not study.get_trials(deepcopy=False):
        if not _ours(study):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _ours(study: optuna.Study) -> bool:
    """Return True if a study without trials may be an autotune study with incomplete metadata.

    Pieces of a long attribute have names that begin with its name.
    """
    return study.direction is StudyDirection.MAXIMIZE and all(key.startswith(_FIRST) for key in study.user_attrs)


def check_founded(study: optuna.Study, shown: str) -> None:
    """Raise UserError if a study cannot be read: autotune did not create it, or its creator ended too early."""
    told = attributes(study)
    if all(key in told for key in _NEEDED):
        return
    if await_founding(study):
        raise UserError(f"{shown} was not made by autotune")
    raise UserError(f"{shown} was begun by a run that died before its first trial: run it again")
