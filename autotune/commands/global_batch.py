"""`--global-batch-size`: a number of sequences, or `free`."""

from __future__ import annotations

from autotune.errors import UserError

FREE = "free"  # none is kept: whatever is fastest


def parse_global_batch(asked: int | str | None) -> int | None:
    """Sequences an optimizer step, as asked for; None where nothing is, or `free`.

    Raises:
        UserError: it is neither.
    """
    if asked is None or asked == FREE:
        return None
    try:
        return int(asked)
    except ValueError:
        raise UserError(f"--global-batch-size {asked}: expected a number of sequences, or {FREE}") from None
