"""Check that a named file can be written, before hours are spent on its content; and name the files next to it."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import UserError
from autotune.masking import MASK

# suffixes of named files, with the usual one of their format; any other text after a dot belongs to the name
_SUFFIXES = {end: end for end in (".json", ".html", ".yaml", ".sbatch")} | {".yml": ".yaml", ".sh": ".sbatch"}


def check_out(out: Path, suffix: str, *, makes_folders: bool = False) -> None:
    """Check that a file can be written to this path.

    Args:
        suffix: of the written file. A path with the suffix of another format is refused.
        makes_folders: the writer creates missing folders.

    Raises:
        UserError: it cannot be written, or a study is stored there.
    """
    from autotune.search.storage import DATABASES  # imports optuna, which a plan does not need

    if out.is_dir():
        raise UserError(f"{out} is a folder: give the name of a file in it")
    if out.name in DATABASES:
        raise UserError(f"{out} is where a study is kept: name another file")
    if not suffix.endswith(_SUFFIXES.get(out.suffix, "")):
        raise UserError(f"{out}: the file would be no {out.suffix}: name one like NAME{suffix}")
    if out.exists() and not out.is_file():
        return  # a pipe
    out = Path(os.path.realpath(out)) if out.is_symlink() else out
    folder = out.parent
    while makes_folders and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{out}: there is no folder {folder}: make it first, or name another file")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{out}: the folder {folder} is read-only for you: name another file")


def sibling_path(out: Path, style: str, what: str) -> Path:
    """Return a path next to `out` that no file of another `out` or format has.

    The winner's own files are NAME.json and NAME.meta.json, and no later export overwrites them.
    """
    name = out.stem if out.suffix in _SUFFIXES else out.name
    if style in ("accelerate", "sbatch", "fsdp") and not name.endswith(f".{style}"):
        name = f"{name}.{style}"
    return out.with_name(f"{name}.{what}")


def secrets_note(files: list[Path]) -> list[str]:
    """Return a line that names the files with masked secrets; empty if there are none."""
    configs = [path for path in files if path.is_file() and not path.name.endswith((".meta.json", ".html"))]
    hidden = [str(path) for path in configs if MASK in path.read_text(encoding="utf-8", errors="replace")]
    return [f"put your own values in place of {MASK} in {', '.join(hidden)}: secrets are not written"] if hidden else []
