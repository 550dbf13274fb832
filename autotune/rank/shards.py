"""Check that the files of a DeepSpeed checkpoint are whole: present, not empty, and with a proper end.

Only a few bytes of each file are read, independent of its size. Standard library only.

A power cut, a full disk or a lost write of a file server leaves files that are truncated, empty or all zeros. Without a
check, this is noticed only at the load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# ZeRO files owned by one rank; files of experts belong to a group. `pp` counts data parallel ranks, `mp` tensor
# parallel ones.
_OWN = re.compile(r"(?<!ex)pp_rank_(\d+)_mp_rank_(?P<mp>\d+).*_(?P<what>model|optim)_states\.pt")
_STATES = "*_states.pt"
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"  # written by torch since 1.6; older files have no end mark
_TAIL_BYTES = 1024  # torch writes no comment after the mark, other writers a short one


@dataclass(frozen=True)
class Part:
    """Assign the files of a checkpoint to ranks for checking.

    A rank checks its own files. The first rank of each machine checks all files without an owner. Every file is thus
    checked, on shared and on local disks.
    """

    rank: int
    world: int
    local: int  # rank on its own host

    @property
    def random(self) -> str:
        """Name of the file with the rank's random states in a Trainer checkpoint."""
        return "rng_state.pth" if self.world == 1 else f"rng_state_{self.rank}.pth"

    def has(self, name: str) -> bool:
        """Return True if this rank checks the file."""
        owner = _OWN.search(name)
        return int(owner[1]) == self.rank if owner and int(owner[1]) < self.world else self.local == 0


def is_cut_off(file: Path) -> bool:
    """Return True if a file written by `torch.save` is missing, empty or truncated."""
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_ZIP))
            if head != _ZIP:
                return not any(head)  # empty, or a hole in the file
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - _TAIL_BYTES))
            return _ZIP_END not in opened.read()
    except OSError:
        return True


def tag_of(folder: Path) -> str | None:
    """Return the name of the tag that DeepSpeed would load from the folder, or None."""
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def is_damaged(folder: Path, part: Part) -> bool:
    """Return True if the tag's folder is empty, or a file there that this rank checks is truncated."""
    files = list(folder.glob(_STATES))
    return not files or any(is_cut_off(file) for file in files if part.has(file.name))


def lacks(folder: Path, part: Part) -> bool:
    """Return True if other ranks have own files in the tag's folder and this rank has none.

    Nothing is missing if the first ranks have files as equal groups would, as with MiCS. Tensor parallel ranks (AutoTP)
    are counted separately.
    """
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
    """One rank's view of a folder into which a script saves checkpoints itself."""

    latest: str | None
    whole: dict[str, int]  # time of writing in ns (clock of the file server) of each tag that is whole for this rank


def tags_in(folder: Path, part: Part) -> Tags:
    """Return this rank's view of the folder."""
    whole = {}
    for tag in {file.parent for file in folder.glob(f"*/{_STATES}")}:
        if not is_damaged(tag, part) and not lacks(tag, part):
            whole[tag.name] = max((file.stat().st_mtime_ns for file in tag.glob(_STATES)), default=0)
    return Tags(tag_of(folder), whole)


def instead_of_latest(seen: Sequence[Tags], bad: set[str]) -> str | None:
    """Return the newest tag that is whole for all ranks if the latest is damaged or in `bad`.

    None means that no tag is better than the latest.

    Args:
        seen: views of all ranks, the first rank's first.
    """
    latest, whole = seen[0].latest, set.intersection(*(set(one.whole) for one in seen))
    if latest is None or (latest in whole and latest not in bad):
        return None
    times = seen[0].whole
    return max((tag for tag in whole - bad - {latest}), key=lambda tag: times[tag], default=None)
