"""Rendezvous of the ranks of a group: a file on one machine, a TCP port of the first machine on several."""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass, field
from typing import Any

_BACKLOG = 1024
LOOPBACK = "127.0.0.1"


@dataclass
class Meeting:
    """Rendezvous of one rank with its peers.

    On one machine the rendezvous is a file, so two studies cannot meet. On several machines it is torch's TCPStore,
    which has no authentication. The first rank therefore binds it to the single address that its peers use, at a free
    port. All keys begin with a token that only this group knows.
    """

    number: int
    world: int
    file: str = ""
    host: str = LOOPBACK  # address of the first rank's machine, as its peers reach it
    port: int | None = None  # None if this rank opens the port, and has not done so yet
    token: str = ""
    _listener: socket.socket | None = field(default=None, repr=False)

    @classmethod
    def of(cls, told: str | dict[str, Any], number: int, world: int) -> Meeting:
        """Build from the `store` of a spec: a file, or `host`, `port` and `token`."""
        if isinstance(told, str):
            return cls(number, world, file=told)
        return cls(number, world, host=told["host"], port=told["port"], token=told["token"])

    def open(self) -> int | None:
        """Bind the port if this rank is responsible for it, and return it; otherwise return None.

        Raises:
            OSError: this machine has no such address, or it cannot be bound.
        """
        if self.file or self.number or self.port is not None:
            return None
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind, protocol)
        self._listener.bind(address)
        self._listener.listen(_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        return self.port

    def store(self, torch: Any, timeout: datetime.timedelta) -> Any:
        """Return the torch.distributed store of the rendezvous."""
        distributed = torch.distributed
        if self.file:
            return distributed.FileStore(self.file, self.world)
        # torch closes the descriptor, so Python must release it.
        served = {} if self._listener is None else {"master_listen_fd": self._listener.detach()}
        met = distributed.TCPStore(
            self.host, self.port, self.world, is_master=bool(served), timeout=timeout, wait_for_workers=False, **served
        )
        return distributed.PrefixStore(self.token, met)
