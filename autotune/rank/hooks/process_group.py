"""Hook torch.distributed and sockets: the process group that the script creates is the rank's own.

The group does not exist before, because libraries behave otherwise in it: `save_pretrained` writes on the first rank only.

Two trials on one machine could meet at a port that a script chooses. The ranks of a trial use a file instead.
"""

from __future__ import annotations

import datetime
import socket

from autotune.rank.hooks.base import Context
from autotune.rank.patches import Call


def install(context: Context) -> None:
    """Make the script's `init_process_group` join the rank's group. A second one, an error in torch, only raises the timeout.

    In a measurement `destroy_process_group` has no effect, because ranks compare their clocks after a script's last
    line.
    """
    import deepspeed
    import torch

    def initialize(call: Call) -> None:
        given = call.given
        if context.join is not None:
            joins, context.join = context.join, None  # creates the group by the same functions
            joins(given.get("backend") or given.get("dist_backend") or "")
        if "dist_backend" in given or not torch.distributed.is_initialized():
            call()
        wait_for(context, given.get("timeout"))

    for owner in (torch.distributed.distributed_c10d, torch.distributed, torch.distributed.device_mesh):
        context.patches.wrap(owner, "init_process_group", initialize)
    for owner in (deepspeed.comm, deepspeed):
        context.patches.wrap(owner, "init_distributed", initialize)
    if not context.quiet:
        return

    def destroy_process_group(call: Call) -> None:
        if call.given["group"] not in (None, torch.distributed.group.WORLD):
            call()

    context.patches.wrap(torch.distributed.distributed_c10d, "destroy_process_group", destroy_process_group)
    context.patches.wrap(torch.distributed, "destroy_process_group", destroy_process_group)


def wait_for(context: Context, timeout: datetime.timedelta | None) -> None:
    """Raise the timeout of a training's collectives if it is longer than before.

    Measurements are excluded, because the parent watches them.
    """
    import torch

    if timeout is not None and not context.quiet and timeout > context.collective_timeout:
        context.collective_timeout = timeout
        torch.distributed.distributed_c10d._set_pg_timeout(timeout)


# -- ports -------------------------------------------------------------------------------------------------------------
#
# The kernel reserves a port for a minute after its last connection unless it is opened with SO_REUSEADDR. A training
# starts once, but trials follow each other.


def install_ports(context: Context) -> None:
    """Open TCP ports with SO_REUSEADDR in a measurement, as most servers do."""
    if not context.quiet:
        return

    def bind(call: Call) -> None:
        bound: socket.socket = call.owner
        if bound.family in (socket.AF_INET, socket.AF_INET6) and bound.type == socket.SOCK_STREAM:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        call()

    context.patches.wrap(socket.socket, "bind", bind)
