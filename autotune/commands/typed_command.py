"""Effects of a typed command on this call: variables set from now on, and the number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.typed import Typed, read_command


def typed_command(
    words: Sequence[str], maps: Sequence[str], worst_case: bool = False, ds_config: Path | None = None
) -> Typed:
    """Parse the words typed after `--`, and set their variables in this process, as a shell sets them for the command.

    Raises:
        UserError: see `read_command`.
    """
    typed = read_command(words, maps, worst_case, ds_config)
    os.environ.update(typed.variables)
    return typed


def ranks_asked_for(gpus: int | None, typed: Typed, device: str) -> int | None:
    """Return the requested number of GPUs; None if neither the call nor the command gives it.

    Args:
        gpus: value of `--gpus`.
        device: value of `--device`.

    Raises:
        UserError: the two numbers differ, or the script shows its ranks fewer GPUs.
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
    """Return the number of GPUs in a value of CUDA_VISIBLE_DEVICES."""
    return sum(1 for one in devices.split(",") if one.strip()[:1].isdigit() or one.startswith(("GPU-", "MIG-")))


def own_variables_note(typed: Typed) -> list[str]:
    """Return a line about the variables that the script's code sets, which ranks have from their start; empty if it sets none."""
    names = ", ".join(sorted(typed.own))
    return [f"{typed.script.target} sets {names} itself: ranks have that from their start"] if names else []
