"""Trainer's checkpoints in an output folder: which are whole, which of the script's calls of `train` has written each, and from
which one a call goes on when the script is started again. Standard library only.

A script may call `train` more than once with one output folder, and each call counts its steps from the beginning: a checkpoint
of another call is none to go on from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.rank.shards import Part, is_cut_off, is_damaged, lacks, tag_of

STATE = "trainer_state.json"  # is written last
BEFORE = -1  # in place of a call's number: what was there before this launch
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class Ledger:
    """Who has written the checkpoints of one output folder. Clocks differ and jump: files are known by their times, which are
    never compared with a clock.

    Attributes:
        found: by path of its state, when a checkpoint was written (by the file server's clock, in ns) and by which call.
        last: the call that has begun last, in this attempt or in an earlier one.
        call: of this attempt.
    """

    folder: Path
    found: dict[str, tuple[int, int]] = field(default_factory=dict)
    last: int = BEFORE
    call: int = -1

    @classmethod
    def of(cls, folder: Path, told: dict[str, Any] | None) -> Ledger:
        """As `told` has it; None: nothing is known of the folder."""
        if told is None:
            return cls(folder)
        return cls(folder, {path: (at, by) for path, (at, by) in told["found"].items()}, told["last"])

    def told(self) -> dict[str, Any]:
        """For the parent, which gives it to the ranks of the next attempt."""
        return {"found": self.found, "last": self.last}

    def begin(self) -> None:
        """The script calls `train` once more: what is new was written by the call before, whatever that came to."""
        found = {}
        for state in self.folder.glob(f"checkpoint-*/{STATE}"):
            with suppress(OSError):
                at = state.stat().st_mtime_ns
                known = self.found.get(str(state))
                found[str(state)] = (at, known[1] if known is not None and known[0] == at else self.last)
        self.call += 1
        self.found, self.last = found, self.call

    def seen(self, part: Part, given: Any, bad: Collection[str] = ()) -> Seen:
        """What this rank sees of the folder, after `begin`.

        Args:
            given: the script's `resume_from_checkpoint`.
            bad: folders that an attempt of this launch could not load.
        """
        readable, whole, failed, by = set(), set(), set(), {}
        for path, (_, call) in self.found.items():
            try:
                step = int(json.loads(Path(path).read_text(encoding="utf-8"))["global_step"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            checkpoint = Path(path).parent
            by[step] = call
            tag = tag_of(checkpoint)  # DeepSpeed's
            if tag is None or not is_damaged(checkpoint / tag, part):
                readable.add(step)
                if tag is not None and not lacks(checkpoint / tag, part) and not is_cut_off(checkpoint / part.random):
                    whole.add(step)
            if tag is not None and str(checkpoint / tag) in bad:
                failed.add(step)
        return Seen(readable, whole, by, self._named(given), failed)

    def _named(self, given: Any) -> int | None:
        """The step of the checkpoint in this folder that the script would go on from, as Trainer finds it; None: of none."""
        if given is True:
            names = (_NAME.fullmatch(path.name) for path in self.folder.glob("checkpoint-*") if path.is_dir())
            return max((int(name[1]) for name in names if name), default=None)
        if not isinstance(given, str | Path):
            return None
        path = Path(given)
        name = _NAME.fullmatch(path.name)
        return int(name[1]) if name and path.is_dir() and path.resolve().parent == self.folder else None

    def path(self, step: int) -> Path:
        """Where a checkpoint lies, as Trainer names it."""
        return self.folder / f"checkpoint-{step}"


@dataclass(frozen=True)
class Seen:
    """What one rank sees of an output folder; checkpoints by their steps."""

    readable: set[int]  # have their state, and nothing that is damaged
    whole: set[int]  # and DeepSpeed's part, and the rank's own
    by: dict[int, int]  # the call that has written each
    named: int | None  # that the script would go on from
    failed: set[int] = field(default_factory=set)  # could not be loaded, whole though they look

    @property
    def newest_before(self) -> int | None:
        """The newest that was there before this launch; None: there is none."""
        return max((step for step in self.readable if self.by.get(step) == BEFORE), default=None)


@dataclass(frozen=True)
class Choice:
    """What a call of `train` goes on from instead of what the script says; None: from the beginning."""

    step: int | None
    not_whole: int | None = None  # the newer one that would have been gone on from


def chosen(seen: Sequence[Seen], call: int) -> Choice | None:
    """The newest whole checkpoint that this call has written in this launch, or what the script says (None): where there is none,
    or it says a newer one. If that is not whole, the newest whole one of any call takes its place. One that could not be loaded
    is taken where there is no other: then the reason may lie elsewhere, and training must not begin anew over it.

    Args:
        seen: by all ranks, the first one's first. Machines need not see the same files: by which call a checkpoint was written
            the first rank knows, and one to go on from is whole for all.
        call: its number.
    """
    by, named, failed = seen[0].by, {one.named for one in seen}, set.union(*(one.failed for one in seen))
    whole = set.intersection(*(one.whole for one in seen))
    mine = {step for step in whole if by.get(step) == call}
    own = max(mine - failed or mine, default=None)
    if own is not None:
        newer = len(named) == 1 and all(step in whole - failed and step > own for step in named)
        cut_off = {step for step, writer in by.items() if writer == call and step > own} - whole
        return None if newer else Choice(own, max(cut_off, default=None))
    # an older launch may have had other ranks
    older = {step for step in set.intersection(*(one.readable for one in seen)) if by.get(step) == BEFORE}
    good = (whole | older) - failed
    if given_up := {step for step in named if step in failed} if good else set():
        return Choice(max(good), max(given_up))
    not_whole = {step for step in named if step is not None} - whole - older
    return Choice(max(good or whole | older, default=None), max(not_whole)) if not_whole else None
