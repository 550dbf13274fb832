"""Check if silent processes are alive: computing, reading and writing of the processes and their children."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from autotune.group.ending import below, processes
from autotune.units import MIB

_ANSWER_SECONDS = 0.5  # a driver answers within milliseconds
LEAST_CPU_SHARE = 0.05  # share of one core; idle ranks with their helper threads stay far below
LEAST_IO_BYTES_PER_SECOND = 0.05 * MIB  # a slow network disk is faster


@dataclass(frozen=True)
class _Sample:
    at: float  # on the monotonic clock
    cpu_seconds: float
    io_bytes: int


class Vitals:
    """Compare the ranks' counters between checks.

    Args:
        busy: returns True if the ranks' devices compute, according to their driver; None if unavailable.
    """

    def __init__(self, busy: Callable[[], bool] | None = None) -> None:
        self._last: _Sample | None = None
        self._busy = _Aside(busy) if busy is not None else None

    def forget(self) -> None:
        """Make the next check start a new comparison."""
        self._last = None

    def alive(self, ranks: Iterable[int], waiting: Iterable[int] = ()) -> bool:
        """Return True if any of the processes made progress since the last check; False on the first.

        Args:
            ranks: their process ids.
            waiting: ranks that wait in a collective, in which a library may spin. Only their children count.
        """
        now, before = _sample(ranks, set(waiting)), self._last
        self._last = now
        if before is None:
            return False
        seconds = max(now.at - before.at, 1e-3)
        return (
            now.cpu_seconds - before.cpu_seconds > LEAST_CPU_SHARE * seconds
            or now.io_bytes - before.io_bytes > LEAST_IO_BYTES_PER_SECOND * seconds
            or (self._busy is not None and self._busy.latest())
        )


class _Aside:
    """Call a function in a thread, one call at a time, so that a hanging driver does not block the tuner."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask, self._answer = ask, False
        self._thread: threading.Thread | None = None

    def latest(self) -> bool:
        """Return the last result, and start the next call unless one is running."""
        answer = self._answer
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            self._thread.join(_ANSWER_SECONDS)
            answer = self._answer
        return answer

    def _run(self) -> None:
        self._answer = False
        self._answer = self._ask()


def _sample(ranks: Iterable[int], waiting: set[int]) -> _Sample:
    cpu_seconds, io_bytes = 0.0, 0
    pids = list(ranks)
    for process in [*processes(pid for pid in pids if pid not in waiting), *below(*pids)]:
        with suppress(psutil.Error, OSError):  # process gone, or of another user
            times = process.cpu_times()
            cpu_seconds += times.user + times.system
            moved = process.io_counters()
            io_bytes += moved.read_chars + moved.write_chars
    return _Sample(time.monotonic(), cpu_seconds, io_bytes)
