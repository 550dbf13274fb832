"""What was measured and could not be stored, since the database was away: kept in the study's folder for the next call."""

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
    """Numbers of the trials that this process measured, and of those that only the study's folder keeps."""

    def __init__(self) -> None:
        self.ended, self.in_folder = set[int](), set[int]()

    def what_is_left(self, study: str, storage: str) -> str:
        """Return what a later call will find of these trials, after a look at the storage.

        Args:
            storage: the URL of the study's database.
        """
        if not self.ended:
            return "nothing was measured in this call"
        try:
            opened = optuna.load_study(study_name=study, storage=open_storage(storage, reading=True))
            stored = {one.number for one in opened.get_trials(deepcopy=False) if OUTCOME in one.user_attrs}
        except Exception:  # whatever a storage that fails raises
            if self.ended == self.in_folder:
                return "what was measured is kept"
            return "what was measured cannot be read back now"
        if lost := len(self.ended - stored - self.in_folder):
            return f"{lost} of {len(self.ended)} measured trials could not be stored and will be measured again"
        return "what was measured is kept"


@contextmanager
def kept_if_it_fails(folder: Path | None, trial: optuna.Trial, outcome: Outcome, here: MeasuredHere) -> Iterator[None]:
    """Storing the outcome of a trial: where it fails, the folder keeps it, if that can be written.

    Args:
        here: takes the trial's number.
    """
    number, tuner = trial.number, trial.user_attrs.get(TUNER)
    if outcome.ok:
        here.ended.add(number)
    try:
        yield
    except BaseException as error:  # a second Ctrl-C while one waits for the database, too
        if folder is not None and tuner and outcome.kind.says_something_of_the_candidate:
            kept = {"number": number, "tuner": tuner, "outcome": outcome.to_json()}
            try:
                name = _NAME.replace("*", f"{tuner.rpartition('/')[2]}-{number}")  # its own word
                write_atomically(folder / name, json.dumps(kept) + "\n")
            except OSError:
                raise error from None
            here.in_folder.add(number)
        raise


def what_was_kept(folder: Path | None, study: optuna.Study) -> Iterator[tuple[optuna.Trial, Outcome]]:
    """(trial, its Outcome) of earlier calls that could not store it and left it in the folder.

    Each is given to one call, once. Files of another study of that name are dropped.
    """
    for path in sorted(folder.glob(_NAME)) if folder is not None else []:
        try:
            file = path.open("r+", encoding="utf-8")  # NFS locks for one alone only what may be written
        except OSError:  # another call was faster, or it is somebody else's
            continue
        with file:
            if not _taken(file, path):
                continue
            try:
                kept = json.load(file)
                number, tuner, outcome = int(kept["number"]), kept["tuner"], Outcome.from_json(kept["outcome"])
            except (OSError, ValueError, KeyError, TypeError):  # no file of ours
                continue
            trial = next((trial for trial in study.get_trials(deepcopy=False) if trial.number == number), None)
            if trial is not None and trial.user_attrs.get(TUNER) == tuner and OUTCOME not in trial.user_attrs:
                yield optuna.Trial(study, trial._trial_id), outcome
            with suppress(OSError):
                path.unlink()  # now that it is stored: who is killed before that leaves it to the next call


def _taken(file: TextIO, path: Path) -> bool:
    """Whether no other call has this file in hand, or had it and is done with it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of a file system without locks: it is whose call removes it, and lost if that is killed now
        with suppress(OSError):
            path.unlink()
            return True
        return False
    with suppress(OSError):
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    return False
