"""What a script that is measured writes stays in the trial's folder: Python's audit events tell of it before it happens.

A path that leads out of the folder through one of its links is made the folder's own first (`links.py`). A path that the script
has made absolute cannot be changed: a file that was there before, wherever it lies, is not overwritten or removed, and what is
new is told.
Child processes are not watched, but for those that are forked (data-loader workers); `commands.py` reads what others are told.

Sources: https://docs.python.org/3/library/audit_events.html, and PEP 578.
"""

from __future__ import annotations

import os
import pathlib
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from os.path import realpath  # before it is wrapped
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from autotune.rank.commands import Change, changed_by
from autotune.rank.hooks.patches import Patches
from autotune.rank.links import TOO_LARGE, Links, Want, show
from autotune.rank.made import Made, as_it_is
from autotune.rank.native_writers import Notice, watch_native
from autotune.units import GIB

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECTORY
_NEW = os.O_CREAT | os.O_EXCL
_SCRIPTS = ".autotune-script"  # in the trial's folder: links to the script's, where that is shown nowhere else
# What libraries overwrite, wherever it lies: in hidden folders, Python's, a Hub cache's, of `datasets`, swapped by DeepSpeed.
_CACHED = re.compile(r"\..*|__pycache__|site-packages|(models|datasets|spaces)--.*|cache-\w+\.arrow|zero_stage_\d")
# Nothing is kept there, but what lies in the user's own folders.
_PASSING = ("/tmp", "/var/tmp", "/run/user", "/run/lock", "/dev", "/proc", "/sys")
_HOMES = ("HF_HOME", "TORCH_HOME", "TRITON_HOME", "XDG_CACHE_HOME")
_MOST_DATABASE_BYTES = 4 * GIB  # that is copied for a trial, which may only read it
_SQLITE_BESIDE = ("", "-journal", "-wal", "-shm")  # https://www.sqlite.org/tempfiles.html
_SQLITE_URI = 6  # after the database, `uri` is the seventh argument


