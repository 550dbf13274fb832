"""/proc, prctl, mounts, limits of a process, and cleanup of descendant processes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import shutil
import signal
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

# -- memory and processes ----------------------------------------------------------------------------------------------
#
# The tuner uses psutil for more than this. Ranks, the fork server and the tracer run in the user's training
# environment, which need not have psutil, and use this module.

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # signals that give notice, and kill a process without a handler
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_DEAD = ("Z", "X")  # states of a process that has ended: proc_pid_stat(5)
_MEMORY_BLOCKS = Path("/sys/devices/system/memory")
_PAGE_TABLE_SHARE = 1 / 64  # share of all memory: the kernel describes a page of 4096 bytes by 64
_LEAST_GROWTH = 0.1  # share of the plugged memory; the kernel and the firmware keep up to this
_LONGEST_NAME = 15  # bytes of a name that the kernel keeps


class MainMemory(NamedTuple):
    """The machine's memory in bytes, regardless of cgroups."""

    total: int
    available: int  # without swapping; includes page cache that the kernel can reclaim


def main_memory() -> MainMemory:
    """Return the sizes in /proc/meminfo, plus plugged memory that the kernel has not yet put to use.

    MemTotal of some virtual machines starts small and grows: their kernel initialises pages on demand, or a balloon returns them.
    Memory blocks in sysfs show all of it from the start. Nothing is cached, so that a later call sees memory that was plugged in
    since.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    sizes = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    total, available = int(sizes["MemTotal:"]) * 1024, int(sizes["MemAvailable:"]) * 1024
    growth = _growth_bytes(total)
    return MainMemory(total + growth, available + growth)


def _growth_bytes(total_bytes: int) -> int:
    """Return the bytes by which MemTotal can grow without new hardware.

    The result is 0 if sysfs does not show more, or if /proc/meminfo is a container's own file (lxcfs).
    """
    plugged = 0
    with suppress(OSError, ValueError):
        if os.stat("/proc/meminfo").st_dev == os.stat("/proc").st_dev:
            # the folder's number of links changes with its blocks
            plugged = _plugged_bytes(_MEMORY_BLOCKS, os.stat(_MEMORY_BLOCKS).st_nlink)
    growth = int(plugged * (1 - _PAGE_TABLE_SHARE)) - total_bytes
    return growth if growth > _LEAST_GROWTH * plugged else 0


@functools.lru_cache(maxsize=4)
def _plugged_bytes(folder: Path, links: int) -> int:
    """Return the size of all memory blocks that are online (Linux, Documentation/ABI/testing/sysfs-devices-memory)."""
    block_bytes = int((folder / "block_size_bytes").read_text(encoding="utf-8"), 16)
    return block_bytes * sum(
        state.read_text(encoding="utf-8").strip() == "online" for state in folder.glob("memory*/state")
    )


def data_bytes(pid: int | str) -> int:
    """Return the bytes of a process that RLIMIT_DATA counts, from /proc/PID/statm."""
    return int(_text(f"/proc/{pid}/statm").split()[5]) * os.sysconf("SC_PAGE_SIZE")


def boot_id() -> str:
    """Return an id of this boot of this machine, equal in all its containers; empty if the kernel gives none."""
    with suppress(OSError):
        return _text("/proc/sys/kernel/random/boot_id").strip()
    return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on, the third: proc_pid_stat(5). Empty once it has ended."""
    with suppress(OSError):
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return fields if fields and fields[0] not in _DEAD else []
    return []


def pid_is_alive(pid: int) -> bool:
    """Check that a process exists and has not ended."""
    return bool(_stat(pid))


