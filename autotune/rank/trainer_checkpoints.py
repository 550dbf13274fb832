"""Select the Trainer checkpoint from which a restarted script resumes.

The module finds the whole checkpoints of an output folder, and the call of `train` that wrote each. Standard library
only.

A script may call `train` several times with one output folder, and each call counts steps from zero. A call therefore
never resumes from a checkpoint of another call.
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

STATE = "trainer_state.json"  # written last
BEFORE = -1  # in place of a call's number: present before this launch
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class Ledger:
    """Writers of the checkpoints in one output folder.

    Files are identified by their times. Because clocks differ and jump, these are never compared with a clock.

    Attributes:
        found: time (clock of the file server, in ns) and call of each checkpoint, by the path of its state.
        last: the last call that began, in this or an earlier attempt.
        call: current call of this attempt.
    """

    folder: Path
    found: dict[str, tuple[int, int]] = field(default_factory=dict)
    last: int = BEFORE
    call: int = -1

    @classmethod
    def of(cls, folder: Path, told: dict[str, Any] | None) -> Ledger:
        """Restore from `told`; None starts without knowledge of the folder."""
        if told is None:
            return cls(folder)
        return cls(folder, {path: (at, by) for path, (at, by) in told["found"].items()}, told["last"])

    def told(self) -> dict[str, Any]:
        """Return the state that the parent passes to the ranks of the next attempt."""
        return {"found": self.found, "last": self.last}

    def begin(self) -> None:
        """Begin a new call of `train`, and attribute all new checkpoints to the previous call."""
        found = {}
        for state in self.folder.glob(f"checkpoint-*/{STATE}"):
            with suppress(OSError):
                at = state.stat().st_mtime_ns
                known = self.found.get(str(state))
                found[str(state)] = (at, known[1] if known is not None and known[0] == at else self.last)
        self.call += 1
        self.found, self.last = found, self.call

    def seen(self, part: Part, given: Any, bad: Collection[str] = ()) -> Seen:
        """Return this rank's view of the folder after `begin`.

        Args:
            given: the script's `resume_from_checkpoint`.
            bad: folders that an attempt of this launch failed to load.
        """
        readable, whole, failed, by = set(), set(), set(), {}
        for path, (_, call) in self.found.items():
            try:
                step = int(json.loads(Path(path).read_text(encoding="utf-8"))["global_step"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            checkpoint = Path(path).parent
            by[step] = call
            tag = tag_of(checkpoint)  # DeepSpeed's tag
            if tag is None or not is_damaged(checkpoint / tag, part):
                readable.add(step)
                if tag is not None and not lacks(checkpoint / tag, part) and not is_cut_off(checkpoint / part.random):
                    whole.add(step)
            if tag is not None and str(checkpoint / tag) in bad:
                failed.add(step)
        return Seen(readable, whole, by, self._named(given), failed)

    def _named(self, given: Any) -> int | None:
        """Return the step of the checkpoint in this folder that Trainer would resume from, or None."""
        if given is True:
            names = (_NAME.fullmatch(path.name) for path in self.folder.glob("checkpoint-*") if path.is_dir())
            return max((int(name[1]) for name in names if name), default=None)
        if not isinstance(given, str | Path):
            return None
        path = Path(given)
        name = _NAME.fullmatch(path.name)
        return int(name[1]) if name and path.is_dir() and path.resolve().parent == self.folder else None

    def path(self, step: int) -> Path:
        """Return the path of a checkpoint in Trainer's naming."""
        return self.folder / f"checkpoint-{step}"


@dataclass(frozen=True)
class Seen:
    """One rank's view of an output folder. Checkpoints are identified by step."""

    readable: set[int]  # checkpoints with a state and no damaged file
    whole: set[int]  # readable ones that also have DeepSpeed's and this rank's files
    by: dict[int, int]  # call that wrote each
    named: int | None  # step named by the script
    failed: set[int] = field(default_factory=set)  # failed to load, although they look whole

    @property
    def newest_before(self) -> int | None:
        """The newest checkpoint from before this launch, or None."""
        return max((step for step in self.readable if self.by.get(step) == BEFORE), default=None)


@dataclass(frozen=True)
class Choice:
    """Checkpoint to resume from in place of the script's choice; a step of None starts from the beginning."""

    step: int | None
    not_whole: int | None = None  # newer checkpoint that was skipped because it is damaged


def chosen(seen: Sequence[Seen], call: int) -> Choice | None:
    """Return the checkpoint from which this call resumes, or None to keep the script's choice.

    The first choice is the newest whole checkpoint of this call in this launch, unless the script names a newer one. If
    the named one is damaged, the newest whole checkpoint of any call replaces it. A checkpoint that failed to load is a
    last resort: the cause may lie elsewhere, and training must not restart because of it.

    Args:
        seen: views of all ranks, the first rank's first. Machines may see different files. The first rank's view gives
            the writers, and a checkpoint counts as whole if it is so for all ranks.
        call: number of this call.
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
