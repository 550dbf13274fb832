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


def ranks_asked_for(gpus: int | None, typed: Typed, device: str) -> int | None:
    """How many GPUs are meant; None where neither the call nor the command says it.

    Args:
        gpus: as `--gpus` says.
        device: as `--device` says.

    Raises:
        UserError: the two say different numbers, or the script shows its ranks fewer.
    """
    if typed.ranks is not None and gpus not in (None, typed.ranks):
        raise UserError(f"--gpus {gpus} beside `{typed.said}`: leave one of them out, or give the same number")
    asked = gpus if typed.ranks is None else typed.ranks
    own = typed.own.get("CUDA_VISIBLE_DEVICES")
    if own is not None and device != "cpu" and asked is not None and asked > (shown := _shown(own)):
        said = typed.said or f"--gpus {gpus}"
        raise UserError(
            f"`{said}` beside CUDA_VISIBLE_DEVICES={own}, which {typed.script.target} sets itself: it shows {shown}; ask for "
            "as many, or take that line out"
        )
    return asked


def _shown(devices: str) -> int:
    """How many GPUs a value of CUDA_VISIBLE_DEVICES names."""
    return sum(1 for one in devices.split(",") if one.strip()[:1].isdigit() or one.startswith(("GPU-", "MIG-")))


def own_variables_note(typed: Typed) -> list[str]:
    """A line that says which variables the script's code sets, and ranks have from their start; none where there are none."""
    names = ", ".join(sorted(typed.own))
    return [f"{typed.script.target} sets {names} itself: ranks have that from their start"] if names else []
