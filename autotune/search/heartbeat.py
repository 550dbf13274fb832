"""Peer tuners of a study: several calls at once, on any machines that reach its database.

Each trial stores its tuner's name. A tuner of a shared study writes a heartbeat to a study attribute every few seconds.
Trials of a dead tuner are retried. Clocks of different machines are never compared: each tuner measures how long it has
seen no new heartbeat of a peer.

Optuna's heartbeat is not used for three reasons. A journal storage has none. The heartbeat belongs to a trial, so a
tuner has none between two trials. The comparison mixes times in the time zones of two connections.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import time
from contextlib import suppress

import optuna

from autotune.util.linux import boot_id, started_at

BEAT_SECONDS = 5.0  # seconds between heartbeats
# seconds without a heartbeat after which a tuner counts as dead; equal to the wait for an unavailable database
LEASE_SECONDS = 60.0
_BEAT = "tuner "  # prefix of an attribute whose value is the heartbeat number, or _LEFT
_LEFT, _NEVER = -1, 0


@functools.cache
def _machine() -> str:
    """Return an id of this boot and PID namespace, within which a process id is unique."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{boot_id()[:8]}-{namespace}"


def name_of_this() -> str:
    """Return a unique tuner name: host, machine, process and a random word, since a process may tune twice."""
    return f"{socket.gethostname()}/{_machine()}/{os.getpid()}-{started_at(os.getpid())}/{secrets.token_hex(3)}"


def host_of(tuner: str) -> str:
    """Return the host in a tuner's name."""
    return tuner.partition("/")[0]


def lives_here(tuner: str) -> bool | None:
    """Return whether the tuner's process is alive on this machine; None if it is on another machine."""
    try:
        _, machine, process, _ = tuner.rsplit("/", 3)
        pid, start = map(int, process.split("-"))
    except ValueError:
        return None
    return started_at(pid) == start if machine == _machine() else None


class Tuners:
    """The tuners of a study, including this one."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self.me = name_of_this()
        self._beats = 0
        self._heard: dict[str, tuple[int, float]] = {}  # by peer: last heartbeat, seconds since
        self._looked_at = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._look_lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """True if this tuner writes and reads heartbeats; otherwise it is alone."""
        return self._thread is not None

    def join(self) -> None:
        """Share the study until `leave`."""
        self._beat()
        self._thread = threading.Thread(target=self._keep_alive, name="autotune-lease", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Stop the heartbeat and mark this tuner as ended."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(BEAT_SECONDS)
            with suppress(Exception):  # otherwise the peers wait for the lease to expire
                self._study.set_user_attr(_BEAT + self.me, _LEFT)

    def others(self) -> list[str]:
        """Return the live peer tuners."""
        with self._look_lock:  # the heartbeat thread adds new peers
            heard = list(self._heard)
        return [tuner for tuner in heard if not self.is_gone(tuner)]

    def is_gone(self, tuner: str | None) -> bool:
        """Return True if a tuner no longer owns its trials. None stands for a trial without a tuner."""
        if tuner is None or not self.shared:
            return tuner != self.me
        if tuner == self.me:
            return False
        here = lives_here(tuner)
        if here is False:
            return True
        with self._look_lock:
            sign, silent_seconds = self._heard.setdefault(tuner, (_NEVER, 0.0))
        if here and sign == _NEVER:  # a tuner that holds its study alone writes no heartbeat
            return False
        return sign == _LEFT or silent_seconds > LEASE_SECONDS

    def died(self, tuner: str | None) -> bool:
        """Return True if a gone tuner's process is known to have ended without marking itself as ended.

        An expired lease alone may mean a lost connection.
        """
        if tuner is None or not self.shared:
            return True
        with self._look_lock:
            sign, _ = self._heard.get(tuner, (_NEVER, 0.0))
        return sign != _LEFT and lives_here(tuner) is False

    def _keep_alive(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # the search reports an unavailable database
            with suppress(Exception):
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._study.set_user_attr(_BEAT + self.me, self._beats)
        self._look()

    def _look(self) -> None:
        signs = {key.removeprefix(_BEAT): int(value) for key, value in self._study.user_attrs.items() if _is_beat(key)}
        now = time.monotonic()
        # At most two beats count since the last poll, because a suspended or disconnected tuner received no heartbeats.
        passed, self._looked_at = min(now - self._looked_at, 2 * BEAT_SECONDS), now
        with self._look_lock:
            for tuner in {*signs, *self._heard} - {self.me}:
                sign, silent_seconds = self._heard.get(tuner, (_NEVER, 0.0))
                new = signs.get(tuner, _NEVER)
                self._heard[tuner] = (new, 0.0 if new != sign else silent_seconds + passed)


def _is_beat(key: str) -> bool:
    return key.startswith(_BEAT)
