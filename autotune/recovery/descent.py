"""Where on the ladder a training is: what an attempt's end says of its config, and what only of the machine."""

from __future__ import annotations

import re

from autotune.problem.outcome import Kind

PAUSES_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0)  # before the next attempt in an outage, the last again and again
_TOO_MUCH = (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID)
_OUTAGES = (Kind.INFRASTRUCTURE, Kind.FOREIGN)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, ports, process ids: other ones each time
_MOST_BARREN = 2  # attempts under one config that were killed or hung without a step


class Descent:
    """A training's way down the ladder.

    Attributes:
        at: the rung that is tried.
        pause_seconds: before the next attempt.
        hopeless: nothing has ever stepped, and the last two attempts have failed in the same words, which are then a mistake of
            the user's rather than an outage: a folder that cannot be written to, a name that does not exist, too few GPUs.
    """

    def __init__(self) -> None:
        self.at = 0
        self.pause_seconds = 0.0
        self._barren = self._outages = 0  # one after another
        self.hopeless = self._stepped = False
        self._words = ""  # of the last attempt

    def after(self, kind: Kind, steps: int, words: str = "") -> bool:
        """Whether the config is too much, as an attempt under it has ended so after so many steps: the next rung is the one to
        try. A machine that fails, or that others have taken, is the same for all configs: it is waited for.

        Args:
            words: in which a rank itself has told of a machine that fails; empty where none has.
        """
        words = _CHANGING.sub("#", words)
        self._stepped = self._stepped or steps > 0
        self.hopeless = bool(words) and words == self._words and not self._stepped
        self._words = words
        if steps:
            self._barren = self._outages = 0
        if kind in _OUTAGES:
            self.pause_seconds = PAUSES_SECONDS[min(self._outages, len(PAUSES_SECONDS) - 1)]
            self._outages += 1
            return False
        self.pause_seconds, self._outages = 0.0, 0
        self._barren += not steps
        return kind in _TOO_MUCH or self._barren >= _MOST_BARREN

    def down(self) -> None:
        """Onto the next rung, which has attempts of its own."""
        self.at += 1
        self._barren = 0
