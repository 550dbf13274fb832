"""/proc, prctl, mounts, namespaces, Landlock, and cleanup of descendant processes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

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
_PAGE_BYTES, _ENTRY_BYTES = os.sysconf("SC_PAGE_SIZE"), 8  # of memory, and of its entry in pagemap
# highest byte of entries of pages that are present (bit 63), of no file (61) and mapped by several processes (56)
_SHARED_PAGES = re.compile(b"[%s]+" % re.escape(bytes(one for one in range(256) if one & 0xA1 == 0x80)))


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
    if growth <= _LEAST_GROWTH * plugged:
        return 0
    return growth


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
    """Check that a visible process of this machine has the file open or mapped."""
    path = os.path.realpath(file)
    for pid in _pids():
        with suppress(OSError):  # gone, or another user's
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) == path:
                        return True
            if path in _text(f"/proc/{pid}/maps"):
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
    """Return address ranges of private pages that are still shared: proc_pid_smaps(5), proc_pid_pagemap(5).

    Untouched pages are left out, since copying them would count as used memory.
    """
    found, low, high = [], 0, 0
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for line in _text("/proc/self/smaps").splitlines():
            first, second, *_ = line.split()
            if not first.endswith(":"):
                low, high = (int(address, 16) for address in first.split("-")) if second == "rw-p" else (0, 0)
            elif first == "Shared_Dirty:" and low < high and int(second):
                pagemap.seek(low // _PAGE_BYTES * _ENTRY_BYTES)
                flags = pagemap.read((high - low) // _PAGE_BYTES * _ENTRY_BYTES)[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
                for run in _SHARED_PAGES.finditer(flags):
                    found.append((low + run.start() * _PAGE_BYTES, low + run.end() * _PAGE_BYTES))
    return found


# -- mounts and namespaces ---------------------------------------------------------------------------------------------
#
# System calls that the standard library lacks. Each raises OSError with the kernel's reason.

BIND, RECURSIVE = 0x1000, 0x4000  # mount(2)
_READ_ONLY, _REMOUNT, _PRIVATE, _DETACH = 1, 32, 0x40000, 2  # mount(2), umount2(2)
_NEW_MOUNTS, _NEW_USER, _NEW_PIDS = 0x00020000, 0x10000000, 0x20000000  # clone(2)
_CLONE3 = 435  # the same on all architectures
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000  # mount_setattr(2), which has mount's flags
_NO_NEW_PRIVILEGES, _AMBIENT, _RAISE = 38, 47, 2  # prctl(2)
_CAPABILITIES_HEADER = struct.pack("=Ii", 0x20080522, 0)  # version 3, this process: capget(2)
_NOT_CONTAINED = 97  # exit status of a process that the kernel refuses a namespace
_BINARY_FORMATS = "/proc/sys/fs/binfmt_misc"  # mounted below /proc on most machines
_ANSWER_SECONDS = 2.0  # a file system answers within milliseconds
_libc = ctypes.CDLL(None, use_errno=True)
# variable of a process that `contain` has started: descriptor of the tuner's /proc
MACHINE_PROC: Final = "AUTOTUNE_MACHINE_PROC"


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


def make_read_only(at: str, *, recursive: bool = False) -> None:
    """Make the mount at a path read-only; its devices can be written to. mount_setattr(2), or mount(2) before Linux 5.12."""
    flags, attributes = _AT_RECURSIVE if recursive else 0, struct.pack("=4Q", _READ_ONLY, 0, 0, 0)
    try:
        _syscall(_MOUNT_SETATTR, -100, os.fsencode(at), flags, attributes, ctypes.c_size_t(len(attributes)))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        for path in [at, *(one for one in mount_points() if recursive and one.startswith(f"{at}/"))]:
            mount(None, path, _REMOUNT | BIND | _READ_ONLY)


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


def remove_tree(folder: Path) -> None:
    """Remove a folder with what this user may remove of it, whatever modes a script has left in it."""
    for place, folders, _ in os.walk(folder):
        for inner in (os.path.join(place, name) for name in folders):
            with suppress(OSError):  # another user's
                if not os.path.islink(inner):
                    os.chmod(inner, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def change_root(folder: str) -> None:
    """Make a mount point the root of this process's mount namespace, and detach the former root. pivot_root(2)."""
    os.chdir(folder)
    _call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")
    _reopen_folders()


