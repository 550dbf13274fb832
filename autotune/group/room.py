"""Wait between two groups until the devices regain memory from ended ranks and from other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.group.gauge import Meter

BACK_SECONDS = 10.0  # limit for a device's memory to return after the last rank
ROOM_SECONDS = 30.0  # limit for other processes to release memory taken since the study began; awaited once
_POLL_SECONDS = 0.05


def wait_for_room(
    meter: Meter, say: Callable[[str], None], *, deadline: float, cancelled: Callable[[], bool] = lambda: False
) -> float:
    """Wait until the devices have as much free memory as when the study began.

    The holders are reported. If they stay, the study continues next to them. Ranks may be launched after the call.

    Args:
        deadline: on the monotonic clock.

    Returns:
        The seconds waited.

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
    """Wait until the devices regain the memory of ended ranks, and report its holders if they do not."""
    until = time.monotonic() + BACK_SECONDS
    while (left := meter.left()) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    for line in left:
        say(line)
