"""Whether the files of a checkpoint of DeepSpeed's are whole: each is there, is not empty, and ends as it should. A few bytes
of each are read, of terabytes as of kilobytes. Standard library only.

A machine that loses its power, a disk that is full and a write that a file server has lost leave files that are cut off, empty or
of zeros alone; nothing notices that before they are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A rank's own, of ZeRO; experts' are a group's. `pp` counts data parallel ranks, `mp` tensor parallel ones.
_OWN = re.compile(r"(?<!ex)pp_rank_(\d+)_mp_rank_(?P<mp>\d+).*_(?P<what>model|optim)_states\.pt")
_STATES = "*_states.pt"
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"  # as torch writes since 1.6; what is older has no mark at its end
_TAIL_BYTES = 1024  # torch writes no comment behind the mark, and other writers a short one


@dataclass(frozen=True)
class Part:
    """Which files of a checkpoint one rank looks at: its own, and the first of a machine those that are nobody's own. So each is
    looked at once, whether machines share a disk or not."""

    rank: int
    world: int
    local: int  # its number among those of its machine

    @property
    def random(self) -> str:
        """The file in which a checkpoint of Trainer's has the rank's random generators."""
        return "rng_state.pth" if self.world == 1 else f"rng_state_{self.rank}.pth"

    def has(self, name: str) -> bool:
        """Whether the file is this rank's to look at."""
        owner = _OWN.search(name)
        return int(owner[1]) == self.rank if owner and int(owner[1]) < self.world else self.local == 0


def is_cut_off(file: Path) -> bool:
    """Whether a file that `torch.save` has written is missing, empty, or not written to its end."""
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_ZIP))
            if head != _ZIP:
                return not any(head)  # empty, or a hole
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - _TAIL_BYTES))
            return _ZIP_END not in opened.read()
    except OSError:
        return True


def tag_of(folder: Path) -> str | None:
    """The name of the folder that DeepSpeed would load from this one; None where it would load none."""
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def is_damaged(folder: Path, part: Part) -> bool:
    """Whether nothing lies in the folder of a tag, or one of the files there is cut off of those that the rank looks at."""
    files = list(folder.glob(_STATES))
    return not files or any(is_cut_off(file) for file in files if part.has(file.name))


def lacks(folder: Path, part: Part) -> bool:
    """Whether other ranks have files of their own in the folder of a tag, and this one has not. Where the first ranks have them
    as groups of the same size would, as with MiCS, nothing is missing. Ranks that are parallel in tensors (AutoTP) stand side by
    side."""
    for what in ("model", "optim"):
        found = [match for file in folder.glob(_STATES) if (match := _OWN.search(file.name)) and match["what"] == what]
        side = 1 + max((int(match["mp"]) for match in found), default=0)
        mine, place = divmod(part.rank, side)
        owners = {int(match[1]) for match in found if int(match["mp"]) == place}
        count = len(owners)
        in_groups = count > 1 and owners == set(range(count)) and part.world // side % count == 0
        if found and mine not in owners and not in_groups:
            return True
    return False


@dataclass(frozen=True)
class Tags:
    """What one rank sees of a folder into which a script saves by itself."""

    latest: str | None
    whole: dict[str, int]  # when each was written that is whole for this rank, by the file server's clock, in ns


def tags_in(folder: Path, part: Part) -> Tags:
    """What this rank sees of the folder."""
    whole = {}
    for tag in {file.parent for file in folder.glob(f"*/{_STATES}")}:
        if not is_damaged(tag, part) and not lacks(tag, part):
            whole[tag.name] = max((file.stat().st_mtime_ns for file in tag.glob(_STATES)), default=0)
    return Tags(tag_of(folder), whole)


def instead_of_latest(seen: Sequence[Tags], bad: set[str]) -> str | None:
    """The newest tag that is whole for all ranks, where the latest is not, or is one of the bad; None: nothing is better than it.

    Args:
        seen: by all ranks, the first one's first.
    """
    latest, whole = seen[0].latest, set.intersection(*(set(one.whole) for one in seen))
    if latest is None or (latest in whole and latest not in bad):
        return None
    times = seen[0].whole
    return max((tag for tag in whole - bad - {latest}), key=lambda tag: times[tag], default=None)