def has_signal_handler(pid: int, number: signal.Signals) -> bool:
    """Check that a running process has a handler for the signal: proc_pid_status(5), `SigCgt`."""
    with suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def started_at(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot; 0 if it is gone.

    Together with the process id it identifies a process, since ids are reused.
    """
    return int(fields[19]) if (fields := _stat(pid)) else 0


def name_of(pid: int) -> str | None:
    """Return a process's name, in full if its command line has it; None if it is gone or another user's."""
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n")
        if len(name) >= _LONGEST_NAME:  # cut by the kernel, perhaps in the middle of a character
            longer = os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])
            name = longer if longer.startswith(name) else name
    except OSError:
        return None
    return name.decode(errors="replace")


def is_open(file: Path) -> bool:
    """Check that a visible process of this machine has the file open."""
    path = os.path.realpath(file)
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # gone, or another user's
            for descriptor in folder.iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) == path:
                        return True
    return False


def descendants(*pids: int) -> list[int]:
    """Return the ids of all running descendants of these processes; /proc is read once."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        if fields := _stat(one):
            children.setdefault(int(fields[1]), []).append(one)
    found = [child for pid in dict.fromkeys(pids) for child in children.get(pid, ())]
    for one in found:  # the list grows during the loop
        found += children.get(one, ())
    return found


def pids_working_in(folder: Path) -> list[int]:
    """Return the ids of other processes whose working directory is the folder."""
    path, found = os.path.realpath(folder), []
    for pid in _pids():
        with suppress(OSError):  # gone, or another user's
            if pid != os.getpid() and os.readlink(f"/proc/{pid}/cwd") == path:
                found.append(pid)
    return found


def _text(file: str) -> str:
    """Read a file whose 15-byte names may end in the middle of a character."""
    return Path(file).read_text(errors="replace", encoding="utf-8")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent dies, so that a killed tuner leaves no orphan.

    If the parent is already dead, the signal is sent now: the kernel does not report a death that precedes this call. The parent
    is the thread that started this process (prctl(2)), so that a thread that starts ranks or a fork server has to outlive them.

    Args:
        parent: the process id of the starter of this process, direct or through a wrapper script of an interpreter.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, number)
    if os.getppid() != parent and not pid_is_alive(parent):
        os.kill(os.getpid(), number)


def ignore_user_signals() -> None:
    """Ignore SIGUSR1 and SIGUSR2 until this process has a handler for them.

    Slurm's `--signal=USR1@600` and `scancel --signal=USR1` may send them to every process of a step. The kernel's setting
    changes, but not Python's: `signal.getsignal` still returns the default. Lightning and other libraries check that before they
    install the handler that saves a checkpoint.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in NOTICES:
        libc.signal(number, int(signal.SIG_IGN))


def adopt_orphans() -> None:
    """Adopt the running children of a dead child, such as a data loader's worker with its own session."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_SUBREAPER, 1)


