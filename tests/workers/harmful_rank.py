"""A rank that changes its executable, and starts a process that leaves its group, session and parent."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from autotune.util.linux import enter_mount_namespace

DAEMON = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep({seconds})"


def refusal(change) -> int | None:  # type: ignore[no-untyped-def]
    """Return the error number of a change."""
    try:
        change("/proc/self/exe")
    except OSError as error:
        return error.errno
    return None


def become(address: str, number: int) -> None:
    state = os.stat("/proc/self/exe")
    changes = (
        lambda path: os.chmod(path, state.st_mode & 0o7777),
        lambda path: os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns)),
    )
    refused = [refusal(change) for change in changes]
    enter_mount_namespace()  # as a trial's ranks do
    refused += [refusal(change) for change in changes]
    subprocess.run([sys.executable, "-Sc", DAEMON.format(seconds=number)], env={}, check=True)
    Path(f"{address}.new").write_text(json.dumps({"pid": os.getpid(), "refused": refused}))
    os.rename(f"{address}.new", address)
    time.sleep(3600)


if __name__ == "__main__":
    become(sys.argv[1], int(sys.argv[2]))
