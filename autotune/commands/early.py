"""Checks before a run, of errors that would otherwise appear minutes into a search or at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.bounds import MOST, trouble, whole_number
from autotune.errors import UserError
from autotune.results.targets import check_out

_SEEDS = 2**32  # numpy's generators, and so Optuna's samplers, take seeds below this


_MOST_OF = {"gpus": 4096, "nodes": 4096, "parallel": 4096, "image_size": 65_536}  # limits of options that count things


def check_bounds(typed: Mapping[str, object]) -> None:
    """Check every number and text of a request.

    Args:
        typed: values by the names of options, with underscores.

    Raises:
        UserError: a value is out of bounds.
    """
    for name, value in typed.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, int) and not isinstance(value, bool):
            whole_number(value, option, -MOST, _MOST_OF.get(name, MOST))
        for one in value if isinstance(value, list) else [str(value) if isinstance(value, Path) else value]:
            if (why := trouble(one)) and name != "command":
                raise UserError(f"{option}: {why}")


def check_early(seed: int, out: Path | None, max_trials: int | None) -> None:
    """Check the seed, the winner's output file, and the number of trials.

    Raises:
        UserError: one of them is invalid.
    """
    if not 0 <= seed < _SEEDS:
        raise UserError(f"--seed {seed}: expected a whole number from 0 to {_SEEDS - 1}")
    if max_trials is not None and max_trials < 1:
        raise UserError(f"--max-trials {max_trials}: expected at least 1")
    if out is not None:
        check_out(out, makes_folders=True)
