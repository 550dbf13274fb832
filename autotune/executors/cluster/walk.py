"""`--sync`: list the files of a folder that are sent.

A link to a target inside the folder is sent as a link. For another link, the target's files are sent in its place if
they are small enough to be code. Otherwise the link is sent with its absolute target, because data is expected on
storage that all nodes see.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from autotune.errors import UserError

# Not needed by a training: histories, environments, caches, and output of studies and trackers.
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
# Login credentials.
_LOGINS = (
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".gcloud",
    ".kube",
    ".docker",
    ".netrc",
    ".pgpass",
    ".git-credentials",
    ".pypirc",
    ".my.cnf",
)
_ENVIRONMENT = "pyvenv.cfg"  # marks a virtual environment of any name
_MOST_LINKED_FILES = 5000  # files behind one link; more are not code


class _TooMuch(Exception):
    """The size limit is exceeded."""


class Walk:
    """Files of a folder that are sent, by relative name; `follow` resolves links.

    Args:
        folder: the folder.
        name: its name below the sent folder; empty for the sent folder itself.
        most_bytes: size limit.
        most_files: limit of the number of files.

    Raises:
        UserError: a file in it cannot be read.
    """

    def __init__(
        self, folder: Path, name: str = "", *, most_bytes: float = math.inf, most_files: float = math.inf
    ) -> None:
        self.files: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}
        self.size_bytes = 0
        self.links: dict[str, str] = {}  # name -> target
        self.kept_links: list[str] = []  # links to targets elsewhere that are too large to send
        self.left_out: list[str] = []
        self._pending: list[tuple[Path, str]] = []  # links that are not resolved yet
        self._most = (most_bytes, most_files)
        self._sent = [(Path(os.path.realpath(folder)), name)]  # folders and their names
        if folder.is_dir():
            self._take(folder, f"{name}/" if name else "")
        else:
            self._add(folder, name)

    def _take(self, folder: Path, prefix: str) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"--sync: {folder} cannot be read ({error.strerror})") from None
        for entry in entries:
            path, name = Path(entry.path), f"{prefix}{entry.name}"
            if _is_left_out(path):
                if entry.name != "__pycache__":
                    self.left_out.append(name)
            elif entry.is_symlink():
                self._pending.append((path, name))
            elif entry.is_dir():
                self._take(path, f"{name}/")
            elif entry.is_file():
                self._add(path, name)

    def _add(self, path: Path, name: str) -> None:
        try:
            self.files[name], self.sizes[name] = path, path.stat().st_size
        except OSError as error:  # deleted since it was listed
            raise UserError(f"--sync: {path} cannot be read ({error.strerror})") from None
        self.size_bytes += self.sizes[name]
        if self.size_bytes > self._most[0] or len(self.files) > self._most[1]:
            raise _TooMuch

    def follow(self, most_bytes: int) -> None:
        """Resolve links.

        Args:
            most_bytes: size limit of all sent files.
        """
        while self._pending:
            path, name = self._pending.pop(0)
            target = Path(os.path.realpath(path))
            place = next(((real, called) for real, called in self._sent if target.is_relative_to(real)), None)
            if place is not None:
                new = os.path.join(place[1], target.relative_to(place[0]))
                self.links[name] = os.path.relpath(new, os.path.dirname(name) or ".")
            elif any(_is_login(part) for part in target.parts):
                self.left_out.append(name)
            elif not self._send_instead(target, name, most_bytes):
                self.links[name] = os.path.normpath(path.parent / os.readlink(path))
                if target.exists():
                    self.kept_links.append(name)

    def _send_instead(self, target: Path, name: str, most_bytes: int) -> bool:
        """Send the target of a link in its place, and return whether this was possible."""
        around = [real for real, _ in self._sent] + [Path(os.path.realpath(Path.home()))]
        if any(place.is_relative_to(target) for place in around) or _is_left_out(target):
            return False
        if not (target.is_dir() or target.is_file()):
            return False
        try:
            more = Walk(target, name, most_bytes=most_bytes - self.size_bytes, most_files=_MOST_LINKED_FILES)
        except (_TooMuch, UserError, OSError):
            return False
        self.files |= more.files
        self.sizes |= more.sizes
        self.size_bytes += more.size_bytes
        self.left_out += more.left_out
        self._pending += more._pending
        self._sent += more._sent
        return True


def _is_login(name: str) -> bool:
    return name in _LOGINS


def _is_left_out(path: Path) -> bool:
    is_folder = path.is_dir() and (path.name in LEFT_OUT or (path / _ENVIRONMENT).exists())
    return is_folder or _is_login(path.name)
