"""A process that builds takes all along that it has started when it has to end: compilers have no other end than that of their
work. It runs where ranks do, so that it asks `autotune.linux`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from autotune.linux import adopt_orphans, descendants, die_with_parent

BUILD_GRACE_SECONDS = 0.3  # between SIGTERM, upon which a compiler removes its temporary files, and SIGKILL


@contextmanager
def taking_all_along() -> Iterator[None]:
    """When the parent dies meanwhile, or SIGTERM comes, this process leaves with every process that it has started."""
    adopt_orphans()  # what a dead child leaves is then found, too
    before = signal.signal(signal.SIGTERM, _leave_with_all)
    die_with_parent(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_with_all(number: int, frame: object) -> None:
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + BUILD_GRACE_SECONDS
    while started := descendants(os.getpid()):
        for pid in started if time.monotonic() > until else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    os._exit(128 + number)
