"""Keep outcomes that could not be stored because the database was unavailable.

The study's folder holds them for the next call.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import optuna

from autotune.files import write_atomically
from autotune.problem.outcome import Outcome
from autotune.search.records import OUTCOME, TUNER
from autotune.search.storage import open_storage

_NAME = "unsaved-*.json"


class MeasuredHere:
    """Numbers of the trials that this process measured, and of those that are only in the study's folder."""

    def __init__(self) -> None:
        self.ended, self.in_folder = set[int](), set[int]()

    def what_is_left(self, study: str, storage: str) -> str:
        """Return which of these trials a later call will find, after reading the storage.

        Args:
            study: the study's name.
            storage: the URL of the study's database.
        """
        if not self.ended:
            return "nothing was measured in this call"
        try:
            opened = optuna.load_study(study_name=study, storage=open_storage(storage, reading=True))
            stored = {one.number for one in opened.get_trials(deepcopy=False) if OUTCOME in one.user_attrs}
        except Exception:  # any error of a failing storage
            if self.ended == self.in_folder:
                return "what was measured is kept"
            return "what was measured cannot be read back now"
        if lost := len(self.ended - stored - self.in_folder):
            return f"{lost} of {len(self.ended)} measured trials could not be stored and will be measured again"
        return "what was measured is kept"


@contextmanager
def kept_if_it_fails(folder: Path | None, trial: optuna.Trial, outcome: Outcome, here: MeasuredHere) -> Iterator[None]:
    """Keep a trial's outcome in the folder, if writable, when the block that stores it fails.

    Args:
        folder: the study's folder; None keeps nothing.
        trial: the trial.
        outcome: its outcome.
        here: receives the trial's number.
    """
    number, tuner = trial.number, trial.user_attrs.get(TUNER)
    if outcome.ok:
        here.ended.add(number)
    try:
        yield
    except BaseException as error:  # also a second Ctrl-C during the wait for the database
        if folder is not None and tuner and outcome.kind.says_something_of_the_candidate:
            kept = {"number": number, "tuner": tuner, "outcome": outcome.to_json()}
            try:
                name = _NAME.replace("*", f"{tuner.rpartition('/')[2]}-{number}")  # the random word of the tuner's name
                write_atomically(folder / name, json.dumps(kept) + "\n")
            except OSError:
                raise error from None
            here.in_folder.add(number)
        raise


def what_was_kept(folder: Path | None, study: optuna.Study) -> Iterator[tuple[optuna.Trial, Outcome]]:
    """Yield trials with outcomes that earlier calls left in the folder.

    Each is passed to one call, once. Files of another study with the same name are deleted.
    """
    for path in sorted(folder.glob(_NAME)) if folder is not None else []:
        try:
            file = path.open("r+", encoding="utf-8")  # NFS grants an exclusive lock only on a writable file
        except OSError:  # another call was faster, or another user owns the file
            continue
        with file:
            if not _taken(file, path):
                continue
            try:
                kept = json.load(file)
                number, tuner, outcome = int(kept["number"]), kept["tuner"], Outcome.from_json(kept["outcome"])
            except (OSError, ValueError, KeyError, TypeError):  # not a file of autotune
                continue
            trial = next((trial for trial in study.get_trials(deepcopy=False) if trial.number == number), None)
            if trial is not None and trial.user_attrs.get(TUNER) == tuner and OUTCOME not in trial.user_attrs:
                yield optuna.Trial(study, trial._trial_id), outcome
            with suppress(OSError):
                # deleted only after the outcome is stored, so that a killed call leaves it to the next one
                path.unlink()


def _taken(file: TextIO, path: Path) -> bool:
    """Return True if this call has locked the file and no other call has processed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Without locks, the call that deletes the file owns it. The outcome is lost if that call is killed now.
    except OSError:
        with suppress(OSError):
            path.unlink()
            return True
        return False
    with suppress(OSError):
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    return False
