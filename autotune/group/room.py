"""Memory of the devices between two groups: what an ended one still holds is waited for, and so is what others have taken."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.group.gauge import Meter

BACK_SECONDS = 10.0  # for a device's memory to come back after the last rank
ROOM_SECONDS = 30.0  # for others to give back what they have taken since the study began; waited for once
_POLL_SECONDS = 0.05


def wait_for_room(
    meter: Meter, say: Callable[[str], None], *, deadline: float, cancelled: Callable[[], bool] = lambda: False
) -> float:
    """Waits until the devices have as much free as when the study began, says who is waited for, and goes on beside them
    where they stay. Ranks may be launched then. Returns the seconds waited.

    Args:
        deadline: on the monotonic clock.

    Raises:
        GpuError: a GPU does not answer.
    """
    began, waited = time.monotonic(), False
    until = min(deadline, began + ROOM_SECONDS)
    while crowd := meter.crowd():
        if not waited:
            for line in crowd:
                say(f"{line}; waiting at most {ROOM_SECONDS:.0f} s for it")
        waited = True
        if time.monotonic() > until or cancelled():
            say("going on beside it: until it is free again, running out of memory says nothing of a candidate")
            break
        time.sleep(_POLL_SECONDS)
    meter.begin()
    return time.monotonic() - began if waited else 0.0


def wait_until_back(meter: Meter, say: Callable[[str], None]) -> None:
    """Waits until the devices have the memory back that ended ranks held; says what holds it where they do not."""
    until = time.monotonic() + BACK_SECONDS
    while (left := meter.left()) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    for line in left:
        say(line)
