"""Kernel sandbox of a trial: what a script and its children write goes to the trial's folder, the user's files stay as they are.

- Overlay: the ranks of a host share a mount namespace that shows every file of the machine through overlayfs. Writes go
  to layers in the trial's folder, and vanish with it.
- Landlock: the kernel refuses every change outside of the trial's folder, `/dev` and caches. The script's current folder is a
  view: real folders with links to the user's files, so that relative paths can be written to.

Ranks import this module before torch: standard library only. Sources: https://docs.kernel.org/filesystems/overlayfs.html,
https://docs.kernel.org/userspace-api/landlock.html, user_namespaces(7), mount_namespaces(7), pivot_root(2), seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.versions import StrEnum

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # unshare(2)
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 2  # mount(2), umount2(2)
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_READ_ONLY = 442, 0x8000, 1  # mount_setattr(2)
_SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES = 22, 24, 38  # prctl(2)
_DROPPED = (2, 17, 19, 21, 27)  # capabilities(7): open by handle, raw devices, other processes' files, mount, mknod
_KERNEL_FOLDERS = ("/proc", "/sys", "/dev")  # hold no user's files, except for shared memory
_SYSTEM_FOLDERS = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/lost+found", "/sbin", "/usr")
_SHARED_MEMORY = "/dev/shm"
_COPIED_BYTES = 1 << 20  # largest file that is copied if an overlay cannot take it
_MOST_ENTRIES = 5000  # of a folder whose entries are looked at one by one
_MOST_FOLDERS = 100  # in which something that can be written is looked for
_VIEW_PARENTS, _VIEW_FOLDERS = 4, 2000  # shown parents of the current folder; real folders of a view


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
        cwd: the user's current folder.
        protection: see `available_protection`.
        writable: paths whose writes outlive the trial, such as checkpoints that a later group of ranks loads.
    """

    folder: Path
    cwd: Path
    protection: Protection
    writable: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Sandbox:
        """Return the sandbox of JSON data."""
        kept = tuple(stored["writable"])
        return cls(Path(stored["folder"]), Path(stored["cwd"]), Protection(stored["protection"]), kept)

    def to_json(self) -> dict[str, Any]:
        """Return the sandbox as JSON data."""
        paths = {"folder": str(self.folder), "cwd": str(self.cwd), "writable": list(self.writable)}
        return {**paths, "protection": str(self.protection)}

    def create(self, hidden: Path) -> None:
        """Create the trial's folder and, for Landlock, the view of the user's folder.

        Args:
            hidden: the study's folder, which a view leaves out.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        remove(self.folder)
        self.files.mkdir(parents=True)
        if self.protection is not Protection.OVERLAY:
            _create_view(self.folder / "view", self.cwd.resolve(), {str(self.folder.resolve()), str(hidden.resolve())})

    @property
    def files(self) -> Path:
        """Folder of what autotune itself writes for the trial: copies of argument files, merged configs."""
        return self.folder / "files"

    @property
    def script_cwd(self) -> Path:
        """Current folder of the script."""
        overlay = self.protection is Protection.OVERLAY
        return self.cwd if overlay else self.folder.joinpath("view", *_shown_names(self.cwd.resolve()))

    def keeps(self, path: str) -> bool:
        """Return whether a file that the script writes to this absolute path vanishes with the trial."""
        inside = os.path.realpath(path).startswith(f"{self.folder.resolve()}{os.sep}")
        return inside or self.protection is Protection.OVERLAY

    def users_path(self, path: str) -> str:
        """Return the user's own path of a file that the script has opened, by its path in a view."""
        path = os.path.abspath(path)
        if not path.startswith(f"{self.folder / 'view'}{os.sep}"):
            return path
        below = os.path.relpath(path, self.script_cwd)
        return os.path.normpath(os.path.join(self.cwd.resolve() if below.startswith("..") else self.cwd, below))

    def enter(self, home: str, environment: Mapping[str, str]) -> None:
        """Confine this process and all that it starts, and change into the script's current folder.

        Args:
            home: folder of the worker group's sockets, which stays writable.
            environment: names the caches, which stay writable too.

        Raises:
            OSError: the kernel refuses what `available_protection` has found, or this process has several threads.
        """
        if len(os.listdir("/proc/self/task")) > 1:
            raise OSError(errno.EBUSY, "A process with several threads cannot enter a sandbox")
        writable = [home, *self.writable, *_caches(environment, os.path.realpath(self.cwd))]
        if self.protection is Protection.OVERLAY:
            self._enter_overlay(writable)
            _reopen_folders()
            with suppress(OSError):  # a second wall: the first has no known way around it
                _restrict_writes(["/"])
            if _is_ordinary():
                os.rename, os.replace = _copying_rename(os.rename), _copying_rename(os.replace)
            _drop_capabilities()
        elif self.protection is Protection.LANDLOCK:
            os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=home)  # short: sockets
            _restrict_writes([*writable, str(self.folder), "/dev", "/proc", _SHARED_MEMORY])
            _ignore_attribute_changes()
        os.chdir(self.script_cwd)

    def _enter_overlay(self, writable: list[str]) -> None:
        """Enter the namespaces that the host's first rank makes and all others join."""
        with open(self.folder / "holder", "a+", encoding="utf-8") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            holder.seek(0)
            if pid := holder.read():
                _join_namespaces(int(pid))
                return
            _make_namespaces()
            for base in _layer_bases(self.folder):
                with suppress(OSError):
                    tree = _Tree(base, os.path.realpath(self.cwd))
                    break
            else:
                raise OSError(errno.EINVAL, "No disk takes the layers of an overlay", str(self.folder))
            tree.show("/")
            tree.separate_shared_memory()
            tree.pass_through([*_listening_sockets(), *writable])
            tree.become_root()
            holder.write(str(os.getpid()))


