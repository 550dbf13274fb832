"""A trial's folder of links to the user's, and how a link is made the trial's own before something is written through it.

A folder that is written into becomes a real one, of links to what it shows: one level, however much lies below. A file becomes a
copy. Ranks of one machine share the folder: they take turns by the kernel's lock, and nobody who reads meanwhile misses a name.
The tuner makes the first links by this module, so it imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from os.path import realpath  # before `writes.py` wraps it
from pathlib import Path

_MOST_FOLLOWED = 40  # links on one path, as Linux allows: path_resolution(7)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # renameat2(2)
MAKING = ".autotune-links"  # in the outermost folder of a trial's: what is made there before it takes a link's place
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # as `search/lock.py` says of which
TOO_LARGE = (errno.ENOSPC, errno.EFBIG)
_FICLONE = 0x40049409  # linux/fs.h
_FREE_LEFT = 0.9  # of the disk's free bytes, what a copy may take: others write there too


class Want(Enum):
    """What is about to happen to the last name of a path; all names before it are folders that something changes in."""

    NAME = auto()  # it is made or removed: what a link leads to stays
    MOVE = auto()  # it is renamed, or gives way to what is
    FOLDER = auto()  # it is where something will be written
    TREE = auto()  # it is removed with all that it holds
    CHANGED = auto()  # its content or attributes are changed
    REPLACED = auto()  # its content is thrown away


_ITSELF = (Want.NAME, Want.MOVE, Want.TREE)  # a link that is the last name is not followed


class Links:
    """The links of one trial. Threads and processes may share them.

    Args:
        folder: what stands for the user's current folder. Around it lies what shows that folder's parents, in `root`, the
            outermost, which `.autotune-links` marks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder.resolve())
        around = (self.folder, *map(str, Path(self.folder).parents))
        self.root = next((one for one in around if os.path.isdir(os.path.join(one, MAKING))), self.folder)
        self._below = self.root.rstrip("/") + "/"
        self._making = os.path.join(self.root, MAKING)
        self._numbers = itertools.count()

    def holds(self, path: str) -> bool:
        """Whether an absolute path without links lies in the folder."""
        return path == self.root or path.startswith(self._below)

    def own(self, path: str, want: Want, most_bytes: int | None = None) -> str:
        """Makes every link that the kernel would follow out of the folder the folder's own, the topmost first.

        Args:
            path: absolute.
            most_bytes: of a file that is copied; where the disk can share its blocks, it may have more.

        Returns:
            Where it then leads, without links but perhaps the last; it need not exist.

        Raises:
            OSError: a copy or a folder of links could not be made; of `TOO_LARGE` where it would take too much of the disk.
                Nothing must be written then.
        """
        here, followed = "/", 0
        if path.startswith(self._below):
            here, path = self.root, path[len(self._below) :]
        names = _reversed(path)
        while names:
            name = names.pop()
            if name == "..":
                here = os.path.dirname(here)
                continue
            at = os.path.join(here, name)
            target = self._target(at, inside=bool(names))
            if target is None:
                here = at
                continue
            wanted = Want.FOLDER if names else want
            leads = os.path.normpath(os.path.join(here, target))
            outside = self.holds(at) and not self.holds(leads)
            if wanted is Want.NAME or (wanted in _ITSELF and not outside):
                return at
            if outside and self._take(at, wanted, most_bytes):
                here = at
                continue
            followed += 1
            if followed > _MOST_FOLLOWED:
                return at
            here = "/" if target.startswith("/") else here
            names += _reversed(target)
        return here

    def _target(self, at: str, *, inside: bool) -> str | None:
        """Where a link leads; None where there is no link, or nothing.

        Args:
            inside: whether something in it is asked for: then it must be there, and may be on its way (`_exchange`).
        """
        for again in (False, True):
            try:
                return os.readlink(at)
            except OSError as error:
                swapping = inside and error.errno == errno.ENOENT and self.holds(at) and os.path.isdir(self._making)
                if again or not swapping:
                    return None
            with self._turn():
                pass
        return None

    def _take(self, link: str, want: Want, most_bytes: int | None) -> bool:
        """Puts something real in the place of a link that leads out of the folder, where that is wanted; False where it leads
        to a device, a pipe or a socket, which have no copy."""
        with self._turn():
            if not os.path.islink(link):
                return True  # another was first
            real = realpath(link)
            try:
                kind = os.stat(real).st_mode
            except OSError:
                if want in (Want.CHANGED, Want.REPLACED):
                    os.unlink(link)  # else the file would be made where it leads
                return True
            if stat.S_ISDIR(kind):
                if want is not Want.REPLACED:  # which the kernel refuses
                    self._put(link, lambda made: _folder(made, None if want is Want.TREE else real))
            elif stat.S_ISREG(kind):
                if want in (Want.CHANGED, Want.REPLACED):
                    make = _empty if want is Want.REPLACED else functools.partial(_copy, most_bytes=most_bytes)
                    self._put(link, lambda made: make(made, real))
            else:
                return False
            return True

    def _put(self, link: str, make: Callable[[str], None]) -> None:
        """What `make` makes takes the link's place when it is whole."""
        made = os.path.join(self._making, f"{os.getpid()}-{next(self._numbers)}")
        try:
            make(made)
            if os.path.isdir(made):
                _exchange(made, link)
            else:
                os.replace(made, link)
        except BaseException:
            shutil.rmtree(made) if os.path.isdir(made) else Path(made).unlink(missing_ok=True)
            raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits for other threads and ranks. A child that is forked meanwhile holds nothing: it is unlocked for all."""
        os.makedirs(self._making, exist_ok=True)
        lock = _locked(os.path.join(self._making, "lock"))
        if lock is None:  # the file system has no locks; ranks that share the folder are on one machine, whose disk may
            lock = _locked(os.path.join(tempfile.gettempdir(), f"autotune-links-{os.getuid()}"))
        try:
            yield
        finally:
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)


def link_entries(folder: str, source: str, hides: Callable[[os.DirEntry[str]], bool] = lambda _: False) -> None:
    """Links in `folder` to every entry of `source` that is not hidden. A link to a neighbour is one again: what is written by
    either name is then seen by both. Raises OSError."""
    with os.scandir(source) as entries:  # thousands of files on a network disk: only links are asked where they lead
        for entry in entries:
            if not hides(entry):
                target = os.readlink(entry.path) if entry.is_symlink() else "/"
                neighbour = "/" not in target and target not in (".", "..")
                os.symlink(target if neighbour else os.path.join(source, entry.name), os.path.join(folder, entry.name))


def show(folder: str, source: str) -> None:
    """Makes a folder of links to every entry of `source`, if it is not there. Ranks may make it at once."""
    if not os.path.isdir(folder):
        made = f"{folder}-{os.getpid()}"
        os.mkdir(made)
        link_entries(made, source)
        try:
            os.rename(made, folder)
        except OSError:  # another rank was first
            shutil.rmtree(made)


def _locked(file: str) -> int | None:
    """The descriptor of a file that the kernel has locked; None where it has no locks for it."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        os.close(lock)
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return lock


