"""Kernel sandbox of a trial: what a script and its children write goes to the trial's folder, the user's files stay as they are.

- Overlay: the ranks of a host share a mount namespace that shows every file of the machine through overlayfs. Writes go
  to layers in the trial's folder, and vanish with it.
- Landlock: the kernel refuses every change outside of the trial's folder, `/dev` and caches. The script's current folder is a
  view: real folders with links to the user's files, so that relative paths can be written to.

Ranks import this module before torch: standard library only. `util/linux.py` has the system calls. Sources:
https://docs.kernel.org/filesystems/overlayfs.html, user_namespaces(7), mount_namespaces(7).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import runpy
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.util import linux
from autotune.util.caches import OPS, library_caches
from autotune.util.entry_points import NOT_PROTECTED, WITHOUT_SANDBOX

_KERNEL_FOLDERS = ("/proc", "/sys", "/dev")  # hold no user's files, except for shared memory
_SHARED_MEMORY = "/dev/shm"
_COPIED_BYTES = 1 << 20  # largest file that is copied if an overlay cannot take it
_MOST_FOLDERS = 30  # in which something that can be written is looked for
_MOST_ENTRIES = 5000  # of a folder whose entries are looked at one by one
_VIEW_FOLDERS = 2000  # real folders of a view
_NOT_ENTERED = 97  # exit status of a process that the kernel refuses a sandbox
_ATTEMPT = "protection-"  # start of the name of a folder in which `main` tries a sandbox


class Protection(StrEnum):
    """Mechanism that keeps a trial's writes from the user's files."""

    OVERLAY = "overlay"
    LANDLOCK = "landlock"
    NONE = "none"


@dataclass(frozen=True)
class Sandbox:
    """Sandbox of one trial on one host; all its ranks on that host enter the same one.

    Args:
        folder: the trial's, which takes all that the script writes and is removed with the trial.
        protection: see `main`.
        writable: paths whose writes outlive the trial, such as checkpoints that a later group of ranks loads.
    """

    folder: Path
    cwd: Path
    protection: Protection
    writable: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Sandbox:
        """Return the sandbox of JSON data."""
        folder, cwd, protection, writable = (stored[key] for key in ("folder", "cwd", "protection", "writable"))
        return cls(Path(folder), Path(cwd), Protection(protection), tuple(writable))

    def to_json(self) -> dict[str, Any]:
        """Return the sandbox as JSON data."""
        return {key: list(one) if isinstance(one, tuple) else str(one) for key, one in vars(self).items()}

    def create(self, hidden: Path) -> None:
        """Create the trial's folder and, for Landlock, the view of the user's folder.

        Args:
            hidden: the study's folder, which a view leaves out.

        Raises:
            OSError: the disk is full, the folder cannot be written, or the kernel has no Landlock.
        """
        if self.protection is Protection.LANDLOCK:
            linux.check_landlock()  # before a view of thousands of folders is made
        remove(self.folder)
        self.files.mkdir(parents=True)
        if self.protection is not Protection.OVERLAY:
            hide = [str(one.resolve()) for one in (self.folder, hidden)]
            _create_view(f"{self.folder}/view", str(self.cwd.resolve()), {*hide, *linux.silent_mounts()})

    @property
    def files(self) -> Path:
        """Folder of what autotune itself writes for the trial: copies of argument files, merged configs."""
        return self.folder / "files"

    @property
    def script_cwd(self) -> Path:
        """Current folder of the script."""
        overlay = self.protection is Protection.OVERLAY
        return self.cwd if overlay else Path(f"{self.folder}/view{self.cwd.resolve()}")

    def keeps(self, path: str) -> bool:
        """Return whether a file that the script writes to this absolute path vanishes with the trial."""
        return self.protection is Protection.OVERLAY or _contains(str(self.folder.resolve()), os.path.realpath(path))

    def users_path(self, path: str) -> str:
        """Return the user's own path of a file that the script has opened, by its path in a view."""
        path, real = os.path.abspath(path).removeprefix(f"{self.folder}/view"), self.cwd.resolve()
        return str(self.cwd / os.path.relpath(path, real)) if Path(path).is_relative_to(real) else path

    def enter(self, home: str, environment: Mapping[str, str]) -> None:
        """Confine this process and all that it starts, and change into the script's current folder.

        Args:
            home: folder of the worker group's sockets, which stays writable.
            environment: names the caches, which stay writable too.

        Raises:
            OSError: the kernel refuses what `main` has found, or this process has several threads.
        """
        if len(os.listdir("/proc/self/task")) > 1:
            raise OSError(errno.EBUSY, "A process with several threads cannot enter a sandbox")
        writable = [home, *self.writable, *library_caches(environment, os.path.realpath(self.cwd))]
        if self.protection is Protection.OVERLAY:
            self._enter_overlay(writable)
            if linux.in_user_namespace():
                os.rename, os.replace = linux.copying_rename(os.rename), linux.copying_rename(os.replace)
        elif self.protection is Protection.LANDLOCK:
            os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=home)  # short: sockets
            if ops := environment.get(OPS):
                os.environ[OPS] = self._copy_of(ops)
            linux.restrict_writes([*writable, str(self.folder), _SHARED_MEMORY], files_in=["/dev", "/proc/self"])
        linux.drop_capabilities()
        os.chdir(self.script_cwd)

    def _copy_of(self, ops: str) -> str:
        """Return the trial's copy of the ops: torch loads them only from a folder that it can write to."""
        copy = self.folder / "ops"
        with open(self.folder / "holder", "a", encoding="utf-8") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            if os.path.isdir(ops) and not copy.exists():
                shutil.copytree(ops, copy, symlinks=True)
        return str(copy)

    def _enter_overlay(self, writable: list[str]) -> None:
        """Enter the namespaces that the host's first rank makes and all others join."""
        with open(self.folder / "holder", "a+", encoding="utf-8") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            holder.seek(0)
            if pid := holder.read():
                linux.join_mount_namespace(int(pid))
                return
            linux.enter_mount_namespace()
            layers, cwd = self.folder / "layers", os.path.realpath(self.cwd)
            for base in (layers, *_spare_bases(self.folder)):
                with suppress(OSError):
                    base.mkdir(mode=0o700)
                    tree = _Tree(base, cwd)
                    break
            else:  # no disk takes them
                linux.mount("tmpfs", str(layers), 0, "tmpfs", "mode=0700")
                tree = _Tree(layers, cwd)
            tree.enter(writable)
            holder.write(str(os.getpid()))


