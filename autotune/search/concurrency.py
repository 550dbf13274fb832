"""Search workers of one tuner, and machines of peer tuners."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import CARD_APART, MAIN_MEMORY_APART, Hardware
from autotune.search.study import StudyStore
from autotune.util.units import format_bytes

# -- search workers ----------------------------------------------------------------------------------------------------
#
# Worker threads of one search. A lock serializes proposing; measuring runs in parallel.

_LOOK_SECONDS = 0.5  # a waiting worker polls after this time if no worker has notified it
_WAY_SECONDS = 0.01  # a notified worker acquires the lock within this time


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


# -- machines of peer tuners -------------------------------------------------------------------------------------------
#
# An OOM of one tuner excludes candidates for all peers, while each tuner chooses the winner under its own ceiling.


def host_of(tuner: str) -> str:
    """Return the host in a tuner's name."""
    return tuner.partition("/")[0]


def agree_on_memory(store: StudyStore, hardware: Hardware, *, force: bool = False) -> None:
    """Check that this machine has the same memory as the peer tuners.

    Without peers, this call's machine is stored as the study's machine.

    Args:
        store: already shared.
        force: skip the check.

    Raises:
        UserError: a candidate that fits on a peer may not fit here, or the reverse.
    """
    peers = store.peers()
    if not peers:
        store.note_hardware(hardware)
        return
    unlike = unlike_memory(store.hardware, hardware, beside=socket.gethostname() in map(host_of, peers))
    if unlike and not force:
        store.leave()
        raise UserError(
            f"study {store.name!r} is being tuned with other memory ({'; '.join(unlike)}): what runs out there would be "
            "ruled out here; give all calls one --memory-cap and --headroom, choose another --study, or --force"
        )


def unlike_memory(theirs: Hardware, mine: Hardware, *, beside: bool) -> list[str]:
    """List the memory differences that make results of one tuner invalid for the other.

    Args:
        theirs: the peer's machine.
        mine: this machine.
        beside: both tuners run on one machine. Their figures for main memory then differ by the peer's current usage,
            which is ignored.

    Returns:
        One line per difference, such as `capacity a rank: 79 GiB -> 60 GiB`.
    """
    main_memory = 1.0 if beside else MAIN_MEMORY_APART
    compared = {
        "capacity a rank": (
            theirs.capacity_bytes,
            mine.capacity_bytes,
            main_memory if mine.device == "cpu" else CARD_APART,
        ),
        "main memory": (theirs.host_memory_bytes, mine.host_memory_bytes, main_memory),
    }
    lines = [
        f"{what}: {format_bytes(their)} -> {format_bytes(our)}"
        for what, (their, our, apart) in compared.items()
        if abs(their - our) > apart * max(their, our)
    ]
    if theirs.headroom != mine.headroom:
        lines.append(f"headroom: {100 * theirs.headroom:g} % -> {100 * mine.headroom:g} %")
    return lines
