"""Exchange JSON lines over a socket.

Ranks send the messages of `RANK_MESSAGES`. The parent sends `measure`, `certify`, `checkpoint` and `stop`.

Pickle is not used: a rank may run the user's code, and its messages must not execute anything here. That code may also write
to the socket, so the parent checks the shape of each message, and a malformed one is an error of its rank.
"""

from __future__ import annotations

import contextlib
import io
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
MAX_LINE_BYTES = 8 * 2**20

# -- shapes of messages ------------------------------------------------------------------------------------------------

MALFORMED = "malformed"  # type of the message that stands for a line that is none; `text` is the reason

_PEAKS = dict.fromkeys(
    (
        "allocated_bytes?",
        "reserved_bytes?",
        "data_bytes?",
        "overhead_bytes?",
        "host_bytes?",
        "pinned_bytes?",
        "retries?",
    ),
    int,
)
_TRACE = {"steps": [dict], "stage": int, "precision": str, "accumulation": int, "missing?": str}
# Fields that the parent reads of each type of a rank's message. A name with `?` may be missing or null, and `float` stands
# for any finite number.
RANK_MESSAGES: dict[str, dict[str, Any]] = {
    "hello": {"rank": int, "pid": int},
    "store": {"port": int, "scripts_port": int},
    "device": {"uuid?": str, "outside_bytes?": int},
    "phase": {"phase": str},
    "progress": {"steps?": int, "micro_batches?": int},
    "pulse": {"moved": bool, "where": str, "waits": bool, "compiles?": bool},
    "facts": {"accumulation?": int, "micro_batch?": int, "config?": dict},
    "unbuilt": {"op": str},
    "measured": {
        **_PEAKS,
        "step_seconds?": [float],
        "warmup_steps?": int,
        "warmup_seconds?": float,
        "measured_seconds?": float,
        "gb_per_s?": float,
        "tokens?": float,
        "live_bytes?": {str: int},
        "facts?": {"accumulation?": int, "micro_batch?": int},
        "trace?": _TRACE,
    },
    "loaded": _PEAKS,
    "output": {"folder": str},
    "checkpoints": {"folder": str, "ledger": dict},
    "resumed": {"path": str},
    "traced": {"trace?": _TRACE},
    "error": {
        "kinds?": [str],
        "text?": str,
        "traceback?": str,
        "file?": str,
        "files?": [str],
        "phase?": str,
        "rank?": int,
        "errnos?": [int],
        "cause?": str,
        "full_disk?": str,
        "numbers?": {"total_bytes?": int, "free_bytes?": int, "reserved_bytes?": int},
    },
    "bye": {"code?": int, "steps?": int},
}


def malformed(message: Message) -> str:
    """Return why a rank's message cannot be used, or an empty text. Types that the parent does not read have any shape."""
    verb = message["type"]
    if verb == MALFORMED:
        return str(message["text"])
    wrong = _misfit(message, RANK_MESSAGES.get(verb, {}), verb)
    return f"{wrong} has an unexpected value" if wrong else ""


def _misfit(value: Any, shape: Any, name: str) -> str:
    """Return the name of the first part of a JSON value that does not have the shape, or an empty text."""
    if isinstance(shape, type):
        fits = isinstance(value, _KINDS.get(shape, shape))
        if fits and shape in (int, float):
            fits = not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER
        return "" if fits else name
    if not isinstance(value, type(shape)):
        return name
    if isinstance(shape, list):
        parts = [(one, shape[0], f"{name}[{at}]") for at, one in enumerate(value)]
    elif str in shape:
        parts = [(one, shape[str], f"{name}.{key}") for key, one in value.items()]
    else:
        known = [(key.rstrip("?"), inner, key.endswith("?")) for key, inner in shape.items()]
        parts = [
            (value.get(key), inner, f"{name}.{key}")
            for key, inner, optional in known
            if not optional or value.get(key) is not None
        ]
    found = (_misfit(*part) for part in parts)
    return next((one for one in found if one), "")


_KINDS: dict[type, Any] = {float: (int, float)}
_LARGEST_NUMBER = 2**63  # of SQLite's integers; excludes infinity and NaN

# -- channels ----------------------------------------------------------------------------------------------------------


class Channel:
    """One end of a connection with JSON lines: a socket, or a file to read and one to write.

    A line that is no message arrives as a `MALFORMED` message.

    Args:
        patience_seconds: time to wait for a peer that accepts nothing, then the channel is closed; None: without an end.
    """

    max_line_bytes = MAX_LINE_BYTES
    closed = False
    _buffer = b""
    _skipping = False  # the rest of a line that is too long

    def __init__(
        self, reads: socket.socket | io.FileIO, writes: io.FileIO | None = None, patience_seconds: float | None = None
    ) -> None:
        self._reads, self._writes, self._patience_seconds = reads, writes or reads, patience_seconds
        self._sending = threading.Lock()  # a rank's heartbeat thread sends in parallel with its main thread
        os.set_blocking(self._writes.fileno(), False)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return this process's end, and the socket for the other process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the file descriptor that is read, for `select`."""
        return self._reads.fileno()

    @property
    def peer_pid(self) -> int:
        """Return the process that has connected this Unix socket, by its id in this process's PID namespace: unix(7)."""
        assert isinstance(self._reads, socket.socket)
        credentials = struct.calcsize("3i")
        found = self._reads.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials)
        return int(struct.unpack("3i", found)[0])

    def send(self, verb: str, **fields: Any) -> None:
        """Send one message. A closed connection is only noticed by reading, since the peer's last words may be unread.

        Raises:
            ValueError: the message is larger than `max_line_bytes`.
        """
        left = memoryview(self._line(verb, fields))
        with contextlib.suppress(OSError), self._sending:
            while left and not self.closed:
                if not select.select([], [self._writes], [], self._patience_seconds)[1]:
                    self.closed = True
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(self._writes.fileno(), left[:65536]) :]

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
            data = os.read(self.fileno(), 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
        self._buffer += data

    def _take(self) -> Message | None:
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            skipped, self._skipping = self._skipping, False
            message = None if skipped else self._parse(line)
            if message is not None:
                return message
        if self._skipping or len(self._buffer) > self.max_line_bytes:
            first, self._skipping, self._buffer = not self._skipping, True, b""
            if first:
                return {"type": MALFORMED, "text": f"a line of more than {self.max_line_bytes >> 20} MiB"}
        return None

    def _line(self, verb: str, fields: Message) -> bytes:
        line = json.dumps({"type": verb, **fields}, default=str).encode() + b"\n"
        if len(line) > self.max_line_bytes:
            size, most = len(line) >> 20, self.max_line_bytes >> 20
            raise ValueError(f"a {verb} message has {size} MiB, and at most {most} MiB can be sent")
        return line

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
        """Close the connection."""
        self.closed = True
        self._reads.close()
        self._writes.close()


class Stream(Channel):
    """Channel between the tuner and an agent. A line may have the messages of all ranks of a node."""

    max_line_bytes = 64 * MAX_LINE_BYTES

    @classmethod
    def of_this_process(cls, patience_seconds: float) -> Stream:
        """Return a stream over standard input and output, and redirect both for all other code."""
        reads, writes = io.FileIO(os.dup(0)), io.FileIO(os.dup(1), "w")
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        os.dup2(2, 1)  # prints of other code go to standard error
        return cls(reads, writes, patience_seconds)
