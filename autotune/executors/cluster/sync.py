"""`--sync`: send a folder to nodes that lack it, with rsync.

rsync lists the files and writes them into a batch file. The batch travels over the agent's stream, and rsync reads it on
the node, so that every transport can carry it. Each node compares first: if all files are identical at the same path,
nothing is sent. Otherwise the folder is unpacked into a folder of the agent, and references to the original path are
translated. The user's files are never overwritten.
"""

from __future__ import annotations

import filecmp
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.util.units import MIB, format_bytes

MOST_BYTES = 256 * MIB  # limit for code and its configs; larger data belongs on storage that all nodes see
CHUNK_BYTES = 256 * 1024  # bytes of a message; a slow link must transfer one within SILENT_SECONDS
_LIST_SECONDS = 120  # limit for listing a folder
_COPY_SECONDS = 600  # limit for writing or reading a batch of at most MOST_BYTES
_LARGEST_NAMED = 3
# Not needed by a training: histories, environments, caches, and output of studies and trackers.
_TOOLS = tuple(
    (
        ".git .hg .svn __pycache__ node_modules .mypy_cache .ruff_cache .pytest_cache .tox .nox .ipynb_checkpoints .venv "
        "venv runs wandb mlruns"
    ).split()
)
_LOGINS = tuple(".ssh .gnupg .aws .azure .gcloud .kube .docker .netrc .pgpass .git-credentials .pypirc .my.cnf".split())
# Possible secrets. Scripts may need them, so they are sent and reported.
_SECRETS = tuple(".env .env.* *.pem *.key *.p12 *.pfx id_rsa id_ecdsa id_ed25519 credentials.json".split())
_ENVIRONMENTS = ("*/pyvenv.cfg", "*/*/pyvenv.cfg")  # mark virtual environments of any name
# Links stay links. Owners, devices and sockets are not sent. Protocol 30 is that of rsync 3.0 (2008) and later.
_FLAGS = ("-rlpt", "--chmod=u+rw,go=", "--protocol=30", "--8-bit-output")
_VANISHED = 24  # exit status of rsync(1): a file was deleted after it was listed


def rsync(*words: str, seconds: float = _COPY_SECONDS) -> str:
    """Run rsync and return its output.

    Raises:
        UserError: rsync is not installed, fails or takes longer.
    """
    try:
        done = subprocess.run(
            ["rsync", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
        )
    except FileNotFoundError:
        raise UserError("--sync needs rsync, which is not installed. Install it: apt-get install rsync") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"--sync: rsync took longer than {seconds:g} s. Keep data outside of the folder") from None
    if done.returncode not in (0, _VANISHED):
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UserError(f"--sync: {said[0]}")
    return done.stdout


# -- on the tuner's machine ----------------------------------------------------------------------------------------------