def remove(folder: Path) -> None:
    """Remove a trial's folder and its layers, whatever modes a script has left in them.

    Folders that cannot be removed yet (a network disk keeps open files) are renamed, and the next call tries again.
    """
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f"{folder.name}-{os.urandom(8).hex()}"))
    for base in (*folder.parent.glob(f"{folder.name}-*"), *_spare_bases(folder)):
        for path, names, _ in os.walk(base):
            for name in names:
                if not os.path.islink(below := os.path.join(path, name)):
                    with suppress(OSError):
                        os.chmod(below, 0o700)
        shutil.rmtree(base, ignore_errors=True)


def available_protection(
    cwd: Path, folder: Path, command: Callable[..., list[str]], environment: Mapping[str, str]
) -> Protection:
    """Return the best mechanism that this machine offers, by entering a sandbox in a separate process.

    Args:
        cwd: the user's folder.
        folder: existing folder in which trials have theirs.
        command: makes the command line that runs a module, see `interpreter.bound_command`.
        environment: of that process.
    """
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": environment, "timeout": 60}
    trial = folder / f"protection-{os.getpid()}"
    for protection in (Protection.OVERLAY, Protection.LANDLOCK):
        sandbox = Sandbox(trial, cwd, protection)
        try:
            sandbox.files.mkdir(parents=True)
            sandbox.script_cwd.mkdir(parents=True, exist_ok=True)
            words = command("autotune.rank.sandbox", str(trial), str(cwd), str(protection))
            if not subprocess.run(words, check=False, **how).returncode:
                return protection
        except (OSError, subprocess.SubprocessError):
            continue
        finally:
            remove(trial)
    return Protection.NONE


def main() -> None:
    """Enter a sandbox; fail if a write next to the trial's folder is neither refused nor kept in a layer."""
    trial, cwd, protection = sys.argv[1:]
    sandbox, beside = Sandbox(Path(trial), Path(cwd), Protection(protection)), Path(f"{trial}-written")
    device = os.stat(beside.parent).st_dev
    sandbox.enter(str(sandbox.files), os.environ)
    with suppress(PermissionError):
        beside.touch()
        raise SystemExit(os.stat(beside.parent).st_dev == device)