def own_memory() -> None:
    """Copy the memory shared with the fork's parent, all at once and in order.

    Pages that are copied one by one, on write, end up scattered over physical memory. Training is then 3 to 5 % slower than in a
    process that imported everything itself. Linux before 5.14 does not support this.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError, ValueError):
        for low, high in _shared_with_parent():
            libc.madvise(low, high - low, _POPULATE_WRITE)


def _shared_with_parent() -> list[tuple[int, int]]:
    """Return address ranges of private memory that is mostly still shared: proc_pid_smaps(5).

    Untouched memory is left out, since copying it would count as used memory.
    """
    found, low, high = [], 0, 0
    for line in _text("/proc/self/smaps").splitlines():
        first, second, *_ = line.split()
        if not first.endswith(":"):
            low, high = (int(address, 16) for address in first.split("-")) if second == "rw-p" else (0, 0)
        elif first == "Shared_Dirty:" and int(second) * 1024 > (high - low) / 2 > 0:
            found.append((low, high))
    return found


# -- mounts and limits -------------------------------------------------------------------------------------------------
#
# System calls that the standard library lacks. Each raises OSError with the kernel's reason.

BIND, RECURSIVE, READ_ONLY = 0x1000, 0x4000, 1  # mount(2)
_NO_DEVICE, _REMOUNT, _PRIVATE, _DETACH = 4, 32, 0x40000, 2  # mount(2), umount2(2)
_NEW_MOUNTS, _NEW_IPC, _NEW_USER = 0x00020000, 0x08000000, 0x10000000  # unshare(2)
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000  # mount_setattr(2), which has mount's flags
_SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES = 22, 24, 38  # prctl(2)
_TERMINALS = "/dev/pts"
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    if (result := int(getattr(_libc, name)(*arguments))) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(number: int, *arguments: Any) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def mount(source: str | None, at: str, flags: int, kind: str | None = None, options: str | None = None) -> None:
    """Mount a file system or, with `BIND`, show a folder or file at another path."""
    source_, at_, kind_, options_ = (one and os.fsencode(one) for one in (source, at, kind, options))
    _call("mount", source_, at_, kind_, ctypes.c_ulong(flags), options_)


def unmount(at: str) -> None:
    """Detach the mount at a path; open files stay usable. umount2(2)."""
    _call("umount2", os.fsencode(at), _DETACH)


def make_read_only(at: str, *, recursive: bool = False, devices: bool = True) -> None:
    """Make the mount at a path read-only. mount_setattr(2), or mount(2) before Linux 5.12.

    Args:
        devices: devices can be opened, and written to.
    """
    set_, flags = READ_ONLY | (0 if devices else _NO_DEVICE), _AT_RECURSIVE if recursive else 0
    attributes = struct.pack("=4Q", set_, 0, 0, 0)
    try:
        _syscall(_MOUNT_SETATTR, -100, os.fsencode(at), flags, attributes, ctypes.c_size_t(len(attributes)))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        for path in [at, *(one for one in mount_points() if recursive and one.startswith(f"{at}/"))]:
            mount(None, path, _REMOUNT | BIND | set_)


def mount_points() -> dict[str, bool]:
    """Return whether a mount is read-only, by its path without `/` itself. proc_pid_mountinfo(5)."""
    lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]
    fields = [line.split(b" ")[4:6] for line in lines]  # a space in a path is \040
    paths = [os.fsdecode(path.decode("unicode_escape").encode("latin-1")) for path, _ in fields]
    return {path: b"ro" in options.split(b",") for path, (_, options) in zip(paths, fields, strict=True) if path != "/"}


def copying_rename(rename: Callable[..., None]) -> Callable[..., None]:
    """Wrap `os.rename` so that it copies between two overlays, and folders from below an ordinary user's overlay."""

    def renamed(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        try:
            rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            if error.errno != errno.EXDEV or not src_dir_fd is dst_dir_fd is None:
                raise
            folder = os.path.isdir(src) and not os.path.islink(src)
            copied = f"{os.path.abspath(os.fsdecode(dst))}.{os.urandom(8).hex()}"
            if folder:
                shutil.copytree(src, copied, symlinks=True)
            else:
                shutil.copy2(src, copied, follow_symlinks=False)
            rename(copied, dst)
            (shutil.rmtree if folder else os.unlink)(src)

    return renamed


def remove_tree(folder: str | Path) -> None:
    """Remove a folder with what this user may remove of it, whatever depth and modes a script has left in it.

    Inner folders move to the top one by one: neither Python's stack nor the number of descriptors bounds their depth.
    """
    with suppress(OSError):  # another process removes it too
        _make_writable(folder)
        top = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            waiting, moved = ["."], os.urandom(8).hex()
            for name in waiting:  # grows
                waiting += _empty(name, top, f"{moved}-{len(waiting)}")
                with suppress(OSError):
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(name: str, top: int, moved: str) -> list[str]:
    """Remove the files of a folder, move its folders into the folder `top`, and return their names there."""
    found = list[str]()
    with suppress(OSError):
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=top)
        try:
            for entry in [*os.scandir(opened)]:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        _make_writable(entry.name, opened)
                        os.rename(entry.name, new := f"{moved}-{len(found)}", src_dir_fd=opened, dst_dir_fd=top)
                        found.append(new)
                    else:
                        os.unlink(entry.name, dir_fd=opened)
        finally:
            os.close(opened)
    return found


def _make_writable(folder: str | Path, opened: int | None = None) -> None:
    """Let the owner remove entries of a folder, never of one behind a link that a running script may put in its place.

    Args:
        folder: path, or name in the folder `opened`.

    Raises:
        OSError: it is no folder, or another user's.
    """
    handle = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=opened)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)


