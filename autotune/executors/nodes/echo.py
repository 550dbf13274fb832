"""Copy a training's output from the nodes to standard error without blocking the producer.

A terminal after Ctrl-S or a pager may not read for hours. ssh carries the ranks' output and the agent's heartbeats over
one channel, so an unread output would block the heartbeats, and the node would be given up.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from autotune.units import format_bytes

_MOST_BYTES = 8 * 2**20  # bytes in the buffer
_PIECE_BYTES = select.PIPE_BUF  # bytes that a writable pipe accepts without blocking
_LOOK_MS = 100
_PATIENCE_SECONDS = 1.0  # seconds; wait at the end for a reader that does not read


class Echo:
    """Buffer bytes and write them in a thread.

    A full buffer drops the oldest bytes, with a note in the output.

    Args:
        descriptor: destination.
        log: log file that the note refers to.
        most_bytes: size of the buffer.
    """

    def __init__(self, descriptor: int, log: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._descriptor, self._log, self._most_bytes = descriptor, log, most_bytes
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = self._left_out_bytes = 0
        self._changed = threading.Condition()
        self._closing, self._given_up = False, False
        self._idle, self._moved_at = True, 0.0
        self._thread: threading.Thread | None = None

    def give(self, data: bytes) -> None:
        """Add bytes without blocking."""
        with self._changed:
            self._pieces.append(data)
            self._waiting_bytes += len(data)
            while self._waiting_bytes > self._most_bytes:
                gone = len(self._pieces.popleft())
                self._waiting_bytes -= gone
                self._left_out_bytes += gone
            if self._idle:
                self._idle, self._moved_at = False, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Write the remaining bytes as long as they are read."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        while self._thread is not None and self._thread.is_alive():
            self._given_up = not self._idle and time.monotonic() - self._moved_at > _PATIENCE_SECONDS
            self._thread.join(_LOOK_MS / 1000)

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            with suppress(OSError):  # the reader is gone
                self._write(memoryview(piece))

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._pieces:
                self._idle = True
                if self._closing:
                    return None
                self._changed.wait()
            if self._given_up:
                return None
            piece = self._pieces.popleft()
            self._waiting_bytes -= len(piece)
            gone, self._left_out_bytes = self._left_out_bytes, 0
        note = f"\n[autotune: {format_bytes(gone)} were not read in time and are left out here: {self._log} has the end of all]\n"
        return note.encode() + piece if gone else piece

    def _write(self, left: memoryview) -> None:
        taking = select.poll()
        taking.register(self._descriptor, select.POLLOUT)
        while left and not self._given_up:
            if taking.poll(_LOOK_MS):
                left = left[os.write(self._descriptor, left[:_PIECE_BYTES]) :]
                self._moved_at = time.monotonic()