# -- overlay -----------------------------------------------------------------------------------------------------------------


class _Tree:
    """New root of a mount namespace while it is built.

    Args:
        base: folder for the layers.
        cwd: the user's folder, without links.

    Raises:
        OSError: the file system of `base` takes no layers.
    """

    def __init__(self, base: Path, cwd: str) -> None:
        self._base, self._root, self._number = base, str(base / "root"), 0
        self._ordinary = _is_ordinary()
        self._options = "volatile,userxattr" if self._ordinary else "volatile,redirect_dir=on"
        self._mounts = _mount_points()
        self._cwd, self._known = cwd, [f"{one}/" for one in (cwd, os.path.expanduser("~"), tempfile.gettempdir())]
        for name in ("root", "empty"):
            (base / name).mkdir(parents=True, exist_ok=True)
        if not self._overlay(str(base / "empty"), self._root):
            raise OSError(errno.EINVAL, "The file system takes no layers", str(base))
        _call("umount2", os.fsencode(self._root), _DETACH)

    def show(self, path: str) -> None:
        """Show a folder or file in the new root: writable where the kernel has an overlay for it, else read-only."""
        at = self._at(path)
        if path in _KERNEL_FOLDERS:
            _mount(path, at, _BIND | _RECURSIVE)
            if path != "/proc":  # devices can be written to, but not removed
                _make_read_only(at, _AT_RECURSIVE if path == "/sys" else 0)
            return
        below = [one for one in self._mounts if one.startswith(f"{path.rstrip('/')}/")]
        outermost = [one for one in below if not any(one.startswith(f"{other}/") for other in below)]
        if self._mounts.get(path) or self._is_fixed(path) or not self._overlay(path, at):
            if below and not self._mounts.get(path) and os.access(path, os.R_OK | os.X_OK):
                self._show_entries(path, at)
                return
            _mount(path, at, _BIND | _RECURSIVE)
            _make_read_only(at, _AT_RECURSIVE)
        for one in outermost:
            with suppress(OSError):  # it lies below another mount
                self.show(one)

    def _is_fixed(self, path: str) -> bool:
        """Return whether an ordinary user cannot write anything in a folder."""
        if not self._ordinary or self._is_known(path) or not os.path.isdir(path):
            return False
        if path in _SYSTEM_FOLDERS and not os.access(path, os.W_OK):
            return True
        waiting = [path]
        for folder in waiting:  # grows
            if os.access(folder, os.W_OK) or len(waiting) > _MOST_FOLDERS:
                return False
            with suppress(PermissionError):
                for entry in os.scandir(folder):
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [entry.path] if os.access(entry.path, os.X_OK) else []
                    elif not entry.is_symlink() and os.access(entry.path, os.W_OK):
                        return False
        return True

    def _is_known(self, path: str) -> bool:
        return any(one.startswith(f"{path}/") for one in self._known)

    def _show_entries(self, path: str, at: str) -> None:
        """Show a folder that holds mount points, of which an ordinary user can make no overlay, by its entries."""
        if path == "/":
            _mount("tmpfs", at, 0, "tmpfs", "mode=0755")
        for entry in islice(os.scandir(path), _MOST_ENTRIES):
            with suppress(FileNotFoundError):  # another process has removed it
                self._show_entry(entry, os.path.join(at, entry.name))
        shutil.copystat(path, at)

    def _show_entry(self, entry: os.DirEntry[str], there: str) -> None:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), there)
        elif entry.is_dir():
            os.mkdir(there)
            self.show(entry.path)
        elif self._is_copied(entry):
            shutil.copy2(entry.path, there)
        else:
            Path(there).touch()
            _mount(entry.path, there, _BIND)
            _make_read_only(there, 0)

    def _adopt(self, path: str, upper: str) -> None:
        """Make folders in a layer whose owner or group the user namespace lacks.

        Such files of the user's current folder are copied, since copy-up refuses them with EOVERFLOW since Linux 6.4.
        """
        inside = f"{path}/".startswith(f"{self._cwd}/")
        shared = os.stat(path).st_mode & stat.S_ISVTX and not inside
        for entry in islice(os.scandir(path), _MOST_ENTRIES):
            with suppress(OSError):
                found, there = entry.stat(follow_symlinks=False), os.path.join(upper, entry.name)
                if (found.st_uid, found.st_gid) == (os.getuid(), os.getgid()):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    known = inside or self._is_known(entry.path)
                    if known or os.access(entry.path, os.W_OK) or not shared:  # in /tmp it is another user's
                        os.mkdir(there, stat.S_IMODE(found.st_mode) | stat.S_IRWXU)
                        if known:
                            self._adopt(entry.path, there)
                elif inside and self._is_copied(entry):
                    shutil.copy2(entry.path, there)

    def _is_copied(self, entry: os.DirEntry[str]) -> bool:
        small = entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _COPIED_BYTES
        return small and entry.path not in self._mounts and os.access(entry.path, os.R_OK | os.W_OK)

    def separate_shared_memory(self) -> None:
        """Give the trial private shared memory of the size that is free; existing files there stay readable."""
        free, layers = shutil.disk_usage(_SHARED_MEMORY).free, self._layers()
        with suppress(OSError):
            _mount("tmpfs", layers, 0, "tmpfs", f"size={free},mode=0700")
            for name in ("upper", "work"):
                os.mkdir(os.path.join(layers, name))
            self._overlay(_SHARED_MEMORY, self._at(_SHARED_MEMORY), layers)

    def pass_through(self, paths: Iterable[str]) -> None:
        """Show these as they are: what is written there stays."""
        for path in dict.fromkeys(paths):
            with suppress(OSError):
                _mount(path, self._at(os.path.realpath(path)), _BIND | _RECURSIVE)

    def become_root(self) -> None:
        os.chdir(self._root)
        _call("pivot_root", b".", b".")
        _call("umount2", b".", _DETACH)
        os.chdir("/")

    def _overlay(self, path: str, at: str, layers: str | None = None) -> bool:
        layers, opened = layers or self._layers(), list[int]()
        try:
            shutil.copystat(path, f"{layers}/upper")
            if self._ordinary:
                with suppress(OSError):
                    self._adopt(path, f"{layers}/upper")
            self._hide_layers(path, f"{layers}/upper")
            for folder in (path, f"{layers}/upper", f"{layers}/work"):
                opened.append(os.open(folder, os.O_PATH | os.O_DIRECTORY))
            # by descriptor: a path's own commas and colons would end an option
            lower, upper, work = (f"/proc/self/fd/{one}" for one in opened)
            options = f"lowerdir={lower},upperdir={upper},workdir={work},{self._options}"
            _mount("overlay", at, 0, "overlay", options)
        except OSError:
            return False
        finally:
            for one in opened:
                os.close(one)
        return True

    def _hide_layers(self, path: str, upper: str) -> None:
        """Make the layers' folder an opaque, empty one in a layer, so that no tree contains itself."""
        if not str(self._base).startswith(f"{path.rstrip('/')}/"):
            return
        for name in self._base.relative_to(path).parts:
            path, upper = os.path.join(path, name), os.path.join(upper, name)
            os.makedirs(upper, exist_ok=True)
            shutil.copystat(path, upper)
            with suppress(OSError):
                found = os.stat(path)
                os.chown(upper, found.st_uid, found.st_gid)
        os.setxattr(upper, "user.overlay.opaque" if self._ordinary else "trusted.overlay.opaque", b"y")

    def _layers(self) -> str:
        self._number += 1
        layers = self._base / str(self._number)
        for name in ("upper", "work"):
            (layers / name).mkdir(parents=True)
        return str(layers)

    def _at(self, path: str) -> str:
        return self._root + path.rstrip("/")


