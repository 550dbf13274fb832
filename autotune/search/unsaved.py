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

_NAME = "unsaved-*.json"


@contextmanager
def kept_if_it_fails(folder: Path | None, trial: optuna.Trial, outcome: Outcome) -> Iterator[None]:
    """Storing the outcome of a trial: where it fails, the folder keeps it, if that can be written."""
    number, tuner = trial.number, trial.user_attrs.get(TUNER)
    try:
        yield
    except BaseException:  # a second Ctrl-C while one waits for the database, too
        if folder is not None and tuner and outcome.kind.says_something_of_the_candidate:
            kept = {"number": number, "tuner": tuner, "outcome": outcome.to_json()}
            with suppress(OSError):
                name = _NAME.replace("*", f"{tuner.rpartition('/')[2]}-{number}")  # its own word
                write_atomically(folder / name, json.dumps(kept) + "\n")
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
