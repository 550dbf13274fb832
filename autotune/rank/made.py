"""What a study's trials have made among the user's files: a later trial may overwrite it again, for as long as it is as they
left it. Whoever has trained into it since has made it theirs.

Ranks say what they are about to make, and at a trial's end the tuner notes how it was left, since ranks are often killed: so this
imports no torch. The record is a file of the study's that is only added to.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.linux import started_at


def trial_of_mine(folder: Path) -> str:
    """What a trial of this process, with its logs in that folder, is called in the record."""
    return json.dumps([socket.gethostname(), os.getpid(), started_at(os.getpid()), str(folder.resolve())])


def as_it_is(path: str) -> list[int] | None:
    """What changes with a file; of a folder nothing, since what lies in it says more. None where nothing is there."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return [] if stat.S_ISDIR(found.st_mode) else [found.st_ino, found.st_size, found.st_mtime_ns]


class Made:
    """The record of a study, as one trial keeps it.

    Args:
        folder: the study's.
        by: the trial, see `trial_of_mine`.
    """

    def __init__(self, folder: Path, by: str) -> None:
        self.folder, self._by = folder, by
        self._file = folder / "made-outside.jsonl"
        self._read = 0  # bytes of the file
        self._making: dict[str, set[str]] = {}  # by path: the trials that have not said how they left it
        self._left: dict[str, list[int]] = {}  # by path: how it was left, see `as_it_is`

    @property
    def told(self) -> dict[str, str]:
        """What the trial's ranks are told, to keep the same."""
        return {"study": str(self.folder), "by": self._by}

    def add(self, path: str) -> None:
        """Said before it is made or changed: another rank that finds it finds it here."""
        if self._by not in self._making.setdefault(path, set()):
            self._making[path].add(self._by)
            self._say({"path": path, "by": self._by})

    def renew(self, path: str) -> None:
        """It is about to be changed: where it was made by a trial, it is so still."""
        self._hear()
        if (path in self._left or path in self._making) and self.holds(path, lambda _: True):
            self.add(path)

    def holds(self, path: str, counts: Callable[[str], bool]) -> bool:
        """Whether it was made by a trial, and is as trials have left it, with all in it.

        Args:
            counts: whether a path in it is worth asking for.
        """
        if self._is_ours(path, counts):
            return True
        self._hear()
        return self._is_ours(path, counts)

    def paths(self) -> list[str]:
        """All that trials have made, that is there as they left it."""
        self._hear()
        known = {*self._making, *self._left}
        return [path for path in known if os.path.lexists(path) and self._is_ours(path, lambda _: True)]

    def settle(self) -> None:
        """The trial has ended: notes how it has left what it has made. In a folder that it has made everything is its own, by
        whatever writer. Where that cannot be noted it counts as one that runs, for as long as this process does."""
        with suppress(OSError):
            self._hear()
            for path in [path for path, trials in self._making.items() if self._by in trials]:
                below = [os.path.join(at, name) for at, *names in os.walk(path) for name in itertools.chain(*names)]
                for one in (*(one for one in below if self._left.get(one) != as_it_is(one)), path):
                    self._say({"path": one, "by": self._by, "left": as_it_is(one)})

    def _is_ours(self, path: str, counts: Callable[[str], bool]) -> bool:
        if any(map(self._is_made_now, (path, *map(str, Path(path).parents)))):
            return True
        found = as_it_is(path)
        if found is None:  # another rank was first
            return True
        if found:
            return self._left.get(path) == found
        with suppress(OSError):
            return all(self._is_ours(one.path, counts) for one in os.scandir(path) if counts(one.path))
        return False

    def _is_made_now(self, path: str) -> bool:
        """Whether a trial that runs has made it, or adds to what another had made."""
        return any(by == self._by or _runs(by) for by in self._making.get(path, ()))

    def _hear(self) -> None:
        """What others have said since."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # another rank is writing it
                    break
                self._read += len(line)
                with suppress(ValueError, TypeError, KeyError):  # an earlier version's names paths alone, for ever
                    self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        path, trials = said["path"], self._making.setdefault(said["path"], set())
        if "left" not in said:
            trials.add(said["by"])
            return
        trials.discard(said["by"])
        if not trials:
            del self._making[path]
        self._left.pop(path, None)
        if said["left"] is not None:
            self._left[path] = said["left"]

    def _say(self, what: dict[str, Any]) -> None:
        with self._file.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = file.read(1) not in (b"", b"\n")  # a full disk took the end of a line
            file.write(b"\n" * torn + json.dumps(what).encode() + b"\n")


def _runs(by: str) -> bool:
    """Whether the process whose trial it is runs on this machine; of others it is not known, and safe to say no."""
    host, pid, began, _ = json.loads(by)
    return bool(host == socket.gethostname() and started_at(pid) == began)
