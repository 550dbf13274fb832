"""File system of a path, and a check for network file systems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

# Names in /proc/self/mounts, without the prefix `fuse.`. SQLite's locks are not reliable on any of these: they are missing, slow,
# or hold on one machine only (https://sqlite.org/faq.html#q5, https://sqlite.org/useovernet.html).
_NETWORK_KINDS = frozenset(
    {
        *("nfs", "nfs4", "lustre", "beegfs", "gpfs", "panfs", "wekafs", "pvfs2", "orangefs", "afs", "coda", "quobyte"),
        *("ceph", "ceph-fuse", "glusterfs", "moosefs", "mfs", "lizardfs", "juicefs", "JuiceFS", "cvmfs"),
        *("cifs", "smb", "smb2", "smb3", "smbfs", "smbnetfs", "davfs", "9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs"),
        *("sshfs", "vmhgfs-fuse", "rclone", "s3fs", "goofys", "mountpoint-s3", "gcsfuse", "blobfuse", "blobfuse2"),
    }
)


@dataclass(frozen=True)
class FileSystem:
    """One mounted file system."""

    kind: str  # the kernel's name, like ext4, nfs4, fuse.sshfs; "unknown" if it gives none
    mounted_at: Path

    @property
    def on_network(self) -> bool:
        """True if several machines, or a host and its guests, may write to it."""
        return self.kind.removeprefix("fuse.") in _NETWORK_KINDS

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
