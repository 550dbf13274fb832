"""`--global-batch-size`: a number of sequences, or `free`; and what the user's own DeepSpeed config says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.bounds import MOST, shown, whole_number
from autotune.errors import UserError
from autotune.problem.job import Job
from autotune.problem.own_config import global_batch_of

FREE = "free"  # none is kept: whatever is fastest


def parse_global_batch(asked: int | str | None) -> int | None:
    """Sequences an optimizer step, as asked for; None where nothing is, or `free`.

    Raises:
        UserError: it is neither.
    """
    if asked is None or asked == FREE:
        return None
    try:
        return whole_number(asked, "--global-batch-size", -MOST, MOST)  # a Job knows how many there may be
    except UserError:
        raise UserError(f"--global-batch-size {shown(asked)}: expected a number of sequences, or {FREE}") from None


def kept_batch(asked: int | str | None, config: dict[str, Any], ranks: int, file: Path | None) -> int | None:
    """Sequences an optimizer step of a named model: as asked for, else as the user's own config says; None: they are free.

    Raises:
        UserError: it is no number, or what the config says cannot be split over the ranks.
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
    """That a batch is kept which was not typed, and where it is from."""
    if asked is not None or job.global_batch_size is None or file is None:
        return []
    _, words = global_batch_of(job.base_config, job.ranks)
    return [
        f"global batch {job.global_batch_size} is kept, as {file} says ({words}); --global-batch-size {FREE} leaves it open"
    ]
