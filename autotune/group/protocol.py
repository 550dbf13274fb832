"""JSON lines over a socket. Up: `device`, `phase`, `progress`, `pulse`, `measured`, `error`, `bye`. Down: `measure`, `certify`,
`checkpoint`, `stop`.

No pickle: a rank may run the user's code, and nothing it says is executed here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import threading
import time
from typing import Any

Message = dict[str, Any]
MAX_LINE_BYTES = 8 * 2**20
_LOOK_SECONDS = 0.5  # after which a stream that was closed meanwhile is noticed


class Channel:
    """One end of a conversation in JSON lines. Lines that are no JSON objects are dropped: a log may stray in."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._buffer = b""
        self._sending = threading.Lock()  # a rank's pulse speaks beside its main thread

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """This process's end, and the socket for the other process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message; a peer that is gone is noticed by reading, not here."""
        line = json.dumps({"type": kind, **fields}, default=str).encode() + b"\n"
        with contextlib.suppress(OSError), self._sending:
            self.sock.sendall(line)

    def receive(self, timeout_seconds: float | None = None) -> Message | None:
        """The next message, or None when the time is up or the peer has closed (then `closed` is set)."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            message = self._take()
            if message is not None or self.closed:
                return message
            left = deadline - time.monotonic()
            if left < 0 and timeout_seconds:
                return None
            ready, _, _ = select.select([self], [], [], None if left == math.inf else max(0.0, left))
            if not ready:
                return None
            self._fill()

    def drain(self) -> list[Message]:
        """Every message that is already here."""
        found = []
        while (message := self.receive(0)) is not None:
            found.append(message)
        return found

    def _fill(self) -> None:
        try:
            data = self._read()
        except OSError:
            data = b""
        if not data:
            self.closed = True
        self._buffer += data
        if len(self._buffer) > MAX_LINE_BYTES:
            self._buffer = b""

    def _read(self) -> bytes:
        return self.sock.recv(65536)

    def _take(self) -> Message | None:
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and isinstance(message.get("type"), str):
                return message
        return None

    def close(self) -> None:
        self.closed = True
        self.sock.close()


class Stream(Channel):
    """The same over two pipes, or over whatever carries standard input and output of a process elsewhere. Sending gives up,
    and closes, where the other side takes nothing for `patience_seconds`."""

    def __init__(self, reads: int, writes: int, patience_seconds: float) -> None:
        self._reads, self._writes, self._patience_seconds = reads, writes, patience_seconds
        self.closed = False
        self._buffer = b""
        self._sending = threading.Lock()
        os.set_blocking(writes, False)

    def fileno(self) -> int:
        return self._reads

    def send(self, kind: str, **fields: Any) -> None:
        self.give(json.dumps({"type": kind, **fields}, default=str).encode() + b"\n")

    def give(self, data: bytes, patience_seconds: float | None = None) -> bool:
        """Sends bytes as they are; whether all were taken.

        Args:
            patience_seconds: for each part of it to be taken; None: the stream's.
        """
        left, patience_seconds = memoryview(data), patience_seconds or self._patience_seconds
        until = time.monotonic() + patience_seconds
        with self._sending:
            while left and not self.closed:
                try:
                    if select.select([], [self._writes], [], _LOOK_SECONDS)[1]:
                        left = left[os.write(self._writes, left[:65536]) :]
                        until = time.monotonic() + patience_seconds
                    elif time.monotonic() > until:
                        raise OSError("nobody reads")
                except BlockingIOError:
                    continue
                except (OSError, ValueError):
                    self.closed = True
        return not left

    def feed(self, data: bytes) -> Message | None:
        """Takes what was read otherwise; the message that is in it."""
        self._buffer += data
        return self._take()

    def _read(self) -> bytes:
        return os.read(self._reads, 65536)

    def close(self) -> None:
        self.closed = True
