"""Where the ranks of a group meet: in a file on one machine, at a port of the first of several."""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass, field
from typing import Any

_BACKLOG = 1024
LOOPBACK = "127.0.0.1"


@dataclass
class Meeting:
    """A rank's way to the others.

    On one machine that is a file: two studies there cannot meet each other. On several it is torch's TCPStore, which asks
    nobody who he is: the first rank binds it to the one address that the others use, at a port that is free, and all keys
    begin with a token that only this group knows.
    """

    number: int
    world: int
    file: str = ""
    host: str = LOOPBACK  # the first rank's machine, as the others reach it
    port: int | None = None  # None: not known yet, since this is the rank that opens it
    token: str = ""
    _listener: socket.socket | None = field(default=None, repr=False)

    @classmethod
    def of(cls, told: str | dict[str, Any], number: int, world: int) -> Meeting:
        """Of what a spec says in `store`: a file, or `host`, `port` and `token`."""
        if isinstance(told, str):
            return cls(number, world, file=told)
        return cls(number, world, host=told["host"], port=told["port"], token=told["token"])

    def open(self) -> int | None:
        """Binds the port where this is the rank to do it, and says which.

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
        """The store of torch.distributed in which the ranks find each other."""
        distributed = torch.distributed
        if self.file:
            return distributed.FileStore(self.file, self.world)
        # torch closes the descriptor, so that Python must let go of it
        served = {} if self._listener is None else {"master_listen_fd": self._listener.detach()}
        met = distributed.TCPStore(
            self.host, self.port, self.world, is_master=bool(served), timeout=timeout, wait_for_workers=False, **served
        )
        return distributed.PrefixStore(self.token, met)
