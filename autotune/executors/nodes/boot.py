"""`--sync`: how an agent is started on a node that may not have this package: it is sent over the stream before the agent speaks.

All that the transport is told is one constant line of Python (`BOOT`), which runs what comes first over the stream: the code of
`_on_the_node`, then the package. Where the node has the same package in the same place it runs that one; else it unpacks what was
sent into a folder of the agent's own, which goes with it.
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

SENT_FOLDER = "AUTOTUNE_SENT_FOLDER"  # tells an agent which folder to remove at its end
# Apart from the folder that a login begins in, where a random.py may lie. A line of hexadecimal digits, read byte by byte, so
# that nothing that follows it is taken; no character that any shell minds.
BOOT = APART + "import os;exec(bytes.fromhex(b''.join(iter(lambda:os.read(0,1),b'\\n')).decode()))"


def _on_the_node() -> None:
    """Runs on the node, by the standard library alone: reads a header and an archive, and becomes the agent."""
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
        # as `files.SocketFolder` makes them: the folder of an agent that was killed goes when the next one starts
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
    """What is sent before anything else.

    Args:
        package: the folder of this package here.
        place: where a node would have it; None: at the same place.
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