@dataclass
class SyncManifest:
    """Files and links of a folder that are sent."""

    folder: Path
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by relative name
    links: dict[str, str] = field(default_factory=dict)  # target by relative name
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)

    @property
    def secrets(self) -> list[str]:
        """Files whose names suggest a secret."""
        return [name for name in self.files if any(fnmatch(name.rpartition("/")[2], like) for like in _SECRETS)]

    @property
    def outward_links(self) -> list[str]:
        """Links whose targets are not sent."""
        return [name for name, target in self.links.items() if _leads_out(name, target)]

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the folder, its files and its links as JSON data."""
        return {"folder": str(self.folder), "files": self.files, "links": self.links}

    def __str__(self) -> str:
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        secrets = f"; possible secrets: {', '.join(self.secrets)}" if self.secrets else ""
        where = ", ".join(f"{name} -> {self.links[name]}" for name in self.outward_links)
        links = f"; links whose targets are not sent: {where}" if where else ""
        return f"{len(self.files)} files of {self.folder} ({format_bytes(self.size_bytes)}){out}{secrets}{links}"

    @cached_property
    def archive(self) -> bytes:
        """Compressed batch file of rsync with all files and links."""
        with tempfile.TemporaryDirectory(prefix="autotune-sync-") as work:
            batch = Path(work, "batch")
            rsync(*_FLAGS, *_filters(self.folder), f"--only-write-batch={batch}", *_into(self.folder, work))
            return gzip.compress(batch.read_bytes(), compresslevel=3)


def sync_manifest(folder: Path, most_bytes: int = MOST_BYTES) -> SyncManifest:
    """Return the part that `--sync` sends for a folder.

    Raises:
        UserError: rsync is missing, or the folder is too large, contains the home folder or an unreadable file.
    """
    if Path(os.path.realpath(Path.home())).is_relative_to(os.path.realpath(folder)):
        raise UserError(
            f"--sync: {folder} is or contains your home folder, which has far more than code. Call autotune from the folder "
            "of the code, and keep the script there"
        )
    made, sizes = SyncManifest(folder), dict[str, int]()
    for kind, size_bytes, name in _listed(folder, made.left_out):
        if kind == "f":
            sizes[name] = size_bytes
        elif kind == "L":
            made.links[name] = os.readlink(folder / name)
    made.size_bytes = sum(sizes.values())
    if made.size_bytes > most_bytes:
        raise UserError(
            f"--sync: {folder} has {format_bytes(made.size_bytes)} ({_largest(sizes)}), and at most {format_bytes(most_bytes)} "
            "are sent. Keep data where all nodes see it, or call autotune from a folder of code alone"
        )
    for name in sizes:
        try:
            made.files[name] = _digest(folder / name)
        except OSError as error:
            raise UserError(f"--sync: {folder / name} cannot be read ({error.strerror})") from None
    return made


def _listed(folder: Path, left_out: list[str]) -> Iterator[tuple[str, int, str]]:
    """Yield kind (`f`, `L` or `d`), size in bytes and name of each entry that rsync would send.

    Args:
        left_out: receives the names that the filters exclude.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-sync-") as work:
        show = ("--dry-run", "--debug=FILTER1", "--out-format=%i %l %n")
        said = rsync(*_FLAGS, *_filters(folder), *show, *_into(folder, work), seconds=_LIST_SECONDS)
    for line in said.splitlines():
        # rsync writes control characters in octal
        line = re.sub(r"\\#(\d{3})", lambda found: chr(int(found[1], 8)), line)
        if hidden := re.match(r"\[sender\] hiding \w+ (.*) because of pattern ", line, re.DOTALL):
            if not hidden[1].endswith("__pycache__"):
                left_out.append(hidden[1])
        elif entry := re.match(r"[<>ch.*](\w)\S{9} (\d+) (.*)", line, re.DOTALL):
            yield entry[1], int(entry[2]), entry[3]
    left_out.sort()


def _filters(folder: Path) -> list[str]:
    marked = {path.parent.relative_to(folder) for pattern in _ENVIRONMENTS for path in folder.glob(pattern)}
    environments = [re.sub(r"([*?\[\\])", r"\\\1", f"/{path}/") for path in sorted(marked)]
    return [f"--exclude={one}" for one in (*(f"{name}/" for name in _TOOLS), *_LOGINS, *environments)]


def _into(folder: Path, work: str) -> tuple[str, str]:
    """Return source and target of rsync: the contents of the folder, and an empty folder."""
    empty = Path(work, "empty")
    empty.mkdir()
    return f"{folder}/", f"{empty}/"


def _leads_out(name: str, target: str) -> bool:
    return os.path.isabs(target) or os.path.normpath(os.path.join(os.path.dirname(name), target)).split("/")[0] == ".."


def _largest(sizes: Mapping[str, int]) -> str:
    tops = Counter[str]()
    for name, size in sizes.items():
        tops[name.split("/")[0] + ("/" if "/" in name else "")] += size
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in tops.most_common(_LARGEST_NAMED))


# -- on the node -------------------------------------------------------------------------------------------------------------


def has_identical_files(manifest: Mapping[str, Any]) -> bool:
    """Return True if this machine has identical files and links at the same path."""
    folder = Path(manifest["folder"])
    try:
        return all(os.readlink(folder / name) == target for name, target in manifest["links"].items()) and all(
            _digest(folder / name) == known for name, known in manifest["files"].items()
        )
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


