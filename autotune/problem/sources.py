"""The user's own code and configs that decide what a training is: which files they are, and whether they were edited since."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from autotune.problem.job import Job

MEMORY = "probe.json"  # in a study's folder: what its script's first run showed
SOURCES = (
    "sources"  # of a profile and of a fingerprint: digests by path, below the folder of the call without that folder
)
CONFIGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".py")  # what a script reads that decides what it trains
MOST_BYTES = 1 << 20  # of such a file; larger ones are data


def digests(paths: Iterable[str | Path], cwd: str | Path) -> dict[str, str]:
    """A digest of the text of each file that is there, by its path as it is shown.

    Args:
        cwd: whose own path is left out of those.
    """
    found = {}
    for path in paths:
        whole = os.path.join(cwd, path)
        with suppress(OSError):
            digest = hashlib.sha256(Path(whole).read_bytes()).hexdigest()[:12]
            found[os.path.relpath(whole, cwd) if whole.startswith(f"{cwd}{os.sep}") else whole] = digest
    return dict(sorted(found.items()))


def edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files that both know and that differ."""
    return sorted(path for path in before.keys() & now.keys() if before[path] != now[path])


def edited_since(before: Mapping[str, str], cwd: str | Path) -> list[str]:
    """Of files with their digests, those that are others now; one that is gone tells nothing."""
    return edited(before, digests(before, cwd))


def sources_of(job: Job) -> dict[str, str]:
    """Of a script those that its first run used, or where an earlier version saw that run what its text imports; of a workload
    its module and what that imports; of a model's own code its files. Empty where that is not known."""
    if (script := job.script) is not None:
        if SOURCES in script.profile or script.path is None:
            return dict(script.profile.get(SOURCES, {}))
        return digests(imported(script.path, [script.path.parent, Path(script.cwd)]), script.cwd)
    cwd = Path.cwd()
    if job.workload is not None:
        file = Path(job.model.source.rpartition(" ")[0])
        module = job.workload.partition(":")[0]
        root = file.parents[module.count(".") + (file.name == "__init__.py")] if file.is_absolute() else cwd
        return digests(imported(file, [root, cwd]), cwd)
    if job.model.trust_remote_code and (folder := job.model.config.get("_name_or_path")) and os.path.isabs(folder):
        return digests(Path(folder).glob("*.py"), cwd)
    return {}


def imported(file: Path, roots: Sequence[Path]) -> set[Path]:
    """A module's file and those below the roots that it imports, and these, as far as their texts say."""
    found: set[Path] = set()
    left = [file]
    while left:
        if (file := left.pop()) not in found and file.is_file():
            found.add(file)
            with suppress(OSError, SyntaxError, ValueError):
                left += _imports(ast.parse(file.read_bytes()), file, roots)
    return found


def _imports(tree: ast.AST, file: Path, roots: Sequence[Path]) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, places = [alias.name for alias in node.names], roots
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
            places = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else roots
        else:
            continue
        for name in names:
            parts = name.split(".") if name else []
            for place in places:
                for many in range(len(parts) + 1):
                    at = place.joinpath(*parts[:many])
                    yield at / "__init__.py"
                    if many:
                        yield at.with_suffix(".py")
