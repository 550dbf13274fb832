"""What a typed command says of this call: variables that hold from here on, and how many GPUs are meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.typed import Typed, read_command


def typed_command(
    words: Sequence[str], maps: Sequence[str], worst_case: bool = False, ds_config: Path | None = None
) -> Typed:
    """What was typed after `--`; its variables are this process's from here on, as they are the command's in a shell.

    Raises:
        UserError: see `read_command`.
    """
    typed = read_command(words, maps, worst_case, ds_config)
    os.environ.update(typed.variables)
    return typed


def ranks_asked_for(gpus: int | None, typed: Typed) -> int | None:
    """How many GPUs are meant; None where neither the call nor the command says it.

    Args:
        gpus: as `--gpus` says.

    Raises:
        UserError: the two say different numbers.
    """
    if typed.ranks is None:
        return gpus
    if gpus not in (None, typed.ranks):
        raise UserError(f"--gpus {gpus} beside `{typed.said}`: leave one of them out, or give the same number")
    return typed.ranks