class ReceivedFolder:
    """Sent folder at a path of a node, in which a training may also write.

    Sent files are deleted with the agent. A training's files are kept and never overwritten. A second copy of the sent files
    next to the folder tells the two kinds apart, also for the successor of a killed agent.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._copy = place.with_name(f"{place.name}.sent")

    def unpack(self, data: bytes) -> list[str]:
        """Unpack sent files, and return the names that were kept instead because a training wrote them.

        Raises:
            UserError: rsync is missing or fails.
            OSError: the folder cannot be written.
        """
        self.clear()
        self._copy.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="autotune-sync-") as work:
            batch = Path(work, "batch")
            batch.write_bytes(gzip.decompress(data))
            rsync("-rlpt", f"--read-batch={batch}", f"{self._copy}/")
        kept = sorted(name for name in _files(self._copy) if self._is_taken(name))
        for name in kept:
            (self._copy / name).unlink()
        _prune(self._copy)
        if self._copy.exists():
            shutil.copytree(self._copy, self.place, symlinks=True, dirs_exist_ok=True)
        return kept

    def _is_taken(self, name: str) -> bool:
        """Return True if a file of a training has the name, or the name of a folder above it."""
        *above, _ = (self.place / part for part in _paths(name))
        return os.path.lexists(self.place / name) or any(
            path.is_symlink() or (path.exists() and not path.is_dir()) for path in above
        )

    def clear(self) -> int:
        """Remove sent files and empty folders, and return the number of remaining files, which a training wrote."""
        for name in _files(self._copy):
            if not any((self.place / part).is_symlink() for part in _paths(name)[:-1]) and self._is_unchanged(name):
                (self.place / name).unlink()
        for cache in self.place.rglob("__pycache__"):
            shutil.rmtree(cache, ignore_errors=True)
        _prune(self.place)
        shutil.rmtree(self._copy, ignore_errors=True)
        return len(_files(self.place))

    def _is_unchanged(self, name: str) -> bool:
        sent, here = self._copy / name, self.place / name
        with suppress(OSError):
            if sent.is_symlink() or here.is_symlink():
                return os.readlink(sent) == os.readlink(here)
            same = sent.stat().st_mtime_ns == here.stat().st_mtime_ns
            return same and filecmp.cmp(sent, here, shallow=False)
        return False


def _paths(name: str) -> Sequence[str]:
    """Return the name's folders from the outermost on, and the name itself."""
    parts = name.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _files(folder: Path) -> list[str]:
    """Return the relative names of all files and links in a folder."""
    found = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if Path(where, name).is_symlink()]
        found += [os.path.relpath(Path(where, name), folder) for name in (*files, *links)]
    return found


def _prune(folder: Path) -> None:
    """Remove empty folders, the folder itself included."""
    for where, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(where)


# -- paths on the node ---------------------------------------------------------------------------------------------------


@dataclass
class PathMap:
    """Original folders of the tuner's machine and their places on this node.

    The tuner uses only the original places, which are the same for the ranks of all machines.
    """

    places: dict[str, str] = field(default_factory=dict)  # original place -> place on this node

    @property
    def back(self) -> PathMap:
        """Reverse translation."""
        return PathMap({new: old for old, new in self.places.items()})

    def path(self, text: str) -> str:
        """Return a text with every original place replaced."""
        for old, new in self.places.items():
            if old in text:
                pattern = rf"(?<![^=:,;'\"\s\[]){re.escape(old)}(?=$|[/:,;'\"\s\]])"
                text = new.join(re.split(pattern, text))
        return text

    def all_of(self, value: Any) -> Any:
        """Translate all texts of a JSON value."""
        if not self.places:
            return value
        if isinstance(value, str):
            return self.path(value)
        if isinstance(value, Mapping):
            return {self.all_of(key): self.all_of(one) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self.all_of(one) for one in value]
        return value
