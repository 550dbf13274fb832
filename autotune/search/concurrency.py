"""Search workers of one tuner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune.problem.candidate import Candidate

# -- search workers ----------------------------------------------------------------------------------------------------
#
# Worker threads of one search. A lock serializes proposing; measuring runs in parallel.

_WAY_SECONDS = 0.01  # a notified worker acquires the lock within this time
_LOOK_SECONDS = 0.5  # a waiting worker polls after this time if no worker has notified it


def host_bound(candidate: Candidate) -> bool:
    """Return True if main memory, its bus, the CPUs or a disk limit the speed. All jobs share these."""
    return bool(candidate.offloaded)


class SearchWorkers:
    """The workers of a search: threads, each with its own executor.

    Args:
        alone: returns True for candidates that must be measured without parallel trials.
    """

    def __init__(self, alone: Callable[[Candidate], bool] = host_bound) -> None:
        self._alone = lambda candidate: candidate in self._apart or alone(candidate)
        self._lock = threading.Condition()  # held by the worker that proposes or records
        self.at_work: list[Candidate] = []  # claimed candidates without a recorded outcome
        self._measuring: list[Candidate] = []
        self._accompanied: set[Candidate] = set()  # candidates at work that ran in parallel with another trial
        self._apart: set[Candidate] = set()  # measured alone from now on, in addition to `alone`
        self._failures: list[BaseException] = []
        self._waiting = 0  # workers in `wait`
        self._asking = 0  # workers that wait to measure alone; no other worker starts until they have

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, so that one worker at a time proposes and records. `device_section` and `wait` release it."""
        with self._lock:
            yield

    @property
    def failed(self) -> bool:
        """True if a worker has failed. The other workers then stop."""
        return bool(self._failures)

    @contextmanager
    def capture_failure(self) -> Iterator[None]:
        """Capture the exception of a worker."""
        try:
            yield
        except BaseException as error:
            self._failures.append(error)

    def raise_failure(self) -> None:
        """Raise the first captured exception, after all workers have ended."""
        if self._failures:
            raise self._failures[0]

    @contextmanager
    def claim(self, candidate: Candidate) -> Iterator[None]:
        """Mark the candidate as claimed by this worker, from the claim to the record."""
        self.at_work.append(candidate)
        try:
            yield
        finally:
            self.at_work.remove(candidate)
            self._accompanied.discard(candidate)
            self._lock.notify_all()

    @contextmanager
    def device_section(self, candidate: Candidate) -> Iterator[None]:
        """Wait until the candidate may run in parallel with the trials under way, then mark it as running.

        The body releases the lock with `unlocked` while it measures.
        """
        alone = self._alone(candidate)
        self._asking += alone
        while self._measuring and (alone or self._asking or any(map(self._alone, self._measuring))):
            self.wait()
        self._asking -= alone
        self._measuring.append(candidate)
        if len(self._measuring) > 1:
            self._accompanied.update(self._measuring)
        try:
            yield
        finally:
            self._measuring.remove(candidate)
            self._lock.notify_all()

    def set_apart(self, candidate: Candidate) -> bool:
        """Return True if the candidate ran in parallel with another trial, and measure it alone from now on.

        The OOM killer may pick any process of a full machine, so a host OOM during parallel trials is not attributable.
        """
        if candidate in self._accompanied:
            self._apart.add(candidate)
        return candidate in self._accompanied

    @contextmanager
    def teardown_section(self, candidate: Candidate) -> Iterator[None]:
        """Close a session under the rules of `device_section`, with the lock released.

        Closing frees device and host memory. Workers that wait to measure get the lock next.
        """
        with self.device_section(candidate), self.unlocked():
            yield
        if self._waiting:
            self._lock.wait(_WAY_SECONDS)

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Release the lock for the duration of the block."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def wait(self) -> None:
        """Release the lock until another trial ends, or for at most _LOOK_SECONDS."""
        self._waiting += 1
        self._lock.wait(_LOOK_SECONDS)
        self._waiting -= 1
