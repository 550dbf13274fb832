"""Where on the ladder a training is: what an attempt's end says of its config, and what only of the machine."""

from __future__ import annotations

import re

from autotune.problem.outcome import Kind

PAUSES_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0)  # before the next attempt in an outage, the last again and again
_TOO_MUCH = (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID)
_OUTAGES = (Kind.INFRASTRUCTURE, Kind.FOREIGN)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, ports, process ids: other ones each time
_MOST_ALIKE = 3  # attempts that end at the same step after the same checkpoint
_NEAR = 0.02  # of the steps, of which not each is told of: the same step
_MOST_BARREN = 2  # attempts under one config that were killed or hung without a step


class Descent:
    """A training's way down the ladder.

    Attributes:
        at: the rung that is tried.
        pause_seconds: before the next attempt.
        hopeless: why another attempt would end as the last; empty where it may not. Nothing has ever stepped, and the last two
            have failed in the same words, which are then a mistake of the user's rather than an outage: a folder that cannot be
            written to, a name that does not exist, too few GPUs. Or it comes to the same step again and again: a save into a
            full disk, a batch at which it hangs.
    """

    def __init__(self) -> None:
        self.at = 0
        self.pause_seconds = 0.0
        self._barren = self._outages = 0  # one after another
        self.hopeless, self._stepped = "", False
        self._words = ""  # of the last attempt
        self._alike = self._steps = 0  # of the last that has stepped
        self._place: tuple[Kind, str] | None = None
        self._origins: set[str] = set()

    def got_on(self, resumed_from: str) -> bool:
        """Whether the training has got on, as an attempt has gone on from a checkpoint that none before it had."""
        newer = bool(resumed_from) and resumed_from not in self._origins
        self._origins.add(resumed_from)
        return newer

    def after(self, kind: Kind, steps: int, words: str = "", origin: str | None = None) -> bool:
        """Whether the config is too much, as an attempt under it has ended so after so many steps: the next rung is the one to
        try. A machine that fails, or that others have taken, is the same for all configs: it is waited for.

        Args:
            words: in which a rank itself has told of a machine that fails; empty where none has.
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
        """Whether enough attempts in a row have trained the same steps and ended in the same way; one that has not come to train
        counts for nothing. Where nobody knows from where a script goes on, it may be elsewhere each time."""
        if not steps or origin is None or kind in _TOO_MUCH:
            return False
        place, near = (kind, origin), abs(steps - self._steps) <= max(1.0, _NEAR * steps)
        self._alike = self._alike + 1 if place == self._place and near else 1
        self._place, self._steps = place, steps
        return self._alike >= _MOST_ALIKE

    def down(self) -> None:
        """Onto the next rung, which has attempts of its own."""
        self.at += 1
        self._barren = self._alike = 0
