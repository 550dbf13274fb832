"""A rank's pulse: whether its main thread gets on, told from beside it.

Building, saving, evaluating, tokenizing and compiling send no message of their own for minutes. A thread looks once a second
where the main thread is, and tells the parent whether that has changed; a rank that hangs stays where it is.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from autotune.group.protocol import Channel

BEAT_SECONDS = 1.0
# Where a rank waits for its peers: some of these spin, so that processor time there is no sign of life.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_INNERMOST = 4  # frames in which a collective is looked for


class Pulse:
    """Sends `pulse` messages with `moved` (whether the main thread got on since the last one), `where` it is, and `waits`
    (whether it is in a collective), until `stop`. One that has not moved is told once."""

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
    """Where a thread was, without the frames: whoever keeps a frame keeps the tensors of its variables."""

    place: tuple[tuple[int, int], ...]
    where: str
    waits: bool


def glance(thread: int) -> Glance | None:
    """Where the thread of this identity is now; None once it has ended."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else Glance(_place(frame), describe(frame), waits(frame))


def _place(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Names the point of execution: every frame's code and its instruction."""
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def describe(frame: FrameType) -> str:
    """`all_reduce (torch/distributed/distributed_c10d.py:2810)`"""
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno})"


def waits(frame: FrameType | None) -> bool:
    """Whether the innermost frames are a collective's."""
    for _ in range(_INNERMOST):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False
