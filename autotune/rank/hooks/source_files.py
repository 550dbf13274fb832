"""Files of a script's own code and configs. A study depends on their contents, so an edit starts another study."""

from __future__ import annotations

import builtins
import io
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.rank.hooks.base import Context
from autotune.rank.patches import Call
from autotune.script.source_digests import CONFIGS, MOST_BYTES

_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE = str(Path(__file__).resolve().parents[2])


def install(context: Context) -> None:
    """Record the configs that a script opens in its probe run."""
    if context.script.profile.is_known or not context.quiet:
        return

    def opening(call: Call) -> Any:
        file, mode = (call.given[name] for name in ("file", "mode"))
        if isinstance(file, str | os.PathLike) and str(file).endswith(CONFIGS):
            written = isinstance(mode, str) and not mode.startswith("r")
            (context.written if written else context.read).add(os.path.abspath(file))
        return call()

    context.patches.wrap(builtins, "open", opening)
    context.patches.wrap(io, "open", opening)  # used by pathlib


def found(context: Context) -> list[str]:
    """Return the paths of the user's own modules and configs that the script used.

    Modules were imported from the user's folders. Configs were read there, or below paths in the command. Relative
    paths refer to the folder of the call, which may differ on other machines. Files that the script wrote are excluded.
    """
    script = context.script
    own = [script.cwd, str(Path(script.cwd, script.path or ".").parent)]
    words = [word.partition("=")[2] or word for word in script.arguments]
    paths = [os.path.normpath(os.path.join(script.cwd, word)) for word in words]
    named = [path for path in paths if os.path.exists(path)]
    code = [*own, *(users_path(context, path) for path in sys.path if path and not _installed(path))]
    loaded = (str(getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    roots = {path: code for path in loaded if path.endswith(".py")}
    roots |= {path: [*own, *named] for path in context.read - context.written if _is_small(path)}
    theirs = {path: users_path(context, path) for path in roots}
    kept = {theirs[path] for path, folders in roots.items() if _below(theirs[path], folders)}
    if script.path is not None:
        kept.add(str(script.path))
    there = (path for path in kept if os.path.isfile(path))
    return sorted(os.path.relpath(path, script.cwd) if _below(path, [script.cwd]) else path for path in there)


def users_path(context: Context, path: str) -> str:
    """Return the user's own path of a file in a trial's view."""
    return context.sandbox.users_path(path) if context.sandbox is not None else os.path.abspath(path)


def _below(path: str, roots: list[str]) -> bool:
    """Return True if a path lies below one of the folders, outside hidden folders, installed packages and autotune."""
    inside = [os.path.relpath(path, root) for root in roots if path == root or path.startswith(f"{root.rstrip('/')}/")]
    folders = [Path(one).parent.parts for one in inside]
    hidden = all(any(part.startswith(".") for part in parts) for parts in folders)
    return bool(inside) and not hidden and not _installed(path)


def _installed(path: str) -> bool:
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (
        any(part in _INSTALLED for part in Path(path).parts)
        or any(path.startswith(f"{folder}{os.sep}") or path == folder for folder in libraries)
        or os.path.realpath(path).startswith(f"{_PACKAGE}{os.sep}")
    )


def _is_small(path: str) -> bool:
    with suppress(OSError):
        return os.path.getsize(path) <= MOST_BYTES
    return False
