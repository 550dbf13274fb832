"""`--sync`: start an agent on a node that may lack this package, by sending the package first.

The transport passes only one constant line of Python (`BOOT`), which executes the first data of the stream: the code of
`_on_the_node`, then the package. A node that has an identical package at the same path runs that one. Otherwise it
unpacks the sent package into a temporary folder of the agent, which is deleted with it.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from autotune.interpreter import APART

SENT_FOLDER = "AUTOTUNE_SENT_FOLDER"  # environment variable with the folder that the agent deletes at its end
# Isolated from the login folder, which may contain a random.py. The line is hexadecimal, without characters that a
# shell treats specially. Reading it byte by byte consumes nothing after it.
BOOT = APART + "import os;exec(bytes.fromhex(b''.join(iter(lambda:os.read(0,1),b'\\n')).decode()))"


def _on_the_node() -> None:
    """Read a header and an archive on the node with the standard library only, then become the agent."""
    import fcntl
    import hashlib
    import io
    import json
    import os
    import sys
    import tarfile
    import tempfile

    def take(count: int) -> bytes:
        found = b""
        while len(found) < count:
            data = os.read(0, min(count - len(found), 1 << 16))
            if not data:
                os._exit(1)
            found += data
        return found

    line = b""
    while not line.endswith(b"\n"):
        line += take(1)
    header = json.loads(line)
    sent, place = take(header["bytes"]), header["place"]

    def there() -> bool:
        try:
            for name, known in header["files"].items():
                with open(os.path.join(place, name), "rb") as file:
                    if hashlib.sha256(file.read()).hexdigest() != known:
                        return False
            return True
        except OSError:
            return False

    if not there():
        # Compatible with `files.SocketFolder`: the next agent deletes the folder of a killed one.
        folder = tempfile.mkdtemp(prefix="autotune-agent-")
        held = os.open(os.path.join(folder, "new"), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            os.rename(os.path.join(folder, "new"), os.path.join(folder, "held"))
        except OSError:
            pass
        os.set_inheritable(held, True)
        place = os.path.join(folder, "autotune")
        with tarfile.open(fileobj=io.BytesIO(sent), mode="r:gz") as archive:
            for member in archive:
                source = archive.extractfile(member)
                if source is None or member.name.startswith("/") or ".." in member.name.split("/"):
                    continue
                target = os.path.join(place, *member.name.split("/"))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as file:
                    file.write(source.read())
        os.environ["AUTOTUNE_SENT_FOLDER"] = folder
    os.execv(sys.executable, [sys.executable, place, "agent"])


@cache
def preamble(package: Path, place: Path | None = None) -> bytes:
    """Return the bytes that are sent first.

    Args:
        package: this package's folder.
        place: its path on the node; None: the same path.
    """
    files, buffer = {}, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name, data = path.relative_to(package).as_posix(), path.read_bytes()
                files[name] = hashlib.sha256(data).hexdigest()
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
    archived = buffer.getvalue()
    header: dict[str, Any] = {"bytes": len(archived), "place": str(place or package), "files": files}
    code = f"{inspect.getsource(_on_the_node)}\n_on_the_node()\n"
    return code.encode().hex().encode() + b"\n" + json.dumps(header).encode() + b"\n" + archived
