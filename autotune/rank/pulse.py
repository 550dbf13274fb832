"""Heartbeat of a rank: a thread reports whether the main thread makes progress.

Building, saving, evaluating, tokenizing and compiling send no message for minutes. Once a second the thread samples the
main thread's stack, and reports to the parent whether it has changed. The stack of a rank that hangs does not change.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from autotune.group.protocol import Channel

BEAT_SECONDS = 1.0
# Paths of code in which a rank waits for its peers. Some collectives spin, so CPU time there is no progress.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_INNERMOST = 4  # innermost frames that are searched for a collective


class Pulse:
    """Send `pulse` messages until `stop`. A main thread without progress is reported once.

    A message has `moved` (the main thread made progress since the last one), `where` (its position) and `waits` (a
    collective is running).
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="autotune-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        last: Glance | None = None
        told = False
        while not self._stopped.wait(BEAT_SECONDS):
            now = glance(self._main or 0)
            if now is None or self._channel.closed:
                return
            moved = last is None or now.place != last.place
            if moved or not told:
                self._channel.send("pulse", moved=moved, where=now.where, waits=now.waits)
            last, told = now, not moved


@dataclass(frozen=True)
class Glance:
    """Position of a thread, without its frames: a stored frame would keep its variables' tensors alive."""

    place: tuple[tuple[int, int], ...]
    where: str
    waits: bool


def glance(thread: int) -> Glance | None:
    """Return the current position of a thread by its identity, or None if it has ended."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else Glance(_place(frame), describe(frame), waits(frame))


def _place(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Return the point of execution: code and instruction of every frame."""
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def describe(frame: FrameType) -> str:
    """Return a frame's position, like `all_reduce (torch/distributed/distributed_c10d.py:2810)`."""
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno})"


def waits(frame: FrameType | None) -> bool:
    """Return True if one of the innermost frames belongs to a collective."""
    for _ in range(_INNERMOST):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False