def contain(parent: int) -> None:
    """Run this command again as the first process of a PID namespace, and exit as it does.

    With that process end all its descendants. Its executable lies on a read-only mount, so that `/proc/self/exe` leads no script
    to the user's file. An ordinary user's namespace gives it the capabilities to make mounts. Without namespaces this process
    goes on as it is. pid_namespaces(7), user_namespaces(7).

    Args:
        parent: the process id of this process's starter, with which all end. 0 in the process that this function has started.
    """
    if not parent:
        return
    die_with_parent(parent)
    make_cuda_device()
    machine = os.open("/proc", os.O_PATH)
    try:
        child = _clone(_NEW_PIDS | _NEW_MOUNTS)
    except OSError:
        os.close(machine)
        return
    if child:
        os.close(machine)
        with handled_signals(signal.SIG_IGN, (signal.SIGINT,)):  # Ctrl-C reaches the child too
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != _NOT_CONTAINED:
            os._exit(status if status >= 0 else 128 - status)  # like a shell's, of a signal
        return
    try:
        die_with_parent(0)
        _begin_namespace()
        os.set_inheritable(machine, True)
        words = sys.orig_argv
        at = words.index(str(parent))
        environment = {**os.environ, MACHINE_PROC: str(machine)}
        os.execve(sys.executable, [sys.executable, *words[1:at], "0", *words[at + 1 :]], environment)
    finally:
        os._exit(_NOT_CONTAINED)


