"""`--global-batch-size`: a number of sequences, or `free`; and the batch in the user's own DeepSpeed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.bounds import MOST, shown, whole_number
from autotune.errors import UserError
from autotune.problem.job import Job
from autotune.problem.own_config import global_batch_of

FREE = "free"  # no batch is kept: the fastest is chosen


def parse_global_batch(asked: int | str | None) -> int | None:
    """Return the requested sequences per optimizer step; None if none is requested, or `free`.

    Raises:
        UserError: the value is neither a number nor `free`.
    """
    if asked is None or asked == FREE:
        return None
    try:
        return whole_number(asked, "--global-batch-size", -MOST, MOST)  # Job checks the bounds
    except UserError:
        raise UserError(f"--global-batch-size {shown(asked)}: expected a number of sequences, or {FREE}") from None


def kept_batch(asked: int | str | None, config: dict[str, Any], ranks: int, file: Path | None) -> int | None:
    """Return the sequences per optimizer step of a named model: as requested, or else from the user's own config; None: free.

    Raises:
        UserError: the value is no number, or the config's batch cannot be split over the ranks.
    """
    if asked is not None:
        return parse_global_batch(asked)
    batch, words = global_batch_of(config, ranks)
    if batch is not None and batch % ranks:
        near = " or ".join(str(size) for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if size)
        raise UserError(
            f"{file}: {words} cannot be split evenly over {ranks} ranks: change it, or give --global-batch-size (try {near}, or "
            f"{FREE})"
        )
    return batch


def batch_note(asked: int | str | None, job: Job, file: Path | None) -> list[str]:
    """Return a note if a batch is kept that was not typed, with its origin."""
    if asked is not None or job.global_batch_size is None or file is None:
        return []
    _, words = global_batch_of(job.base_config, job.ranks)
    return [
        f"global batch {job.global_batch_size} is kept, as {file} says ({words}); --global-batch-size {FREE} leaves it open"
    ]
