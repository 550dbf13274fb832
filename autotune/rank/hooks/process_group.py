"""torch.distributed: the script's process group is the one that its rank has joined already, and leaves by itself.

Two trials on a machine could meet at a port that a script chooses; the ranks of one trial meet in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """A second `init_process_group` sets the timeout that it asks for and does nothing else; in torch it is an error. In a
    measurement `destroy_process_group` does nothing either: after a script's last line the ranks still compare their
    clocks."""
    import torch

    def init_process_group(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            original(*args, **kwargs)
            return
        timeout = args[2] if len(args) > 2 else kwargs.get("timeout")  # (backend, init_method, timeout, …)
        if timeout is not None and not context.quiet:  # a training's; a measurement is watched from outside
            torch.distributed.distributed_c10d._set_pg_timeout(timeout)

    context.patches.wrap(torch.distributed.distributed_c10d, "init_process_group", init_process_group)
    context.patches.wrap(torch.distributed, "init_process_group", init_process_group)
    if not context.quiet:
        return

    def destroy_process_group(original: Callable[..., Any], /, group: Any = None) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            original(group)

    context.patches.wrap(torch.distributed.distributed_c10d, "destroy_process_group", destroy_process_group)
    context.patches.wrap(torch.distributed, "destroy_process_group", destroy_process_group)