def change_root(folder: str) -> None:
    """Make a mount point the root of this process's mount namespace, and detach the former root. pivot_root(2)."""
    os.chdir(folder)
    _call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")
    _reopen_folders()


def enter_mount_namespace() -> None:
    """Give this process private mounts and System V and POSIX queues, in a new user namespace if it may not mount.

    user_namespaces(7), ipc_namespaces(7).
    """
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS | _NEW_IPC)
    except PermissionError:
        _call("unshare", _NEW_MOUNTS | _NEW_IPC | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="utf-8")
    mount(None, "/", RECURSIVE | _PRIVATE)


def join_mount_namespace(pid: int) -> None:
    """Enter the namespaces that a process has made by `enter_mount_namespace`. setns(2)."""
    kinds = {"user": _NEW_USER, "ipc": _NEW_IPC, "mnt": _NEW_MOUNTS}
    opened = {kind: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name, kind in kinds.items()}
    if os.fstat(opened[_NEW_USER]).st_ino == os.stat("/proc/self/ns/user").st_ino:
        os.close(opened.pop(_NEW_USER))
    for kind, namespace in opened.items():
        _call("setns", namespace, kind)
        os.close(namespace)
    _reopen_folders()


def _reopen_folders() -> None:
    """Have descriptors of folders that were opened before lead to the same folders in the new root."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISDIR(os.fstat(number).st_mode):
                opened = os.open(os.readlink(f"/proc/self/fd/{number}"), os.O_RDONLY | os.O_DIRECTORY)
                os.dup2(opened, number, inheritable=os.get_inheritable(number))
                os.close(opened)


def listening_sockets() -> list[str]:
    """Return the paths of Unix sockets of all processes. proc_net_unix(5).

    A path that leads to no socket here is left out: its socket was removed, or lies in another mount namespace.
    """
    rows = [line.split(None, 7) for line in Path("/proc/net/unix").read_bytes().split(b"\n")]
    paths = [os.fsdecode(row[7]) for row in rows if len(row) == 8]
    return [path for path in paths if path.startswith("/") and _is_socket(path)]


def _is_socket(path: str) -> bool:
    with suppress(OSError):  # gone, or in a folder that this user cannot enter
        return stat.S_ISSOCK(os.stat(path).st_mode)
    return False


def serves_every_user(path: str) -> bool:
    """Return whether every user can connect to a socket, whose daemon is another user's: it does not act for this one."""
    state = os.stat(path)
    reached = all(one.stat().st_mode & stat.S_IXOTH for one in Path(os.path.realpath(path)).parents)
    return bool(state.st_mode & stat.S_IWOTH) and reached and state.st_uid != os.getuid()


def in_user_namespace() -> bool:
    """Return whether this process lives in a user namespace that does not know every user."""
    return Path("/proc/self/uid_map").read_text(encoding="utf-8").split() != ["0", "0", str(2**32 - 1)]


def machine_settings() -> list[str]:
    """Return the paths in /proc that belong to no process and may lead to a setting of the machine: proc(5)."""
    found = []
    for one in os.scandir("/proc"):
        # one that cannot be looked at cannot be opened either: lxcfs's, whose server is gone
        with suppress(OSError):
            settable = one.is_dir() or one.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
            if settable and not one.name.isdigit() and not one.is_symlink():
                found.append(one.path)
    return found


def machine_devices(folder: str = "/dev") -> list[str]:
    """Return the machine's own devices that this process may write to.

    These are block devices, and character devices that neither every user nor a group without disks may write to, such as
    SCSI and NVMe commands, /dev/mem, /dev/kmsg and watchdogs. Devices of trainings are open to other users.
    """
    found = {}
    for device, state in _devices(folder):
        mode = state.st_mode
        if (stat.S_ISBLK(mode) or mode & stat.S_IWUSR) and os.access(device, os.W_OK):
            found[device] = state
    groups = {0, *(state.st_gid for state in found.values() if stat.S_ISBLK(state.st_mode))}
    writers = {path: stat.S_IWOTH | (0 if state.st_gid in groups else stat.S_IWGRP) for path, state in found.items()}
    return [one for one, state in found.items() if stat.S_ISBLK(state.st_mode) or not state.st_mode & writers[one]]