def _reversed(path: str) -> list[str]:
    """The names of a path, the last first."""
    return [name for name in path.split("/") if name not in ("", ".")][::-1]


def _folder(made: str, source: str | None) -> None:
    os.mkdir(made)
    if source is not None:
        link_entries(made, source)


def _empty(made: str, source: str) -> None:
    Path(made).touch()
    shutil.copymode(source, made)


def _copy(made: str, source: str, *, most_bytes: int | None) -> None:
    """Raises OSError, one of `TOO_LARGE` before a disk is full."""
    if _shared(made, source):
        shutil.copystat(source, made)
        return
    size = os.path.getsize(source)
    if size > _FREE_LEFT * shutil.disk_usage(os.path.dirname(made)).free:
        raise OSError(errno.ENOSPC, "No space for a trial's copy of a file that it changes", source)
    if most_bytes is not None and size > most_bytes:
        raise OSError(errno.EFBIG, "Too large to copy for a trial", source)
    shutil.copy2(source, made)


def _shared(made: str, source: str) -> bool:
    """A copy that has the same blocks until either is changed, made at once: ioctl_ficlone(2). False where the file system has
    none (xfs and btrfs do)."""
    with open(source, "rb") as theirs, open(made, "wb") as ours:
        try:
            fcntl.ioctl(ours, _FICLONE, theirs.fileno())
        except OSError:
            return False
    return True


def _exchange(made: str, link: str) -> None:
    """At once where the kernel and the file system can: a name that is gone for a moment would be missed by who reads. Where they
    cannot (NFS), nothing else is at once that leaves a real folder, and who writes waits (`_target`)."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(made), os.fsencode(link)
    if swap is not None and swap(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        os.unlink(made)
    else:
        os.unlink(link)
        os.rename(made, link)