def remove(folder: Path) -> None:
    """Remove a trial's folder and its layers. A network disk keeps open files: they are renamed for the next call."""
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f"{folder.name}-{os.urandom(8).hex()}"))
    for base in (*folder.parent.glob(f"{folder.name}-*"), *_spare_bases(folder)):
        linux.remove_tree(base)


def main() -> None:
    """Run a module with its arguments in the best sandbox that this machine offers, or print that sandbox's protection.

    `python -m autotune.rank.sandbox FOLDER [--unprotected] [MODULE WORD…]`; FOLDER takes what the module writes. A machine
    without protection runs a module only with `--unprotected`; otherwise the exit status is NOT_PROTECTED.
    """
    linux.die_with_parent(os.getppid())
    own, (parent, *words) = os.getpid(), sys.argv[1:]
    agreed = words[:1] == [WITHOUT_SANDBOX]
    words = words[agreed:]
    for protection in Protection:
        if protection is Protection.NONE:
            break
        sandbox = Sandbox(Path(parent, f"{_ATTEMPT}{os.urandom(8).hex()}"), Path.cwd(), protection)
        try:
            status = _status_of_child(sandbox)
        finally:
            if os.getpid() == own:
                remove(sandbox.folder)
        if status is None:
            break  # this is the child
        if status != _NOT_ENTERED:
            sys.exit(status if status >= 0 else 128 - status)  # like a shell's, of a signal
    if not words:
        print(protection, flush=True)
    elif protection is Protection.NONE and not agreed:
        sys.exit(NOT_PROTECTED)
    else:
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _status_of_child(sandbox: Sandbox) -> int | None:
    """Fork a child that enters the sandbox, and return None in it, or its exit status: _NOT_ENTERED if its writes stay."""
    own = os.getpid()
    try:
        sandbox.create(sandbox.folder.parent)
        device = os.stat(sandbox.folder.parent).st_dev
    except OSError:
        return _NOT_ENTERED
    if child := os.fork():
        with linux.handled_signals(signal.SIG_IGN, (signal.SIGINT,)):  # Ctrl-C reaches the child too
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        sandbox.enter(str(sandbox.files), os.environ)
        with suppress(PermissionError):
            Path(f"{sandbox.folder}-written").write_bytes(b"")  # touch() would pass: Landlock pretends to set times
            if os.stat(sandbox.folder.parent).st_dev == device:
                os.unlink(f"{sandbox.folder}-written")
                os._exit(_NOT_ENTERED)
    except OSError:
        os._exit(_NOT_ENTERED)
    linux.die_with_parent(own)
    return None


