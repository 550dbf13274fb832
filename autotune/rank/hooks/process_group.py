"""torch.distributed: the script's process group is the one that its rank has joined already, and leaves by itself.

Two trials on a machine could meet at a port that a script chooses; the ranks of one trial meet in a file.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """A second `init_process_group` raises the timeout to what it asks for and does nothing else; in torch it is an error.
    In a measurement `destroy_process_group` does nothing either: after a script's last line the ranks still compare their
    clocks."""
    import deepspeed
    import torch

    def init_process_group(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            original(*args, **kwargs)
            return
        wait_for(context, args[2] if len(args) > 2 else kwargs.get("timeout"))  # (backend, init_method, timeout, …)

    def init_distributed(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        wait_for(
            context, args[4] if len(args) > 4 else kwargs.get("timeout")
        )  # (backend, mpi, port, verbose, timeout, …)

    for owner in (torch.distributed.distributed_c10d, torch.distributed):
        context.patches.wrap(owner, "init_process_group", init_process_group)
    for owner in (deepspeed.comm, deepspeed):
        context.patches.wrap(owner, "init_distributed", init_distributed)
    if not context.quiet:
        return

    def destroy_process_group(original: Callable[..., Any], /, group: Any = None) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            original(group)

    context.patches.wrap(torch.distributed.distributed_c10d, "destroy_process_group", destroy_process_group)
    context.patches.wrap(torch.distributed, "destroy_process_group", destroy_process_group)


def wait_for(context: Context, timeout: datetime.timedelta | None) -> None:
    """Collectives of a training may wait so long for their ranks, where that is longer than before. A measurement is watched
    from outside."""
    import torch

    if timeout is not None and not context.quiet and timeout > context.collective_timeout:
        context.collective_timeout = timeout
        torch.distributed.distributed_c10d._set_pg_timeout(timeout)
