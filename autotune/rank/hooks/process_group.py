"""torch.distributed: the script's process group is the one that its rank has joined already.

Two trials on a machine could meet at a port that a script chooses; the ranks of one trial meet in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """A second `init_process_group` does nothing; in torch it is an error."""
    import torch

    def init_process_group(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            original(*args, **kwargs)

    context.patches.wrap(torch.distributed.distributed_c10d, "init_process_group", init_process_group)
    context.patches.wrap(torch.distributed, "init_process_group", init_process_group)
