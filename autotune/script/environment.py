"""Variables of the environment that a script's own code reads: part of its training, as its files are."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping

from autotune.masking import MASK, names_secret

# Key of a profile and of facts: variables that the script's own code has read, with their values; None if not set. The value
# of a secret is masked.
READ = "environment"
READ_INTEGERS = "environment_integers"  # key of facts: positive integers that reads of these variables gave
VARIABLE = "$"  # a variable among flags that carry knobs is written `$BATCH_SIZE`
# Variables that each session, machine or allocation sets again, those of a tracker's run, and those that only builds of ops read.
# No training depends on them.
_OF_THE_SESSION = re.compile(
    r"HOME|USER|LOGNAME|SHELL|SHLVL|PATH|PWD|OLDPWD|TERM|HOST|HOSTNAME|DISPLAY|TMPDIR|COLUMNS|LINES|LANG|CUDA_VISIBLE_DEVICES|"
    r"TORCH_EXTENSIONS_DIR|MAX_JOBS|CUDA_HOME|(?:LC|XDG|SSH|SLURM|PBS|LSB|CONDA|WANDB|MLFLOW|COMET|NEPTUNE|CLEARML|SWANLAB)_\w+"
)


def own_variables(reported: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables that come from this process's environment, of those that a rank has reported.

    Variables that a rank sets (`RANK`) have other values here. They are left out.
    """
    return {name: value for name, value in _values(reported).items() if value == reported[name]}


def changed_variables(before: Mapping[str, str | None]) -> list[str]:
    """Return a text for each variable whose value in this process differs."""
    return differing(before, _values(before))


def differing(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> list[str]:
    """Return a text for each variable that both know with another value: `BATCH_SIZE is 4 instead of 2`."""
    other = [name for name in before if name in now and now[name] != before[name]]
    return [f"{name} is {_shown(now[name])} instead of {_shown(before[name])}" for name in other]


def values_now(names: Iterable[str]) -> list[tuple[str, str | None]]:
    """Return these variables with their present values, in order."""
    return sorted(_values(names).items())


def to_set(before: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables to set before the command: those that were set, without secrets."""
    return {name: value for name, value in before.items() if value is not None and value != MASK}


def secrets_of(before: Mapping[str, str | None]) -> list[str]:
    """Return the names of the secrets that were set."""
    return [name for name, value in before.items() if value == MASK]


def _values(names: Iterable[str]) -> dict[str, str | None]:
    found = {name: os.environ.get(name) for name in names if not _OF_THE_SESSION.fullmatch(name)}
    return {name: MASK if value and names_secret(name) else value for name, value in found.items()}


def _shown(value: str | None) -> str:
    return "not set" if value is None else shlex.quote(" ".join(value.split()))[:60]