def _layer_bases(folder: Path) -> Iterator[Path]:
    """Folders that may take layers: in the trial's folder, on a local disk, at last in memory."""
    yield folder / "layers"
    for base in _spare_bases(folder):
        with suppress(OSError):
            base.mkdir(mode=0o700)
            yield base
    _mount("tmpfs", str(folder / "layers"), 0, "tmpfs", "mode=0700")
    yield folder / "layers"


def _spare_bases(folder: Path) -> list[Path]:
    """Folders on local disks for the layers of a trial whose own folder lies on a network disk."""
    name = f"autotune-layers-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    return [Path(base, name) for base in dict.fromkeys(("/var/tmp", tempfile.gettempdir()))]


def _mount_points() -> dict[str, bool]:
    """Return whether a mount is read-only, by its path without `/` itself. proc_pid_mountinfo(5)."""
    lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]
    fields = [line.split(b" ")[4:6] for line in lines]  # a space in a path is \040
    paths = [os.fsdecode(path.decode("unicode_escape").encode("latin-1")) for path, _ in fields]
    return {path: b"ro" in options.split(b",") for path, (_, options) in zip(paths, fields, strict=True) if path != "/"}


def _listening_sockets() -> list[str]:
    """Return Unix sockets of other processes, which cannot be reached through an overlay. proc_net_unix(5)."""
    rows = [line.split(None, 7) for line in Path("/proc/net/unix").read_bytes().split(b"\n")]
    paths = [os.fsdecode(row[7]) for row in rows if len(row) == 8]
    return [path for path in paths if path.startswith("/") and not path.startswith(_KERNEL_FOLDERS)]