class _Tree:
    """New root of a mount namespace while it is built.

    Args:
        base: folder for the layers.
        cwd: the user's folder, without links.

    Raises:
        OSError: the file system of `base` takes no layers.
    """

    def __init__(self, base: Path, cwd: str) -> None:
        self._base, self._root, self._memory = base, str(base / "root"), str(base / "memory")
        self._ordinary = linux.in_user_namespace()
        self._options = "volatile,userxattr" if self._ordinary else "volatile,redirect_dir=on"
        self._mounts = linux.mount_points()
        self._silent = linux.silent_mounts()
        self._cwd, self._known = cwd, (cwd, os.path.expanduser("~"), tempfile.gettempdir())
        for folder in (self._root, self._memory):
            os.makedirs(folder, exist_ok=True)
        linux.mount("tmpfs", self._memory, 0, "tmpfs", f"size={shutil.disk_usage(_SHARED_MEMORY).free},mode=0700")
        if not self._overlay(self._memory, self._root):
            raise OSError(errno.EINVAL, "The file system takes no layers", str(base))
        linux.unmount(self._root)

    def _show(self, path: str, *, shown: bool = False) -> None:
        """Show a path in the new root: in an overlay if the kernel has one for it, else read-only, as it may be `shown`."""
        at = self._at(path)
        if path in _KERNEL_FOLDERS:
            linux.mount(path, at, linux.BIND | linux.RECURSIVE)
            if path != "/proc":
                linux.make_read_only(at, recursive=True)
            return
        split = self._ordinary and any(_contains(path, one) and one != path for one in self._mounts)
        if split or self._mounts.get(path) or not self._overlay(path, at):
            if not shown:
                linux.mount(path, at, linux.BIND | linux.RECURSIVE)
                linux.make_read_only(at, recursive=True)
            if split and os.access(path, os.R_OK | os.X_OK):
                self._show_entries(path, at)

    def _show_entries(self, path: str, at: str) -> None:
        """Show the entries of a folder with mount points one by one: an ordinary user can make no overlay of it.

        If the user can write there, an overlay of names and copies of small files lies below them, in memory.
        """
        writable, shared = os.access(path, os.W_OK), bool(os.stat(path).st_mode & stat.S_ISVTX)
        opened = os.open(at, os.O_PATH)  # shows the folder read-only, also when an overlay is above it
        if writable:
            self._adopt(path, names := tempfile.mkdtemp(dir=self._memory), everything=True)
            shutil.copystat(path, names)
            self._overlay(names, at)
        for entry in self._entries(path):
            with suppress(FileNotFoundError):  # another process has removed it
                folder = entry.is_dir(follow_symlinks=False)
                if folder and (entry.path in _KERNEL_FOLDERS or not self._is_fixed(entry.path, shared=shared)):
                    self._show(entry.path, shown=not writable)
                elif writable and os.access(entry.path, os.R_OK) and not self._is_copied(entry):
                    source = f"/proc/self/fd/{opened}/{entry.name}"
                    linux.mount(source, self._at(entry.path), linux.BIND | linux.RECURSIVE)
        os.close(opened)

    def _entries(self, path: str) -> Iterator[os.DirEntry[str]]:
        """Yield the entries of a folder that are looked at one by one, without silent mounts."""
        return (entry for entry in islice(os.scandir(path), _MOST_ENTRIES) if entry.path not in self._silent)

    def _is_fixed(self, path: str, *, shared: bool) -> bool:
        """Return whether an ordinary user can write to no folder in a folder, as far as _MOST_FOLDERS show it.

        A folder of another user in a shared one, such as /tmp, is not looked into.
        """
        if any(_contains(path, one) for one in self._known) or os.access(path, os.W_OK):
            return False
        waiting = [] if shared else [path]
        for folder in islice(waiting, _MOST_FOLDERS):  # grows
            with suppress(OSError):
                inner = [one.path for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)]
                if any(os.access(one, os.W_OK) for one in inner):
                    return False
                waiting += inner
        return True

    def _overlay(self, path: str, at: str, base: str | None = None) -> bool:
        """Mount an overlay of a folder whose layers are in the base; return whether the kernel takes it."""
        os.chdir(tempfile.mkdtemp(dir=base or self._base))
        with suppress(OSError):
            os.mkdir("work")
            _make_alike(path, "upper")
            if self._ordinary:
                with suppress(OSError):
                    self._adopt(path, "upper")
            self._hide_layers(path, "upper")
            lower = os.open(path, os.O_PATH | os.O_DIRECTORY)  # a path's own commas and colons would end an option
            try:
                options = f"lowerdir=/proc/self/fd/{lower},upperdir=upper,workdir=work,{self._options}"
                linux.mount("overlay", at, 0, "overlay", options)
                return True
            finally:
                os.close(lower)
        return False

    def _adopt(self, path: str, upper: str, *, everything: bool = False) -> None:
        """Make folders in a layer whose owner or group the user namespace lacks, or everything that a folder names.

        Such files of the user's current folder are copied, since copy-up refuses them with EOVERFLOW since Linux 6.4.
        """
        inside = _contains(self._cwd, path)
        private = os.stat(path).st_mode & stat.S_ISVTX and not inside  # in /tmp other users' folders stay so
        for entry in self._entries(path):
            with suppress(OSError):
                found, there = entry.stat(follow_symlinks=False), os.path.join(upper, entry.name)
                if (found.st_uid, found.st_gid) == (os.getuid(), os.getgid()) and not everything:
                    continue
                if (inside or everything) and self._is_copied(entry):
                    shutil.copy2(entry.path, there, follow_symlinks=False)
                elif entry.is_dir(follow_symlinks=False):
                    known = inside or any(_contains(entry.path, one) for one in self._known)
                    if known or everything or not private or os.access(entry.path, os.W_OK):
                        os.mkdir(there, stat.S_IMODE(found.st_mode) | stat.S_IRWXU)
                    if known and not everything:
                        self._adopt(entry.path, there)
                elif everything:
                    os.mknod(there)

    def _is_copied(self, entry: os.DirEntry[str]) -> bool:
        small = entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _COPIED_BYTES
        own = small and entry.path not in self._mounts and os.access(entry.path, os.R_OK | os.W_OK)
        return own or entry.is_symlink()

    def _hide_layers(self, path: str, upper: str) -> None:
        """Make the layers' folder an opaque, empty one in a layer, so that no tree contains itself."""
        if _contains(path, str(self._base)):
            for name in self._base.relative_to(path).parts:
                path, upper = os.path.join(path, name), os.path.join(upper, name)
                _make_alike(path, upper)
            os.setxattr(upper, "user.overlay.opaque" if self._ordinary else "trusted.overlay.opaque", b"y")

    def enter(self, writable: Iterable[str]) -> None:
        """Make the tree the root of this process's mount namespace, with these paths as they are: writes to them stay."""
        self._show("/")
        for path in () if self._ordinary else sorted(self._mounts.keys() - self._silent):
            if path in _KERNEL_FOLDERS or not any(_contains(one, path) for one in _KERNEL_FOLDERS):
                with suppress(OSError):  # lies below another mount
                    self._show(path)
        self._overlay(_SHARED_MEMORY, self._at(_SHARED_MEMORY), self._memory)
        for path in writable:
            with suppress(OSError):
                linux.mount(path, self._at(os.path.realpath(path)), linux.BIND | linux.RECURSIVE)
        linux.change_root(self._root)

    def _at(self, path: str) -> str:
        return self._root + path.rstrip("/")