def guard_devices(at: str, mounts: Collection[str]) -> None:
    """Make a mount of /dev hold devices that can be written to, but not removed, and terminals and queues of its own.

    The user's terminals are left out, and the `machine_devices` cannot be opened.

    Args:
        at: the mount.
        mounts: mount points of this machine.

    Raises:
        OSError: the mount cannot be made read-only.
    """
    make_read_only(at)
    inside = [f"{at}/{one.removeprefix('/dev/')}" for one in mounts if one.startswith("/dev/") and one != _TERMINALS]
    for mounted in inside:  # a file of Kubernetes, large pages
        with suppress(OSError):  # it lies below another mount
            make_read_only(mounted)
    for device in machine_devices():
        with suppress(FileNotFoundError):  # unplugged since
            mount(device, f"{at}/{device.removeprefix('/dev/')}", BIND)
            make_read_only(f"{at}/{device.removeprefix('/dev/')}", devices=False)
    with suppress(OSError):  # not in this kernel
        mount("mqueue", f"{at}/mqueue", 0, "mqueue")
    with suppress(OSError):  # no terminals
        mount("devpts", f"{at}/pts", 0, "devpts", "newinstance,ptmxmode=0666,mode=0620")
        mount(f"{at}/pts/ptmx", f"{at}/ptmx", BIND)  # may lead to the former terminals in a container


def training_devices() -> list[str]:
    """Return the terminals' folder and all devices except for the `machine_devices`; regular files in /dev are none."""
    machine = {*machine_devices()}
    return [_TERMINALS, *(device for device, _ in _devices("/dev") if device not in machine)]


