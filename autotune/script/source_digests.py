"""User's own code and configs that define a training: the list of files, and a check for later edits."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from autotune.problem.job import Job
from autotune.script.environment import READ, changed_variables
from autotune.util.bounds import bounded_bytes

MEMORY = "probe.json"  # file in a study's folder: findings of its script's probe run
# key of a profile and of a fingerprint: digests by path; paths below the call's folder are relative to it
SOURCES = "sources"
# types of files that a script reads and that affect its training
CONFIGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".env", ".py")
MOST_BYTES = 1 << 20  # bytes of such a file; larger ones are data


def digests(paths: Iterable[str | Path], cwd: str | Path) -> dict[str, str]:
    """Return a digest of each existing file's text, by displayed path.

    Args:
        cwd: folder to which paths below it are made relative.
    """
    found = {}
    for path in paths:
        whole = os.path.join(cwd, path)
        with suppress(OSError):
            digest = hashlib.sha256(bounded_bytes(Path(whole), stored=True)).hexdigest()[:12]
            found[os.path.relpath(whole, cwd) if whole.startswith(f"{cwd}{os.sep}") else whole] = digest
    return dict(sorted(found.items()))


def edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files that both have and that differ."""
    return sorted(path for path in before.keys() & now.keys() if before[path] != now[path])


def edited_since(before: Mapping[str, str], cwd: str | Path) -> list[str]:
    """Return the files whose digests have changed. Missing files are ignored."""
    return edited(before, digests(before, cwd))


class Findings(NamedTuple):
    """Findings that a probe run stored in a file."""

    data: Mapping[str, Any] = MappingProxyType({})
    sources: Mapping[str, str] = MappingProxyType({})  # digests
    variables: Mapping[str, str | None] = MappingProxyType({})  # those that the script read

    def hold(self, key: str, cwd: str | Path) -> bool:
        """Return True if these are findings of this key, and files and variables of the script are as they were."""
        same = not edited_since(self.sources, cwd) and not changed_variables(self.variables)
        return self.data.get("key") == key and same


def stored_findings(path: Path) -> Findings:
    """Return the findings that a probe run stored in a file; empty if there is none, or it is damaged."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        text = bounded_bytes(path, stored=True).decode()
        known = json.loads(text)
        found = known.get("profile") or known
        sources = {str(name): str(digest) for name, digest in found.get(SOURCES, {}).items()}
        variables = {str(name): None if one is None else str(one) for name, one in found.get(READ, {}).items()}
        return Findings(known, sources, variables)
    return Findings()


def sources_of(job: Job) -> dict[str, str]:
    """Return the source files of a job with their digests; empty if they are unknown.

    A script has the files that its probe run used, or, if an earlier version did that run, the files that its text imports. A
    workload has its module and the module's imports. A model's own code has its files.
    """
    if (script := job.script) is not None:
        if script.profile.sources or script.path is None:
            return script.profile.sources
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
    """Return a module's file and the files below the roots that it imports, recursively, by their texts."""
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
