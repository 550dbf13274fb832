"""Sockets: a script that opens a port of its own finds it free at every start.

The kernel keeps a port for a minute after the last connection to it, unless whoever opens it says that he does not mind. A
training starts once; in a study one start follows another.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """In a measurement TCP ports are opened with SO_REUSEADDR, as most servers open theirs."""
    if not context.quiet:
        return

    def bind(original: Callable[..., Any], /, self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        original(self, address)

    context.patches.wrap(socket.socket, "bind", bind)