def _make_namespaces() -> None:
    """Give this process private mounts, in a new user namespace if it may not mount."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS)
    except PermissionError:
        _call("unshare", _NEW_MOUNTS | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="utf-8")
    _mount(None, "/", _RECURSIVE | _PRIVATE)


def _join_namespaces(pid: int) -> None:
    users, mounts = (os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt"))
    if os.fstat(users).st_ino != os.stat("/proc/self/ns/user").st_ino:
        _call("setns", users, _NEW_USER)
    _call("setns", mounts, _NEW_MOUNTS)
    os.close(users)
    os.close(mounts)


def _is_ordinary() -> bool:
    """Return whether this process lives in a user namespace that knows its own user only."""
    return Path("/proc/self/uid_map").read_text(encoding="utf-8").split() != ["0", "0", str(2**32 - 1)]


def _drop_capabilities() -> None:
    """Take rights that lead past an overlay from this process; from an ordinary user's all that its namespace gave."""
    for one in _DROPPED:
        with suppress(OSError):
            _call("prctl", _DROP_BOUND, one, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))  # version 3, this process: capget(2)
    held = ctypes.create_string_buffer(24)
    _call("capget", header, held)
    low, high = (0, 0) if _is_ordinary() else (~sum(1 << one for one in _DROPPED), ~0)
    masks = (low,) * 3 + (high,) * 3
    kept = (have & mask for have, mask in zip(struct.unpack("=6I", held.raw), masks, strict=True))
    _call("capset", header, struct.pack("=6I", *kept))


