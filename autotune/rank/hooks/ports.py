"""Hook sockets, so that a script can bind its own port at every start.

The kernel reserves a port for a minute after its last connection unless it is opened with SO_REUSEADDR. A training
starts once, but trials follow each other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """Open TCP ports with SO_REUSEADDR in a measurement, as most servers do."""
    if not context.quiet:
        return

    def bind(original: Callable[..., Any], /, self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        original(self, address)

    context.patches.wrap(socket.socket, "bind", bind)
