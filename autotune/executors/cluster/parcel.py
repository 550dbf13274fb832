"""`--sync`: send a folder to nodes that lack it.

Each node compares first. If all files are identical at the same path, nothing is sent. Otherwise the folder is unpacked
into the agent's own folder, and references to the original path are translated (`moved.py`). The user's files are never
overwritten.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.executors.cluster.walk import Walk
from autotune.util.units import MIB, format_bytes

MOST_BYTES = 256 * MIB  # limit for code and its configs; larger data belongs on storage that all nodes see
CHUNK_BYTES = 256 * 1024  # bytes of a message; a slow link must transfer one within SILENT_SECONDS
# Possible secrets. Scripts may need them, so they are sent and reported.
_SECRETS = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa",
    "id_ecdsa",
    "id_ed25519",
    "credentials.json",
)
_LARGEST_NAMED = 3

# Link target or hash of a file, by name.
Manifest = dict[str, str]


@dataclass
class Parcel:
    """Part of a folder that is sent: files and links by relative name, and names that are left out."""

    folder: Path
    files: Manifest = field(default_factory=dict)
    links: Manifest = field(default_factory=dict)
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    kept_links: list[str] = field(default_factory=list)  # links to targets elsewhere that are too large to send

    @property
    def secrets(self) -> list[str]:
        """Files whose names suggest a secret."""
        return [name for name in self.files if any(fnmatch(name.rpartition("/")[2], like) for like in _SECRETS)]

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the folder, its files and its links as JSON data."""
        return {"folder": str(self.folder), "files": self.files, "links": self.links}

    def __str__(self) -> str:
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        secrets = f"; with what may be secret: {', '.join(self.secrets)}" if self.secrets else ""
        where = ", ".join(f"{name} -> {self.links[name]}" for name in self.kept_links)
        links = f"; links to what is not sent: {where}" if where else ""
        return f"{len(self.files)} files of {self.folder} ({format_bytes(self.size_bytes)}){out}{secrets}{links}"

    @cached_property
    def archive(self) -> bytes:
        """All files, compressed."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3, dereference=True) as archive:
            for name in self.files:
                with suppress(FileNotFoundError):  # deleted since
                    archive.add(self.folder / name, arcname=name, recursive=False)
        return buffer.getvalue()


def parcel_of(folder: Path, most_bytes: int = MOST_BYTES) -> Parcel:
    """Return the parcel that `--sync` sends for a folder.

    Args:
        folder: the folder.
        most_bytes: size limit.

    Raises:
        UserError: the folder is too large, is or contains the home folder, or contains an unreadable file.
    """
    if Path(os.path.realpath(Path.home())).is_relative_to(os.path.realpath(folder)):
        what = "your home folder" if folder == Path.home() else "a folder that your home folder is in"
        raise UserError(
            f"--sync: {folder} is {what}, of which far more than code would be sent: call autotune from the folder of the code, "
            "and keep the script there"
        )
    made = Parcel(folder)
    walk = Walk(folder)
    if walk.size_bytes > most_bytes:
        raise UserError(
            f"--sync: {folder} has {format_bytes(walk.size_bytes)} ({_largest(walk.sizes)}), and at most "
            f"{format_bytes(most_bytes)} are sent: keep data where all nodes see it, or call autotune from a folder of code alone"
        )
    walk.follow(most_bytes)
    made.links, made.kept_links, made.left_out, made.size_bytes = (
        walk.links,
        walk.kept_links,
        walk.left_out,
        walk.size_bytes,
    )
    for name, path in walk.files.items():
        try:
            made.files[name] = hash_of(path)
        except OSError as error:
            raise UserError(f"--sync: {path} cannot be read ({error.strerror})") from None
    return made


def _largest(sizes: Mapping[str, int]) -> str:
    tops: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.split("/")[0] + ("/" if "/" in name else "")
        tops[top] = tops.get(top, 0) + size
    most = sorted(tops.items(), key=lambda known: -known[1])[:_LARGEST_NAMED]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in most)


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


# -- on the node -------------------------------------------------------------------------------------------------------------


def is_there(manifest: Mapping[str, Any]) -> bool:
    """Return True if this machine has identical files and links at the same path."""
    folder = Path(manifest["folder"])
    try:
        return all(_leads_to(folder / name, target) for name, target in manifest["links"].items()) and all(
            hash_of(folder / name) == known for name, known in manifest["files"].items()
        )
    except OSError:
        return False


def _leads_to(link: Path, target: str) -> bool:
    """Return True if a path is a link to the target, in any spelling."""
    return link.is_symlink() and os.path.realpath(link) == os.path.realpath(os.path.normpath(link.parent / target))