def _reopen_folders() -> None:
    """Have descriptors of folders that were opened before lead to the same folders in the new root."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISDIR(os.fstat(number).st_mode):
                opened = os.open(os.readlink(f"/proc/self/fd/{number}"), os.O_RDONLY | os.O_DIRECTORY)
                os.dup2(opened, number, inheritable=os.get_inheritable(number))
                os.close(opened)


def _copying_rename(rename: Callable[..., None]) -> Callable[..., None]:
    """Wrap `os.rename` so that it copies if an ordinary user's overlay cannot rename.

    Affected are folders of the layer below, and renames between two overlays.
    """

    def renamed(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        try:
            rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            if error.errno != errno.EXDEV or not src_dir_fd is dst_dir_fd is None:
                raise
            copied = f"{os.path.abspath(os.fsdecode(dst))}.{os.urandom(8).hex()}"
            if os.path.isdir(src) and not os.path.islink(src):
                shutil.copytree(src, copied, symlinks=True)
                rename(copied, dst)
                shutil.rmtree(src)
            else:
                shutil.copy2(src, copied, follow_symlinks=False)
                rename(copied, dst)
                os.unlink(src)

    return renamed


# -- Landlock ----------------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
_WRITES = sum(1 << bit for bit in (1, *range(4, 15)))  # LANDLOCK_ACCESS_FS_* that change something
_WRITES_OF_FILES = 1 << 1 | 1 << 14  # write, truncate
_TRUNCATE_ABI = 3  # covers truncation, and lets files be moved between folders: Linux 6.2


def _restrict_writes(writable: list[str]) -> None:
    """Have the kernel refuse changes outside of these paths to this process and its children.

    Raises:
        OSError: the kernel has no Landlock that covers truncation.
    """
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if _syscall(_LANDLOCK_CREATE, None, 0, 1) < _TRUNCATE_ABI:
        raise OSError(errno.EOPNOTSUPP, "Landlock does not cover truncation")
    rules = _syscall(_LANDLOCK_CREATE, struct.pack("=Q", _WRITES), 8, 0)
    for path in writable:
        with suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH)
            entire = stat.S_ISDIR(os.fstat(opened).st_mode) and path not in _KERNEL_FOLDERS
            allowed = _WRITES if entire else _WRITES_OF_FILES
            _syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    _syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


# Architectures, their ioctl, and calls that change modes, owners, times and attributes, which Landlock does not cover.
_X86_CALLS = (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466, 469)
_ARM_CALLS = (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452, 463, 466, 469)
_ATTRIBUTE_CALLS = {"x86_64": (0xC000003E, 16, _X86_CALLS), "aarch64": (0xC00000B7, 29, _ARM_CALLS)}
_WRITING_IOCTL, _FLAGS_IOCTLS = 0xC000FF00, (0x40006600, 0x40005800, 0x40007600)  # direction and type: ioctl_iflags(2)
_IO_URING_SETUP, _X32_CALLS = 425, 0x40000000  # ways to the same calls


def _ignore_attribute_changes() -> None:
    """Have changes of attributes do nothing and succeed, so that programs that copy them go on.

    A filter sees no paths: in the trial's own folder they do nothing either.

    Raises:
        OSError: the kernel has no seccomp filters, or the architecture is not known.
    """
    if platform.machine() not in _ATTRIBUTE_CALLS:
        raise OSError(errno.EOPNOTSUPP, f"No system calls are known for {platform.machine()}")
    architecture, ioctl, calls = _ATTRIBUTE_CALLS[platform.machine()]
    load, equals, at_least, mask, end = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD, BPF_JEQ, BPF_JGE, BPF_AND, BPF_RET
    ends = {"allow": 0x7FFF0000, "pretend": 0x00050000, "refuse": 0x00050000 | errno.ENOSYS}  # SECCOMP_RET_*
    program = [  # code, value, where to go if it holds and if not
        (load, 4, "", ""),
        (equals, architecture, "", "refuse"),
        (load, 0, "", ""),
        (at_least, _X32_CALLS, "refuse", ""),
        (equals, _IO_URING_SETUP, "refuse", ""),
        *((equals, number, "pretend", "") for number in calls),
        (equals, ioctl, "", "allow"),
        (load, 24, "", ""),
        (mask, _WRITING_IOCTL, "", ""),
        *((equals, number, "pretend", "") for number in _FLAGS_IOCTLS),
        *((end, value, "", "") for value in ends.values()),
    ]
    goals = {name: len(program) - len(ends) + at for at, name in enumerate(ends)}
    steps = [
        (code, *(goals.get(to, at + 1) - at - 1 for to in (yes, no)), value)
        for at, (code, value, yes, no) in enumerate(program)
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in steps))
    _call("prctl", _SECCOMP, 2, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0)


def _create_view(view: Path, cwd: Path, hidden: set[str]) -> None:
    """Make real folders for those of the user's current folder, with links to its files; its parents are shown by links."""
    names = _shown_names(cwd)
    for name, parent in zip(names, [*cwd.parents][: len(names)][::-1], strict=True):
        view.mkdir()
        with suppress(OSError):
            for entry in islice(os.scandir(parent), _MOST_ENTRIES):
                if entry.name != name and os.path.realpath(entry.path) not in hidden:
                    os.symlink(entry.path, view / entry.name)
        view /= name
    waiting = [(cwd, view)]
    for source, shown in waiting:  # grows
        shown.mkdir()
        with suppress(OSError):
            for entry in os.scandir(source):
                target = os.readlink(entry.path) if entry.is_symlink() else "/"
                if entry.is_dir(follow_symlinks=False) and len(waiting) < _VIEW_FOLDERS:
                    waiting += [(source / entry.name, shown / entry.name)] if entry.path not in hidden else []
                else:  # a link to a neighbour is one again
                    os.symlink(entry.path if "/" in target else target, shown / entry.name)


