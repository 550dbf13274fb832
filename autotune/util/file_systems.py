"""File system of a path, and a check for network file systems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

# Kinds of this machine alone that have no block device, without the prefix `fuse.`.
_LOCAL = ("tmpfs", "ramfs", "overlay", "aufs", "zfs", "fuse-overlayfs", "mergerfs", "gocryptfs", "ecryptfs", "unknown")


@dataclass(frozen=True)
class FileSystem:
    """One mounted file system."""

    kind: str  # the kernel's name, like ext4, nfs4, fuse.sshfs; "unknown" if it gives none
    mounted_at: Path

    @property
    def on_network(self) -> bool:
        """True if several machines, or a host and its guests, may write to it: the kernel has no block device for it.

        SQLite's locks are not reliable there: missing, slow, or of one machine only (https://sqlite.org/faq.html#q5).
        """
        kinds = Path("/proc/filesystems").read_text(encoding="utf-8").splitlines()
        return f"\t{self.kind}" not in kinds and self.kind.removeprefix("fuse.") not in _LOCAL

    def __str__(self) -> str:
        return f"{self.kind}, mounted at {self.mounted_at}"


def file_system_of(path: Path) -> FileSystem:
    """Return the file system of a path, which need not exist; symbolic links are followed."""
    real = path.resolve()
    try:
        mounted = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    except OSError:
        mounted = []
    # The innermost mount counts, and of several at one place (an automounter's and the one that it mounted) the last.
    deepest = max(enumerate(mounted), key=lambda at: (len(Path(at[1].mountpoint).parts), at[0]), default=None)
    return FileSystem(deepest[1].fstype, Path(deepest[1].mountpoint)) if deepest else FileSystem("unknown", Path("/"))