def _devices(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all devices below a folder, except for terminals."""
    for path, folders, names in os.walk(folder):
        folders[:] = {*folders}.difference(("pts", "shm"))
        for device in (os.path.join(path, name) for name in names):
            with suppress(OSError):  # unplugged since
                if stat.S_ISCHR((state := os.lstat(device)).st_mode) or stat.S_ISBLK(state.st_mode):
                    yield device, state


def make_cuda_device(devices: str = "/dev") -> None:
    """Load the driver's module for CUDA if no process has used CUDA since the machine has started.

    CUDA itself starts this program at its first use, and no process may load a module or make a device file in a sandbox.
    """
    if os.path.exists(f"{devices}/nvidiactl") and not os.path.exists(f"{devices}/nvidia-uvm"):
        with suppress(OSError, subprocess.SubprocessError):
            words, null = ["nvidia-modprobe", "-u", "-c=0"], subprocess.DEVNULL
            subprocess.run(words, stdin=null, stdout=null, stderr=null, timeout=60, check=False)


# capabilities(7) that root keeps: what ends at files, which the sandbox guards (chown, dac_override, fowner, fsetid), and at the
# process itself (setgid, setuid, setpcap, ipc_lock to pin memory, sys_chroot, sys_resource to raise limits). All others are
# dropped, a later kernel's too.
FILE_CAPABILITIES = (0, 1, 3, 4, 6, 7, 8, 14, 18, 24)


def keep_capabilities(numbers: Collection[int]) -> None:
    """Take all other capabilities from this process and its children. capabilities(7)."""
    for one in set(range(64)).difference(numbers):
        with suppress(OSError):  # unknown to this kernel, or not allowed
            _call("prctl", _DROP_BOUND, one, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))  # version 3, this process: capget(2)
    held = ctypes.create_string_buffer(24)
    _call("capget", header, held)
    mask = sum(1 << one for one in numbers)
    masks = (mask & 0xFFFFFFFF,) * 3 + (mask >> 32,) * 3
    kept = (have & mask for have, mask in zip(struct.unpack("=6I", held.raw), masks, strict=True))
    _call("capset", header, struct.pack("=6I", *kept))


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
_WRITES = sum(1 << bit for bit in (1, *range(4, 15)))  # LANDLOCK_ACCESS_FS_* that change something
_WRITES_OF_FILES = 1 << 1 | 1 << 14  # write, truncate
_TRUNCATE_ABI = 3  # covers truncation, and lets files be moved between folders: Linux 6.2
_SCOPE_ABI, _SCOPE_SIGNALS = 6, 2  # LANDLOCK_SCOPE_SIGNAL: Linux 6.12


def landlock_version() -> int:
    """Return the version of the kernel's Landlock.

    Raises:
        OSError: the kernel has none that covers truncation.
    """
    if (version := _syscall(_LANDLOCK_CREATE, None, 0, 1)) < _TRUNCATE_ABI:
        raise OSError(errno.EOPNOTSUPP, "Landlock does not cover truncation")
    return version


def restrict_writes(paths: Iterable[str], files_in: Iterable[str] = ()) -> None:
    """Have Landlock refuse this process and its children every change outside of these paths, and signals to other processes.

    https://docs.kernel.org/userspace-api/landlock.html

    Args:
        paths: files, and folders with all that they hold.
        files_in: folders whose files can be written to, but neither made nor removed.

    Raises:
        OSError: see `landlock_version`.
    """
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    version = landlock_version()
    handled = struct.pack("=3Q", _WRITES, 0, _SCOPE_SIGNALS if version >= _SCOPE_ABI else 0)
    rules = _syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled) if version >= _SCOPE_ABI else 8), 0)
    for path, allowed in [*((one, _WRITES) for one in paths), *((one, _WRITES_OF_FILES) for one in files_in)]:
        with suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH)
            allowed &= ~0 if stat.S_ISDIR(os.fstat(opened).st_mode) else _WRITES_OF_FILES
            _syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    _syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


class _Calls(NamedTuple):
    """Numbers of system calls of an architecture."""

    audit: int  # AUDIT_ARCH_*
    ioctl: int
    prlimit64: int
    priorities: tuple[int, ...]  # setpriority, ioprio_set
    keyrings: tuple[int, ...]  # add_key, request_key, keyctl
    queues: tuple[int, ...]  # System V shared memory, semaphores and queues, POSIX queues: sysvipc(7), mq_overview(7)
    attributes: tuple[int, ...]  # change modes, owners, times and attributes, which Landlock does not cover


_X86_CALLS = (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466, 469)
_ARM_CALLS = (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452, 463, 466, 469)
_X86_QUEUES, _ARM_QUEUES = (*range(29, 32), *range(64, 72), 220, *range(240, 246)), (*range(180, 198),)
_CALLS = {
    "x86_64": _Calls(0xC000003E, 16, 302, (141, 251), (248, 249, 250), _X86_QUEUES, _X86_CALLS),
    "aarch64": _Calls(0xC00000B7, 29, 261, (140, 30), (217, 218, 219), _ARM_QUEUES, _ARM_CALLS),
}
_WRITING_IOCTL, _FLAGS_IOCTLS = 0xC000FF00, (0x40006600, 0x40005800, 0x40007600)  # direction and type: ioctl_iflags(2)
_BTRFS_IOCTLS = 0x40009400  # change subvolumes through a folder that is open for reading; copies fall back from FICLONE
_IO_URING_SETUP, _X32_CALLS = 425, 0x40000000  # ways to the same calls
_SEVERAL = 2  # PRIO_USER, IOPRIO_WHO_PGRP, IOPRIO_WHO_USER: more processes than the caller's own


def ignore_changes(*, everywhere: bool) -> None:
    """Have changes of other processes' limits and priorities do nothing and succeed, and hide the kernel's keyrings.

    A seccomp(2) filter sees numbers, no paths and no kinship: a change names its own process by 0, else it does nothing.

    Args:
        everywhere: no namespace confines this process. Attributes of files stay too, in any folder, so that programs that copy
            them go on. The kernel seems to have neither System V memory nor queues.

    Raises:
        OSError: the kernel has no seccomp filters, or the architecture is not known.
    """
    if platform.machine() not in _CALLS:
        raise OSError(errno.EOPNOTSUPP, f"No system calls are known for {platform.machine()}")
    calls = _CALLS[platform.machine()]
    load, equals, at_least, mask, end = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD, BPF_JEQ, BPF_JGE, BPF_AND, BPF_RET
    first, second, third = 16, 24, 32  # places of arguments, in bytes
    program = [  # name of a step, code, value, where to go if it holds and if not
        ("", load, 4, "", ""),
        ("", equals, calls.audit, "", "refuse"),
        ("", load, 0, "", ""),
        ("", at_least, _X32_CALLS, "refuse", ""),
        *(("", equals, number, "refuse", "") for number in calls.keyrings),
        *(("", equals, number, "priority", "") for number in calls.priorities),
        ("", equals, calls.prlimit64, "limit", "attributes" if everywhere else "allow"),
        ("priority", load, first, "", ""),
        ("", at_least, _SEVERAL, "pretend", ""),
        ("", load, second, "", ""),
        ("", equals, 0, "allow", "pretend"),
        ("limit", load, first, "", ""),
        ("", equals, 0, "allow", ""),
        ("", load, third, "", ""),  # address of a new limit: zero if limits are only read
        ("", equals, 0, "", "pretend"),
        ("", load, third + 4, "", ""),
        ("", equals, 0, "allow", "pretend"),
        ("attributes", load, 0, "", ""),
        *(("", equals, number, "refuse", "") for number in (_IO_URING_SETUP, *calls.queues)),
        *(("", equals, number, "pretend", "") for number in calls.attributes),
        ("", equals, calls.ioctl, "", "allow"),
        ("", load, second, "", ""),
        ("", mask, _WRITING_IOCTL, "", ""),
        *(("", equals, number, "pretend", "") for number in _FLAGS_IOCTLS),
        ("", equals, _BTRFS_IOCTLS, "lack", "allow"),
        ("allow", end, 0x7FFF0000, "", ""),  # SECCOMP_RET_*
        ("pretend", end, 0x00050000, "", ""),
        ("refuse", end, 0x00050000 | errno.ENOSYS, "", ""),
        ("lack", end, 0x00050000 | errno.EOPNOTSUPP, "", ""),
    ]
    places = {name: at for at, (name, *_) in enumerate(program) if name}
    steps = [
        (code, *(places.get(to, at + 1) - at - 1 for to in (yes, no)), value)
        for at, (_, code, value, yes, no) in enumerate(program)
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in steps))
    _call("prctl", _SECCOMP, 2, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0)


# -- descendant cleanup ------------------------------------------------------------------------------------------------

BUILD_GRACE_SECONDS = 0.2  # seconds between SIGTERM, at which a compiler removes its temporary files, and SIGKILL
_LOOK_SECONDS = 0.02


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill, and a closed terminal


@contextmanager
def handled_signals(
    handler: Callable[[int, Any], object] | signal.Handlers, numbers: Iterable[int] = ENDING_SIGNALS
) -> Iterator[None]:
    """Handle signals during the block, then as before it.

    An ignored SIGHUP stays ignored: under nohup, a command outlives its terminal. Python handles signals in the main thread
    alone, so this changes nothing in another one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {}
    try:
        for number in numbers if is_main else ():
            former = signal.getsignal(number)  # None: a handler of a C library, which Python could not restore
            if former is not None and not (number == signal.SIGHUP and former is signal.SIG_IGN):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def terminate_with_descendants() -> Iterator[None]:
    """Terminate this process with all its descendants at SIGTERM, or when the parent dies.

    The compilers of a build would otherwise run to their end.
    """
    adopt_orphans()  # descendants of a dead child are found too
    with handled_signals(_leave_with_all, (signal.SIGTERM,)):
        die_with_parent(os.getppid(), signal.SIGTERM)
        yield


def _leave_with_all(number: int, frame: object) -> None:
    started = descendants(os.getpid())
    _tell(started, signal.SIGTERM)
    until = time.monotonic() + BUILD_GRACE_SECONDS
    while any(pid_is_alive(pid) for pid in started) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    while left := descendants(os.getpid()):
        _tell(left, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    os._exit(128 + number)


def _tell(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
