"""Which file system a path lies on, and whether other machines may write there too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

# As /proc/self/mounts names them, without `fuse.` in front. SQLite's locks cannot be trusted on any of these
# (https://sqlite.org/faq.html#q5, https://sqlite.org/useovernet.html): they are missing, slow, or hold on one machine only.
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

    kind: str  # as the kernel names it, like ext4, nfs4, fuse.sshfs; "unknown" where it tells nothing
    mounted_at: Path

    @property
    def on_network(self) -> bool:
        """Whether it is one that several machines, or a host and its guests, write to."""
        return self.kind.removeprefix("fuse.") in _NETWORK_KINDS

    def __str__(self) -> str:
        return f"{self.kind}, mounted at {self.mounted_at}"


def file_system_of(path: Path) -> FileSystem:
    """The file system that a path lies on, or would lie on once it is made; symbolic links are followed."""
    real = path.resolve()
    try:
        mounted = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    except OSError:
        mounted = []
    # the innermost, and of several on one place (an automounter's and what it has mounted) the last
    deepest = max(enumerate(mounted), key=lambda at: (len(Path(at[1].mountpoint).parts), at[0]), default=None)
    return FileSystem(deepest[1].fstype, Path(deepest[1].mountpoint)) if deepest else FileSystem("unknown", Path("/"))