def _clone(flags: int) -> int:
    """Fork a child in new namespaces, in a new user namespace too if this process may make no others. clone(2)."""
    user, group = os.getuid(), os.getgid()
    for more in (0, _NEW_USER):
        arguments = struct.pack("=8Q", flags | more, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
        try:
            child = _syscall(_CLONE3, arguments, ctypes.c_size_t(len(arguments)))
        except PermissionError:
            if more:
                raise
            continue
        if not child and more:
            _map_user(user, group)
        return child
    raise AssertionError


def _begin_namespace() -> None:
    """Mount /proc for a new PID namespace, and this process's executable read-only.

    Raises:
        OSError: a part of /proc is hidden, as in containers, or the kernel refuses.
    """
    if any(path.startswith("/proc/") and path != _BINARY_FORMATS for path in mount_points()):
        raise OSError(errno.EBUSY, "A part of /proc is hidden")
    executable = os.readlink("/proc/self/exe")
    mount(None, "/", RECURSIVE | _PRIVATE)
    mount("proc", "/proc", 0, "proc")
    mount(executable, executable, BIND)
    make_read_only(executable)
    held = ctypes.create_string_buffer(24)
    _call("capget", _CAPABILITIES_HEADER, held)
    effective, permitted, _, more_effective, more_permitted, _ = struct.unpack("=6I", held.raw)
    kept = (effective, permitted, permitted, more_effective, more_permitted, more_permitted)
    _call("capset", _CAPABILITIES_HEADER, struct.pack("=6I", *kept))
    for number in range(64):
        if (permitted | more_permitted << 32) >> number & 1:
            _call("prctl", _AMBIENT, _RAISE, number, 0, 0)


def drop_capabilities() -> None:
    """Take the capabilities of a user namespace from this process: an ordinary user has no others."""
    if os.getuid():
        _call("capset", _CAPABILITIES_HEADER, bytes(24))


def pid_outside(pid: int) -> int:
    """Return the id that a process of this PID namespace has for the tuner."""
    if MACHINE_PROC not in os.environ:
        return pid
    handle = os.pidfd_open(pid)
    try:
        shown = os.open(f"self/fdinfo/{handle}", os.O_RDONLY, dir_fd=int(os.environ[MACHINE_PROC]))
        with open(shown, "rb") as file:
            rows = dict(line.split(b":", 1) for line in file)
    finally:
        os.close(handle)
    return int(rows[b"Pid"])


def silent_mounts() -> list[str]:
    """Return the mount points whose file system does not answer: an unreachable server, a FUSE without its daemon."""
    waiting, silent = list(mount_points()), list[str]()
    while waiting:
        here, there = os.pipe()
        child = os.fork()
        if not child:
            _touch(waiting, there)
        os.close(there)
        answered = 0
        while select.select([here], [], [], _ANSWER_SECONDS)[0] and os.read(here, 1):
            answered += 1
        os.close(here)
        os.kill(child, signal.SIGKILL)
        until = time.monotonic() + _ANSWER_SECONDS  # a server may keep its client from ending
        while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        silent += waiting[answered : answered + 1]
        waiting = waiting[answered + 1 :]
    return silent


def _touch(points: list[str], there: int) -> NoReturn:
    """Ask each file system for its state and write a byte for each answer, then exit."""
    try:
        for path in points:
            with suppress(OSError):
                os.stat(path)
                os.statvfs(path)
            os.write(there, b".")
    finally:
        os._exit(0)


def enter_mount_namespace() -> None:
    """Give this process private mounts, in a new user namespace if it may not mount. user_namespaces(7)."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS)
    except PermissionError:
        _call("unshare", _NEW_MOUNTS | _NEW_USER)
        _map_user(user, group)
    mount(None, "/", RECURSIVE | _PRIVATE)
    with suppress(OSError):  # not mounted by `contain`
        unmount(os.readlink("/proc/self/exe"))


def _map_user(user: int, group: int) -> None:
    """Give this user the same ids in the user namespace that this process has made."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="utf-8")


def join_mount_namespace(pid: int) -> None:
    """Enter the namespaces that a process has made by `enter_mount_namespace`. setns(2)."""
    kinds = {"user": _NEW_USER, "mnt": _NEW_MOUNTS}
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


def in_user_namespace() -> bool:
    """Return whether this process lives in a user namespace that does not know every user."""
    return Path("/proc/self/uid_map").read_text(encoding="utf-8").split() != ["0", "0", str(2**32 - 1)]


def make_cuda_device(devices: str = "/dev") -> None:
    """Load the driver's module for CUDA if no process has used CUDA since the machine has started.

    CUDA itself starts this program at its first use, and no process may load a module or make a device file in a sandbox.
    """
    if os.path.exists(f"{devices}/nvidiactl") and not os.path.exists(f"{devices}/nvidia-uvm"):
        with suppress(OSError, subprocess.SubprocessError):
            words, null = ["nvidia-modprobe", "-u", "-c=0"], subprocess.DEVNULL
            subprocess.run(words, stdin=null, stdout=null, stderr=null, timeout=60, check=False)


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
_WRITES = sum(1 << bit for bit in (1, *range(4, 15)))  # LANDLOCK_ACCESS_FS_* that change something
_WRITES_OF_FILES = 1 << 1 | 1 << 14  # write, truncate
_TRUNCATE_ABI = 3  # covers truncation, and lets files be moved between folders: Linux 6.2


def check_landlock() -> None:
    """Check the version of the kernel's Landlock.

    Raises:
        OSError: the kernel has none that covers truncation.
    """
    if _syscall(_LANDLOCK_CREATE, None, 0, 1) < _TRUNCATE_ABI:
        raise OSError(errno.EOPNOTSUPP, "Landlock does not cover truncation")


def restrict_writes(paths: Iterable[str], files_in: Iterable[str] = ()) -> None:
    """Have Landlock refuse this process and its children every change outside of these paths.

    https://docs.kernel.org/userspace-api/landlock.html

    Args:
        paths: files, and folders with all that they hold.
        files_in: folders whose files can be written to, but neither made nor removed.

    Raises:
        OSError: see `check_landlock`.
    """
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    check_landlock()
    handled = struct.pack("=Q", _WRITES)
    rules = _syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    for path, allowed in [*((one, _WRITES) for one in paths), *((one, _WRITES_OF_FILES) for one in files_in)]:
        with suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH)
            allowed &= ~0 if stat.S_ISDIR(os.fstat(opened).st_mode) else _WRITES_OF_FILES
            _syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    _syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


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
