"""`--sync` on the node: a folder with sent files, and with files that a training has written since.

Sent files are deleted with the agent. A training's files are kept and never overwritten. A file counts as sent if it
matches the record next to the folder, so that the successor of a killed agent can tell the two kinds apart.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.executors.cluster.parcel import hash_of
from autotune.util.files import write_atomically

_UNFINISHED = ".autotune-sent"  # name of a file that is being written
_LINK = "link to "  # prefix of a link's target, in place of a file's hash


class Deposit:
    """One sent folder.

    Args:
        place: its path on the node.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._record = place.with_name(f"{place.name}.json")
        self._sent: dict[str, list[str]] = {}  # by name: possible hashes or link targets of a sent file
        with suppress(OSError, ValueError):
            self._sent = json.loads(self._record.read_text(encoding="utf-8"))

    def unpack(self, data: bytes, manifest: Mapping[str, Any]) -> list[str]:
        """Unpack sent files, and return the names that were kept instead because a training wrote them.

        Raises:
            OSError: the folder cannot be written.
        """
        new = {**manifest["files"], **{name: _LINK + target for name, target in manifest["links"].items()}}
        self.place.mkdir(parents=True, exist_ok=True)
        for name in [name for name in self._sent if name not in new]:
            self._remove(name)
            del self._sent[name]
        kept = sorted(name for name in new if not self._may_write(name))
        for name in kept:
            self._sent.pop(name, None)
        writes = {name: known for name, known in new.items() if name not in kept}
        for name, known in writes.items():  # until the write is complete, either version may exist
            self._sent[name] = [*self._sent.get(name, []), known]
        self._save()
        self._sent = {name: [known] for name, known in self._write(data, manifest["links"], writes).items()}
        self._save()
        return kept

    def _write(self, data: bytes, links: Mapping[str, str], writes: Mapping[str, str]) -> dict[str, str]:
        written = {}
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                source = archive.extractfile(member) if member.isreg() and member.name in writes else None
                if source is None:
                    continue
                new = self._new(member.name)
                with new.open("wb") as file:
                    shutil.copyfileobj(source, file)
                    file.flush()
                    os.fsync(file.fileno())  # a file emptied by a power failure would count as a training's
                new.chmod(0o700 if member.mode & 0o100 else 0o600)
                written[member.name] = hash_of(new)  # the source may have changed since its hash was computed
                new.replace(self.place / member.name)
        for name in writes.keys() & links.keys():
            new = self._new(name)
            new.symlink_to(links[name])
            written[name] = writes[name]
            new.replace(self.place / name)
        return written

    def _new(self, name: str) -> Path:
        """Return the temporary path of a file, which is renamed after a complete write."""
        place = self.place / name
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(_UNFINISHED)
        new.unlink(missing_ok=True)
        return new

    def _may_write(self, name: str) -> bool:
        """Return True if the name holds no file of a training."""
        return self._is_within(name) and (not os.path.lexists(self.place / name) or self._is_sent(name))

    def _is_within(self, name: str) -> bool:
        """Return True if a name stays inside the folder, both by itself and through links on its path."""
        parts = name.split("/")
        on_the_way = [self.place.joinpath(*parts[:count]) for count in range(1, len(parts))]
        strays = (place.is_symlink() or (place.exists() and not place.is_dir()) for place in on_the_way)
        return not name.startswith("/") and ".." not in parts and not any(strays)

    def _is_sent(self, name: str) -> bool:
        place = self.place / name
        with suppress(OSError):
            found = _LINK + os.readlink(place) if place.is_symlink() else hash_of(place)
            return found in self._sent.get(name, []) and self._is_within(name)
        return False

    def _remove(self, name: str) -> None:
        """Remove a sent file and folders that become empty; a changed file stays."""
        if self._is_sent(name):
            with suppress(OSError):
                (self.place / name).unlink()
                for above in (self.place / name).relative_to(self.place).parents[:-1]:
                    (self.place / above).rmdir()

    def _save(self) -> None:
        write_atomically(self._record, json.dumps(self._sent))

    def clear(self) -> int:
        """Remove sent files and empty folders, and return the number of remaining files, which a training wrote."""
        for name in self._sent:
            self._remove(name)
        left = 0
        for where, folders, files in os.walk(self.place, topdown=False):
            if Path(where).name == "__pycache__":
                shutil.rmtree(where, ignore_errors=True)
                continue
            if _UNFINISHED in files:  # left by a killed agent
                files.remove(_UNFINISHED)
                Path(where, _UNFINISHED).unlink(missing_ok=True)
            left += len(files) + sum(Path(where, name).is_symlink() for name in folders)
            with suppress(OSError):
                os.rmdir(where)
        with suppress(OSError):  # only a training's files are left
            self._record.unlink()
        return left
