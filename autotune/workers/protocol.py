"""Exchange JSON lines over a socket.

Ranks report to the parent, which sends `measure`, `certify`, `checkpoint` and `stop`.

Pickle is not used: a rank may run the user's code, and its messages must not execute anything here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import threading
import time
from typing import Any

Message = dict[str, Any]
_LOOK_SECONDS = 0.5  # interval after which a closed stream is noticed

MALFORMED = "malformed"  # type of the message that stands for a line that is none; `text` is the reason

# -- channels ----------------------------------------------------------------------------------------------------------


class Channel:
    """One end of a connection with JSON lines. A line that is no message arrives as a `MALFORMED` message."""

    closed = False
    _buffer = b""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()  # a rank's heartbeat thread sends in parallel with its main thread

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return this process's end, and the socket for the other process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self.sock.fileno()

    @property
    def peer_pid(self) -> int:
        """Return the process that has connected this Unix socket, by its id in this process's PID namespace: unix(7)."""
        credentials = struct.calcsize("3i")
        found = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials)
        return int(struct.unpack("3i", found)[0])

    def send(self, verb: str, **fields: Any) -> None:
        """Send one message. A closed connection is only noticed by reading."""
        line = self._line(verb, fields)
        with contextlib.suppress(OSError), self._sending:
            self.sock.sendall(line)

    def receive(self, timeout_seconds: float | None = None) -> Message | None:
        """Return the next message, or None at the timeout or if the peer has closed (then `closed` is set)."""
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
        """Return all messages that have arrived."""
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

    def _read(self) -> bytes:
        return self.sock.recv(65536)

    def _take(self) -> Message | None:
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            return None
        self._buffer = rest
        return self._parse(line)

    def _line(self, verb: str, fields: Message) -> bytes:
        return json.dumps({"type": verb, **fields}, default=str).encode() + b"\n"

    def _parse(self, line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and isinstance(message.get("type"), str):
            return message
        start = line[:60].decode(errors="replace")
        return {"type": MALFORMED, "text": f"{start!r} is no message", "line": start}

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self.sock.close()


class Stream(Channel):
    """Channel over two pipes, or over any transport of another process's standard input and output.

    Sending closes the stream if the other side accepts nothing for `patience_seconds`.
    """

    def __init__(self, reads: int, writes: int, patience_seconds: float) -> None:
        self._reads, self._writes, self._patience_seconds = reads, writes, patience_seconds
        self._sending = threading.Lock()
        os.set_blocking(writes, False)

    def fileno(self) -> int:
        """Return the file descriptor that is read, for `select`."""
        return self._reads

    def send(self, verb: str, **fields: Any) -> None:
        """Send a message; the stream is closed if it cannot be sent in time."""
        left = memoryview(self._line(verb, fields))
        until = time.monotonic() + self._patience_seconds
        with self._sending:
            while left and not self.closed:
                try:
                    if select.select([], [self._writes], [], _LOOK_SECONDS)[1]:
                        left = left[os.write(self._writes, left[:65536]) :]
                        until = time.monotonic() + self._patience_seconds
                    elif time.monotonic() > until:
                        raise OSError("nobody reads")
                except BlockingIOError:
                    continue
                except (OSError, ValueError):
                    self.closed = True

    def _read(self) -> bytes:
        return os.read(self._reads, 65536)

    def close(self) -> None:
        """Mark the stream as closed."""
        self.closed = True
