"""Kill all descendants (compilers) when a build process is terminated.

Compilers would otherwise run to their end. The module runs in ranks too, so it uses `autotune.linux`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from autotune.linux import adopt_orphans, descendants, die_with_parent, runs

BUILD_GRACE_SECONDS = 0.2  # seconds between SIGTERM, at which a compiler removes its temporary files, and SIGKILL
_LOOK_SECONDS = 0.02


@contextmanager
def taking_all_along() -> Iterator[None]:
    """Terminate this process with all its descendants at SIGTERM, or when the parent dies."""
    adopt_orphans()  # descendants of a dead child are found too
    before = signal.signal(signal.SIGTERM, _leave_with_all)
    die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_with_all(number: int, frame: object) -> None:
    started = descendants(os.getpid())
    _tell(started, signal.SIGTERM)
    until = time.monotonic() + BUILD_GRACE_SECONDS
    while any(runs(pid) for pid in started) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    while left := descendants(os.getpid()):
        _tell(left, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    os._exit(128 + number)


def _tell(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
