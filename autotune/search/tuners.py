"""Who tunes a study: several calls at once, on one machine or on many, where they all reach its database.

Each trial says whose it is. A tuner that shares a study says every few seconds that it lives, in an attribute of the study;
what one that lives no longer has left running goes back to be tried. Nobody's clock is compared with another's: a tuner
counts for how long it has itself seen no sign of another.

Optuna's heartbeat is not used: it is a database's alone (a journal has none), belongs to a trial, so that nobody speaks for
one between two measurements, and compares times in the zones of two connections.
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

from autotune.linux import boot_id, started_at

BEAT_SECONDS = 5.0  # between two signs of life
LEASE_SECONDS = 60.0  # without one a tuner counts as dead: as long as one waits for a database that is away
_BEAT = "tuner "  # begins the name of an attribute: the number of the sign, or _LEFT
_LEFT, _NEVER = -1, 0


@functools.cache
def _machine() -> str:
    """This boot of this machine, or this container: where a process id means the same process."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{boot_id()[:8]}-{namespace}"


def name_of_this() -> str:
    """A name of its own for a tuner: host, machine, process, and a word, since a process may tune twice."""
    return f"{socket.gethostname()}/{_machine()}/{os.getpid()}-{started_at(os.getpid())}/{secrets.token_hex(3)}"


def host_of(tuner: str) -> str:
    return tuner.partition("/")[0]


def lives_here(tuner: str) -> bool | None:
    """Whether its process is on this machine; None where it is a process of another."""
    try:
        _, machine, process, _ = tuner.rsplit("/", 3)
        pid, start = map(int, process.split("-"))
    except ValueError:
        return None
    return started_at(pid) == start if machine == _machine() else None


class Tuners:
    """The tuners of a study as one of them sees them, itself among them."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self.me = name_of_this()
        self._beats = 0
        self._heard: dict[str, tuple[int, float]] = {}  # of the others: the last sign, seconds without another
        self._looked_at = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._look_lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether this tuner speaks of itself and listens to others; otherwise it is alone."""
        return self._thread is not None

    def join(self) -> None:
        """Shares the study from now on, until `leave`."""
        self._beat()
        self._thread = threading.Thread(target=self._keep_alive, name="autotune-lease", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Nothing of this tuner's runs any more."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(BEAT_SECONDS)
            with suppress(Exception):  # the others find out by themselves
                self._study.set_user_attr(_BEAT + self.me, _LEFT)

    def others(self) -> list[str]:
        """Those that live, as far as is known."""
        with self._look_lock:  # newcomers are noted meanwhile
            heard = list(self._heard)
        return [tuner for tuner in heard if not self.is_gone(tuner)]

    def is_gone(self, tuner: str | None) -> bool:
        """Whether nobody speaks for a trial of this tuner any more; None: of one that did not say who it was, before there were
        several."""
        if tuner is None or not self.shared:
            return tuner != self.me
        if tuner == self.me:
            return False
        here = lives_here(tuner)
        if here is False:
            return True
        with self._look_lock:
            sign, silent_seconds = self._heard.setdefault(tuner, (_NEVER, 0.0))
        if here and sign == _NEVER:  # it shares nothing, and need not say that it lives
            return False
        return sign == _LEFT or silent_seconds > LEASE_SECONDS

    def died(self, tuner: str | None) -> bool:
        """Of one that is gone: whether its process is known to have ended without a word. One whose lease is over may only
        have been cut off, and one that said that it leaves came to an end of its own."""
        if tuner is None or not self.shared:
            return True
        with self._look_lock:
            sign, _ = self._heard.get(tuner, (_NEVER, 0.0))
        return sign != _LEFT and lives_here(tuner) is False

    def _keep_alive(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # a database that is away for a while is for the search to complain of
            with suppress(Exception):
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._study.set_user_attr(_BEAT + self.me, self._beats)
        self._look()

    def _look(self) -> None:
        signs = {key.removeprefix(_BEAT): int(value) for key, value in self._study.user_attrs.items() if _is_beat(key)}
        now = time.monotonic()
        # of the time since the last look no more than two beats: who was stopped, or cut off, heard nobody
        passed, self._looked_at = min(now - self._looked_at, 2 * BEAT_SECONDS), now
        with self._look_lock:
            for tuner in {*signs, *self._heard} - {self.me}:
                sign, silent_seconds = self._heard.get(tuner, (_NEVER, 0.0))
                new = signs.get(tuner, _NEVER)
                self._heard[tuner] = (new, 0.0 if new != sign else silent_seconds + passed)


def _is_beat(key: str) -> bool:
    return key.startswith(_BEAT)