def _shown_names(cwd: Path) -> tuple[str, ...]:
    """Return the names from the outermost folder that a view shows, never `/`, down to the current folder."""
    return cwd.parts[2:][-_VIEW_PARENTS:]


def _caches(environment: Mapping[str, str], cwd: str) -> Iterator[str]:
    """Make and name the caches that libraries keep between runs, by the variables that they document.

    A folder that holds the user's current one is none.
    """
    home = os.path.expanduser("~")
    general = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    hub = environment.get("HF_HOME") or f"{general}/huggingface"
    inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{environment.get('USER', 'root')}")
    usual = {
        "HF_HUB_CACHE": f"{hub}/hub",
        "TRANSFORMERS_CACHE": f"{hub}/hub",
        "HF_ASSETS_CACHE": f"{hub}/assets",
        "HF_XET_CACHE": f"{hub}/xet",
        "HF_MODULES_CACHE": f"{hub}/modules",
        "HF_DATASETS_CACHE": f"{hub}/datasets",
        "TORCH_EXTENSIONS_DIR": f"{general}/torch_extensions",
        "TORCHINDUCTOR_CACHE_DIR": inductor,
        "TRITON_CACHE_DIR": f"{environment.get('TRITON_HOME') or home}/.triton/cache",
        "CUDA_CACHE_PATH": f"{home}/.nv/ComputeCache",
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",  # pipes of NVIDIA's daemon
        "PIP_CACHE_DIR": f"{general}/pip",
    }
    for name, path in usual.items():
        path = os.path.expanduser(environment.get(name) or path)
        if path.startswith("/") and not f"{cwd}/".startswith(f"{os.path.realpath(path)}/"):
            with suppress(OSError):
                os.makedirs(path, exist_ok=True)
                yield path


# -- system calls --------------------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    if (result := int(getattr(_libc, name)(*arguments))) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(number: int, *arguments: Any) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def _mount(source: str | None, at: str, flags: int, kind: str | None = None, options: str | None = None) -> None:
    source_, at_, kind_, options_ = (one and os.fsencode(one) for one in (source, at, kind, options))
    _call("mount", source_, at_, kind_, ctypes.c_ulong(flags), options_)


def _make_read_only(at: str, flags: int) -> None:
    attributes = struct.pack("=4Q", _ATTR_READ_ONLY, 0, 0, 0)
    _syscall(_MOUNT_SETATTR, -100, os.fsencode(at), flags, attributes, ctypes.c_size_t(len(attributes)))


if __name__ == "__main__":
    main()
