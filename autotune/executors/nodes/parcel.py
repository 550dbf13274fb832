"""`--sync`: a folder on its way to nodes that have it not in the same place.

A node compares first: where all that would be sent lies in the same place, letter for letter, nothing is. Else it goes into a
folder of the agent's own, and whatever names the old place is told the new one (`moved.py`). Nothing of the user's is
written over.
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
from autotune.executors.nodes.walk import Walk
from autotune.units import MIB, format_bytes

MOST_BYTES = 256 * MIB  # code and its configs; what is larger is data, and belongs where all nodes see it
CHUNK_BYTES = 256 * 1024  # of a line: a slow link must carry one within the silence that both sides bear
# What scripts may need, so that it is sent, and said.
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

# A link's target, or the hash of a file's bytes.
Manifest = dict[str, str]


@dataclass
class Parcel:
    """What of a folder is sent: files by their names below it, what each is, and what is left out."""

    folder: Path
    files: Manifest = field(default_factory=dict)
    links: Manifest = field(default_factory=dict)
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    kept_links: list[str] = field(default_factory=list)  # of what lies elsewhere and is too much to send

    @property
    def secrets(self) -> list[str]:
        """Files whose names say that nobody else should read them."""
        return [name for name in self.files if any(fnmatch(name.rpartition("/")[2], like) for like in _SECRETS)]

    @property
    def manifest(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "files": self.files, "links": self.links}

    def __str__(self) -> str:
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        secrets = f"; with what may be secret: {', '.join(self.secrets)}" if self.secrets else ""
        where = ", ".join(f"{name} -> {self.links[name]}" for name in self.kept_links)
        links = f"; links to what is not sent: {where}" if where else ""
        return f"{len(self.files)} files of {self.folder} ({format_bytes(self.size_bytes)}){out}{secrets}{links}"

    @cached_property
    def archive(self) -> bytes:
        """All of it, compressed."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3, dereference=True) as archive:
            for name in self.files:
                with suppress(FileNotFoundError):  # gone since
                    archive.add(self.folder / name, arcname=name, recursive=False)
        return buffer.getvalue()


def parcel_of(folder: Path, most_bytes: int = MOST_BYTES) -> Parcel:
    """What `--sync` sends of a folder.

    Raises:
        UserError: it is too large, a home, or something in it cannot be read.
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
    """Of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


# -- on the node -------------------------------------------------------------------------------------------------------------


def is_there(manifest: Mapping[str, Any]) -> bool:
    """Whether this machine has all of it, at the same place and the same."""
    folder = Path(manifest["folder"])
    try:
        return all(_leads_to(folder / name, target) for name, target in manifest["links"].items()) and all(
            hash_of(folder / name) == known for name, known in manifest["files"].items()
        )
    except OSError:
        return False


def _leads_to(link: Path, target: str) -> bool:
    """Whether a link is one to a target, however it is written."""
    return link.is_symlink() and os.path.realpath(link) == os.path.realpath(os.path.normpath(link.parent / target))