def _make_alike(path: str, made: str) -> None:
    """Make a folder with the owner, mode and times of another one, as far as this process may."""
    os.makedirs(made, exist_ok=True)
    shutil.copystat(path, made)
    with suppress(OSError):
        os.chown(made, os.stat(path).st_uid, os.stat(path).st_gid)


def _spare_bases(folder: Path) -> list[Path]:
    """Folders on local disks for the layers of a trial whose own folder lies on a network disk."""
    name = f"autotune-layers-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    return [Path(base, name) for base in dict.fromkeys(("/var/tmp", tempfile.gettempdir()))]


def _create_view(view: str, cwd: str, hidden: set[str]) -> None:
    """Make real folders for the user's current one, its parents and what is in it, with links to everything else."""
    waiting = ["/"]
    for source in waiting:  # grows: parents come first
        os.mkdir(f"{view}{source}")
        with suppress(OSError):
            for entry in os.scandir(source):
                shown, near = f"{view}{entry.path}", _contains(entry.path, cwd) or _contains(cwd, source)
                if near and entry.is_dir(follow_symlinks=False) and len(waiting) < _VIEW_FOLDERS:
                    waiting += [entry.path] if entry.path not in hidden else []
                elif entry.path not in hidden:
                    target = os.readlink(entry.path) if entry.is_symlink() else "/"
                    os.symlink(entry.path if "/" in target else target, shown)  # a link to a neighbour is one again


def _contains(folder: str, path: str) -> bool:
    """Return whether a path is this folder or lies below it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


if __name__ == "__main__":
    main()
