"""Who measures beside whom in one search. One worker thinks at a time, and all of them measure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune.problem.candidate import Candidate

_LOOK_SECONDS = 0.5  # after which somebody who waits looks by himself, whoever has not told him
_WAY_SECONDS = 0.01  # in which somebody who was told takes his turn


def host_bound(candidate: Candidate) -> bool:
    """Whether its speed is that of the host: of main memory, its bus, the CPUs or a disk, which all jobs share."""
    return bool(candidate.offloaded)


class Crew:
    """The workers of a search: threads, each with an executor of its own.

    Args:
        alone: which candidates are measured while nothing else is.
    """

    def __init__(self, alone: Callable[[Candidate], bool] = host_bound) -> None:
        self._alone = lambda candidate: candidate in self._apart or alone(candidate)
        self._turn = threading.Condition()  # who thinks holds it
        self.at_work: list[Candidate] = []  # claimed, and not recorded yet
        self._measuring: list[Candidate] = []
        self._accompanied: set[Candidate] = set()  # of those at work: something else was measured meanwhile
        self._apart: set[Candidate] = set()  # measured alone from now on, whatever they are
        self._failures: list[BaseException] = []
        self._waiting = 0  # in `wait`
        self._asking = 0  # who wait to be alone: nobody else begins meanwhile

    @contextmanager
    def thinking(self) -> Iterator[None]:
        """What is done in it no other worker does at the same time, but where `measuring` or `wait` let them."""
        with self._turn:
            yield

    @property
    def failed(self) -> bool:
        """Whether a worker has: the others stop, too."""
        return bool(self._failures)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Keeps what a worker fails with."""
        try:
            yield
        except BaseException as error:
            self._failures.append(error)

    def raise_failure(self) -> None:
        """The first, once nobody works any more."""
        if self._failures:
            raise self._failures[0]

    @contextmanager
    def having(self, candidate: Candidate) -> Iterator[None]:
        """It is this worker's, from the claim to the record."""
        self.at_work.append(candidate)
        try:
            yield
        finally:
            self.at_work.remove(candidate)
            self._accompanied.discard(candidate)
            self._turn.notify_all()

    @contextmanager
    def measuring(self, candidate: Candidate) -> Iterator[None]:
        """Once the candidate may be measured beside what is; within it, `aside`."""
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
            self._turn.notify_all()

    def set_apart(self, candidate: Candidate) -> bool:
        """Whether something was measured beside the candidate of this worker; from now on nothing is. The kernel kills whom
        it will when main memory is full, and counts for all of the machine."""
        if candidate in self._accompanied:
            self._apart.add(candidate)
        return candidate in self._accompanied

    @contextmanager
    def ending(self, candidate: Candidate) -> Iterator[None]:
        """As `measuring`, with others thinking, for the end of a session: memory is freed, the host's too. Whoever has waited
        to measure goes on next."""
        with self.measuring(candidate), self.aside():
            yield
        if self._waiting:
            self._turn.wait(_WAY_SECONDS)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Others think meanwhile."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def wait(self) -> None:
        """Until somebody has ended a trial, or for a moment."""
        self._waiting += 1
        self._turn.wait(_LOOK_SECONDS)
        self._waiting -= 1
