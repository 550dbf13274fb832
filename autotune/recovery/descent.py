"""Decide from an attempt's end whether training retries, steps down the recovery ladder or gives up."""

from __future__ import annotations

import re

from autotune.problem.outcome import Kind

PAUSES_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0)  # before the next attempt in an outage; the last one repeats
_TOO_MUCH = (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID)
_OUTAGES = (Kind.INFRASTRUCTURE, Kind.FOREIGN)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, ports and process ids differ each time
_MOST_ALIKE = 3  # attempts that end at the same step after the same checkpoint
_NEAR = 0.02  # share of the steps; not every step is reported, so steps this close count as equal
_MOST_BARREN = 2  # attempts under one config that were killed or hung without a step


class Descent:
    """Position of a training on the recovery ladder.

    Attributes:
        at: index of the current rung.
        pause_seconds: pause before the next attempt.
        hopeless: reason why another attempt would end in the same way; empty if a retry may help. One case: no attempt has
            ever stepped, and the last two failed with the same message. The user's mistake is then more likely than an
            outage: a folder that cannot be written to, a name that does not exist, too few GPUs. The other case: attempts end
            at the same step again and again, as with a save to a full disk or a batch that hangs.
    """

    def __init__(self) -> None:
        self.at = 0
        self.pause_seconds = 0.0
        self._barren = self._outages = 0  # in a row
        self.hopeless, self._stepped = "", False
        self._words = ""  # message of the last attempt
        self._alike = self._steps = 0  # for the last attempt that has stepped
        self._place: tuple[Kind, str] | None = None
        self._origins: set[str] = set()

    def got_on(self, resumed_from: str) -> bool:
        """Record the checkpoint that an attempt resumed from. Return True if no earlier attempt resumed from it."""
        newer = bool(resumed_from) and resumed_from not in self._origins
        self._origins.add(resumed_from)
        return newer

    def after(self, kind: Kind, steps: int, words: str = "", origin: str | None = None) -> bool:
        """Record an attempt's end. Return True if the failure is attributable to its config, so that the next rung is due.

        An infrastructure failure or GPU contention affects all configs alike, so it is followed by a pause and a retry.

        Args:
            steps: steps of the attempt.
            words: message of a rank that reported a failing machine itself; empty if none did.
            origin: see `End.origin`.
        """
        words = _CHANGING.sub("#", words)
        self._stepped = self._stepped or steps > 0
        self.hopeless = ""
        if words and words == self._words and not self._stepped:
            self.hopeless = "it has failed so before its first step twice in a row, which no waiting mends"
        elif self._comes_alike(kind, steps, origin):
            self.hopeless = (
                f"it has ended so {_MOST_ALIKE} times in a row at the same step, which starting again does not mend"
            )
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

    def _comes_alike(self, kind: Kind, steps: int, origin: str | None) -> bool:
        """Check that enough attempts in a row ended at the same step in the same way. Attempts without a step do not count.
        Without a known origin, a script may start from a different place each time."""
        if not steps or origin is None or kind in _TOO_MUCH:
            return False
        place, near = (kind, origin), abs(steps - self._steps) <= max(1.0, _NEAR * steps)
        self._alike = self._alike + 1 if place == self._place and near else 1
        self._place, self._steps = place, steps
        return self._alike >= _MOST_ALIKE

    def down(self) -> None:
        """Step down to the next rung and reset the counts of attempts."""
        self.at += 1
        self._barren = self._alike = 0
