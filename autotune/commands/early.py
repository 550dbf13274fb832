"""What a run would find out minutes into a search, or at its end, looked at before it begins."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import UserError
from autotune.results.targets import check_out

_SEEDS = 2**32  # numpy's generators, and so Optuna's samplers, take those below


def check_early(seed: int, out: Path | None, max_trials: int | None) -> None:
    """Checks the seed, the file that the winner is to be written to, and the number of trials.

    Raises:
        UserError: one of them is not possible.
    """
    if not 0 <= seed < _SEEDS:
        raise UserError(f"--seed {seed}: expected a whole number from 0 to {_SEEDS - 1}")
    if max_trials is not None and max_trials < 1:
        raise UserError(f"--max-trials {max_trials}: expected at least 1")
    if out is not None:
        check_out(out, makes_folders=True)