class Writes:
    """One rank's.

    Args:
        links: of the trial's folder, which is the current one.
        cwd: the user's folder that it shows.
        script: the script's file, where it is one.
        made: what the study's trials have made; its folder is no user's.
        refuse: told what is wrong, in one line, where a file of the user's would be lost; it does not return.
    """

    def __init__(self, links: Links, cwd: Path, script: Path | None, made: Made, refuse: Callable[[str], None]) -> None:
        self._links, self._refuse = links, refuse
        here = str(cwd.resolve())
        self._shown = {here: links.folder}
        self._outermost = os.path.normpath(
            os.path.join(here, os.path.relpath(links.root, links.folder))
        )  # that is shown
        if script is not None and not script.resolve().is_relative_to(here):
            theirs = str(script.resolve().parent)
            self._shown[theirs] = self._place_of(theirs) or os.path.join(links.root, _SCRIPTS)
        self._made = made
        self._around = [str(folder) for shown in self._shown for folder in (Path(shown), *Path(shown).parents)]
        self._not_theirs = self._apart()
        self._passing = {*_PASSING, *map(realpath, _PASSING)}
        self._changed: dict[str, list[int] | None] = {}  # how it was, where it may only be read
        self._read_only: set[str] = set()  # databases
        self._inside = threading.local()

    def install(self, patches: Patches) -> None:
        """From now on. An audit hook cannot be taken away: after `patches.undo` it does nothing."""
        handlers = dict(self._handlers())

        def heard(event: str, args: tuple[Any, ...]) -> None:
            # thousands a second: whoever only reads is let go here
            if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
                return
            if (handler := handlers.get(event)) is not None:
                self._alone(handler, *args)

        sys.addaudithook(heard)
        patches.on_undo(handlers.clear)
        patches.wrap(os, "chdir", self._chdir)
        patches.wrap(os.path, "realpath", self._realpath)
        if sys.version_info < (3, 11):  # whose pathlib keeps a reference of its own
            patches.wrap(vars(pathlib)["_normal_accessor"], "realpath", self._realpath)
        with suppress(ImportError):  # a Python may be built without it
            import sqlite3

            for module in (sqlite3, sqlite3.dbapi2):
                patches.wrap(module, "connect", self._connect)
        watch_native(patches, lambda path, notice: self._alone(self._native, path, notice))

    def left(self) -> list[str]:
        """Files and folders of the user's that trials of this study have made, or this one added to, that are there still, on
        this machine."""
        changed = [path for path, was in self._changed.items() if os.path.lexists(path) and was != as_it_is(path)]
        return sorted({*self._made.paths(), *changed})

    def why(self, failure: str) -> str:
        """What of it is due to a database that was opened for reading alone; else empty."""
        if not self._read_only or "readonly database" not in failure:
            return ""
        names = ", ".join(sorted(self._read_only))
        return f"{names}: too large to be copied for a trial, which can only read it; write to a database of its own"

    # -- what is about to happen ---------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Callable[..., object]]:
        """By audit event; of its arguments the descriptor of a folder is the last, -1 for none."""
        return {
            "open": self._open,
            # of a link to a folder it says that there is one, and changes nothing
            "os.mkdir": lambda path, mode, fd=-1: self._make(path, Want.NAME, fd),
            "os.rename": self._rename,
            "os.remove": lambda path, fd=-1: self._lose(path, Want.NAME, fd, makes=False),
            "os.rmdir": lambda path, fd=-1: self._own(path, Want.MOVE, fd),
            "shutil.rmtree": lambda path, fd=None: self._lose(path, Want.TREE, -1 if fd is None else fd, makes=False),
            "os.link": self._link,
            "os.symlink": lambda source, path, fd=-1: self._make(path, Want.NAME, fd),
            "os.truncate": lambda path, length: self._lose(path, Want.CHANGED),
            "os.chmod": lambda path, mode, fd=-1: self._change(path, Want.CHANGED, fd),
            "os.chown": lambda path, user, group, fd=-1: self._change(path, Want.CHANGED, fd),
            "os.utime": lambda path, times, ns, fd=-1: self._change(path, Want.CHANGED, fd),
            "os.setxattr": lambda path, *_: self._change(path, Want.CHANGED),
            "os.removexattr": lambda path, *_: self._change(path, Want.CHANGED),
            "os.chdir": lambda path: self._own(path, Want.FOLDER),
            "subprocess.Popen": self._start,
            "os.system": lambda command: self._start(None, command, None),
            "sqlite3.connect": self._sqlite,
        }

    def _alone(self, handler: Callable[..., object], *args: Any) -> None:
        """What a handler does itself is not heard."""
        if getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            handler(*args)
        finally:
            self._inside.now = False

    def _open(self, path: Any, mode: Any, flags: int) -> None:
        if flags & _NEW == _NEW:
            self._make(path, Want.NAME)
        elif flags & os.O_TRUNC:
            self._lose(path, Want.REPLACED)
        elif flags & os.O_CREAT:
            self._make(path, Want.CHANGED)
        elif flags & os.O_DIRECTORY:
            self._own(path, Want.FOLDER)
        else:
            self._change(path, Want.CHANGED)

    def _native(self, path: Any, notice: Notice) -> None:
        if notice is Notice.NEW:
            self._make(path, Want.NAME)
        elif notice is Notice.REPLACED:
            self._lose(path, Want.REPLACED)
        else:
            self._make(path, Want.CHANGED)

    def _rename(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self._lose(source, Want.MOVE, source_fd, makes=False)
        self._lose(target, Want.MOVE, target_fd)

    def _link(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self._own(source, Want.CHANGED, source_fd)  # else what is written by the new name is written into the old
        self._make(target, Want.NAME, target_fd)

    def _start(self, program: Any, words: Any, cwd: Any, env: Any = None) -> None:
        """A command, whose process is not watched."""
        self._own(cwd, Want.FOLDER)
        given = [words] if isinstance(words, str | bytes | os.PathLike) else words
        for path, change in changed_by([os.fsdecode(one) for one in given]):
            where = os.path.join(os.fsdecode(cwd), path) if cwd is not None else path
            if change is Change.LOST:
                self._lose(where, Want.MOVE, makes=False)
            else:
                self._change(where, Want.CHANGED if change is Change.CONTENT else Want.MOVE)

    def _sqlite(self, database: Any) -> None:
        """A database and the files that SQLite keeps beside it. Raises OSError before it is opened."""
        name, options = _database(database)
        if "mode=ro" in options or "mode=memory" in options or "immutable=1" in options or name in ("", ":memory:"):
            return
        for beside in _SQLITE_BESIDE:
            real = self._own(name + beside, Want.CHANGED, most_bytes=_MOST_DATABASE_BYTES)
            if real is not None and os.path.lexists(real):
                self._changed.setdefault(real, as_it_is(real))  # most are only read
                self._made.renew(real)
            elif real is not None:
                self._made.add(real)

    def _connect(self, original: Callable[..., Any], /, database: Any, *args: Any, **kwargs: Any) -> Any:
        """A database that is too large for a copy can be read all the same."""
        try:
            return original(database, *args, **kwargs)
        except OSError as error:  # of `_sqlite`: SQLite's own are others
            if error.errno not in TOO_LARGE:
                raise
            name, options = _database(database)
            self._read_only.add(name)
            kept = [one for one in options.split("&") if one and not one.startswith("mode=")]
            uri = f"file:{quote(os.path.abspath(name))}?{'&'.join([*kept, 'mode=ro'])}"
            return original(uri, *args[:_SQLITE_URI], **{**kwargs, "uri": True})

    def _chdir(self, original: Callable[..., Any], path: Any) -> None:
        """Into the user's own folder, by a path that the script has made of `__file__`: the trial's shows the same."""
        if not isinstance(path, int):
            real = realpath(os.fsdecode(path))
            for theirs, ours in self._shown.items():
                if (real == theirs or real.startswith(theirs + "/")) and not self._links.holds(real):
                    self._alone(show, ours, theirs)
                    shown = os.path.normpath(os.path.join(ours, os.path.relpath(real, theirs)))
                    path = shown if os.path.isdir(shown) else path  # else it has been made since, by an absolute path
                    break
        original(path)

    def _realpath(self, original: Callable[..., Any], filename: Any, **options: Any) -> Any:
        """Of a path in the trial's folder it stays there, though a link leads out to what is shown: whoever asks for it
        (`Path("out").resolve()`) may well mean to write."""
        real = original(filename, **options)
        if isinstance(real, str) and not self._links.holds(real) and self._links.holds(os.path.abspath(filename)):
            return self._place_of(real) or real
        return real

    def _place_of(self, real: str) -> str | None:
        """Where the trial shows what the user has there; None where it does not."""
        shown = os.path.normpath(os.path.join(self._links.root, os.path.relpath(real, self._outermost)))
        there = self._links.holds(shown) and os.path.exists(shown) and realpath(shown) in (real, shown)
        return shown if there else None

    # -- where it happens ----------------------------------------------------------------------------------------------

    def _own(self, path: Any, want: Want, fd: int = -1, most_bytes: int | None = None) -> str | None:
        """Where the path leads, all links on it the trial's own by then. None: nothing of the user's is at stake there."""
        where = _absolute(path, fd)
        if where is None:
            return None
        real = self._links.own(where, want, most_bytes)
        if self._links.holds(real):
            return None
        named = os.path.normpath(where)
        return real if self._theirs(real) or (self._shown_in(named) and self._theirs(named)) else None

    def _theirs(self, path: str) -> bool:
        """Whether it is the user's, wherever it lies: no cache's, nothing temporary, nothing of the study."""
        folder = self._shown_in(path)
        if any(_CACHED.fullmatch(name) for name in path[len(folder) :].split("/")):
            return False
        apart = [own for own, sure in self._not_theirs.items() if folder or sure]
        return not any(
            path == own or path.startswith(own + "/") for own in (*apart, *(() if folder else self._passing))
        )

    def _shown_in(self, path: str) -> str:
        """Which of the folders that the trial shows it lies below; empty where in none."""
        return next((folder for folder in self._shown if path.startswith(folder + "/")), "")

    def _apart(self) -> dict[str, bool]:
        """Folders that no file of the user's lies in, by the environment as it is now, but for those that hold one that is shown
        and for the home folder; and whether that is sure."""
        found = [*_cache_folders(), (sys.prefix, True), (str(self._made.folder), True)]
        theirs = {*self._around, realpath(os.path.expanduser("~"))}  # whatever `TMPDIR` says
        apart = [(real, sure) for one, sure in found if (real := realpath(one)) not in theirs]
        return dict(sorted(apart, key=lambda one: one[1]))

    def _change(self, path: Any, want: Want, fd: int = -1) -> None:
        """What is there is changed, and told of no more than that."""
        if (real := self._own(path, want, fd)) is not None:
            self._made.renew(real)

    def _make(self, path: Any, want: Want, fd: int = -1) -> None:
        """Something may be made there."""
        real = self._own(path, want, fd)
        if real is not None and not os.path.lexists(real):
            self._made.add(real)
        elif real is not None and want is Want.CHANGED:
            self._changed[real] = None
            self._made.renew(real)

    def _lose(self, path: Any, want: Want, fd: int = -1, *, makes: bool = True) -> None:
        """What is there would be gone; else something may be made there."""
        real = self._own(path, want, fd)
        if real is None:
            return
        try:
            found = os.lstat(real)
        except OSError:
            if makes:
                self._made.add(real)
            return
        file = stat.S_ISREG(found.st_mode)
        holds = bool(os.listdir(real)) if stat.S_ISDIR(found.st_mode) else file and found.st_size
        if not holds or self._made.holds(real, self._theirs):
            if file and makes:
                self._made.add(real)  # what it has then is the trial's
        else:
            self._not_theirs = self._apart()  # the script may have named a cache since
            if self._own(path, want, fd) is not None:
                self._refuse(real)


def _absolute(path: Any, fd: int) -> str | None:
    """None where it names nothing: a descriptor, or below a folder that is gone."""
    if path is None or isinstance(path, int):
        return None
    name = os.fsdecode(path)
    if not name or "\0" in name:
        return None
    if name.startswith("/"):
        return name
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{fd}") if fd >= 0 else os.getcwd(), name)
    except OSError:
        return None


def _database(given: Any) -> tuple[str, str]:
    """(path, options) of what `sqlite3.connect` is given."""
    name = os.fsdecode(given)
    if not name.startswith("file:"):
        return name, ""
    path, _, options = name[len("file:") :].partition("?")
    return unquote(path), options


def _cache_folders() -> Iterator[tuple[str, bool]]:
    """As the environment names them, and whether that is sure: what is called `…_HOME` may be anything."""
    for name, value in os.environ.items():
        sure = name in _HOMES or any(word in name for word in ("CACHE", "TMP", "TEMP", "EXTENSIONS"))
        if value.startswith("/") and (sure or "_HOME" in name):
            yield value, sure
