"""`--sync`: a folder on its way to nodes that have it not in the same place.

A node compares first: where all that would be sent lies in the same place, letter for letter, nothing is. Else it goes into a
folder of the agent's own, and whatever names the old place is told the new one (`Moved`). Nothing of the user's is written over.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.units import MIB, format_bytes

MOST_BYTES = 256 * MIB  # code and its configs; what is larger is data, and belongs where all nodes see it
CHUNK_BYTES = 256 * 1024  # of a line: a slow link must carry one within the silence that both sides bear
# What no training reads: histories, environments, caches, and what studies and trackers have written.
_TOOLS = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".tox",
    ".nox",
)
LEFT_OUT = (*_TOOLS, ".ipynb_checkpoints", ".venv", "venv", "runs", "wandb", "mlruns")
_ENVIRONMENT = "pyvenv.cfg"  # a folder that has one is a virtual environment, whatever its name
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

    @property
    def manifest(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "files": self.files, "links": self.links}

    def __str__(self) -> str:
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{len(self.files)} files of {self.folder} ({format_bytes(self.size_bytes)}){out}"

    @cached_property
    def archive(self) -> bytes:
        """All of it, compressed."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archive:
            for name in self.files:
                with suppress(FileNotFoundError):  # gone since
                    archive.add(self.folder / name, arcname=name, recursive=False)
        return buffer.getvalue()


def parcel_of(folder: Path, most_bytes: int = MOST_BYTES) -> Parcel:
    """What `--sync` sends of a folder.

    Raises:
        UserError: it is too large, or something in it cannot be read.
    """
    made, sizes, found = Parcel(folder), {}, []
    for path, name in _walk(folder, "", made.left_out):
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            made.links[name] = os.readlink(path)
        elif stat.S_ISREG(about.st_mode):
            found.append((path, name))
            sizes[name] = about.st_size
    made.size_bytes = sum(sizes.values())
    if made.size_bytes > most_bytes:
        raise UserError(
            f"--sync: {folder} has {format_bytes(made.size_bytes)} ({_largest(sizes)}), and at most "
            f"{format_bytes(most_bytes)} are sent: keep data where all nodes see it, or call autotune from a folder of code alone"
        )
    for path, name in found:
        try:
            made.files[name] = hash_of(path)
        except OSError as error:
            raise UserError(f"--sync: {path} cannot be read ({error.strerror})") from None
    return made


def _walk(folder: Path, prefix: str, left_out: list[str]) -> Iterator[tuple[Path, str]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"--sync: {folder} cannot be read ({error.strerror})") from None
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path), name
        elif entry.name in LEFT_OUT or (Path(entry.path) / _ENVIRONMENT).exists():
            if entry.name != "__pycache__":
                left_out.append(name)
        else:
            yield from _walk(Path(entry.path), f"{name}/", left_out)


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
        return all(os.readlink(folder / name) == target for name, target in manifest["links"].items()) and all(
            hash_of(folder / name) == known for name, known in manifest["files"].items()
        )
    except OSError:
        return False


@dataclass
class Moved:
    """Where folders of the tuner's machine lie on this one. The tuner itself hears of the old places only, which are the same
    for the ranks of all machines."""

    places: dict[str, str] = field(default_factory=dict)  # old place -> new one

    @property
    def back(self) -> Moved:
        """The same the other way round."""
        return Moved({new: old for old, new in self.places.items()})

    def path(self, text: str) -> str:
        """A text in which every mention of an old place is one of the new."""
        for old, new in self.places.items():
            if old in text:
                pattern = rf"(?<![^=:,;'\"\s\[]){re.escape(old)}(?=$|[/:,;'\"\s\]])"
                text = new.join(re.split(pattern, text))
        return text

    def all_of(self, value: Any) -> Any:
        """The same in all texts of what came as JSON."""
        if not self.places:
            return value
        if isinstance(value, str):
            return self.path(value)
        if isinstance(value, Mapping):
            return {self.all_of(key): self.all_of(one) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self.all_of(one) for one in value]
        return value
