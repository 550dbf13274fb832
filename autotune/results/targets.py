"""Whether a file that was named can be written, asked before hours are spent on what is to be in it; and what stands beside
it."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import UserError
from autotune.masking import MASK

# of files that are named; whatever else follows a dot belongs to the name
_SUFFIXES = (".json", ".yaml", ".yml", ".sbatch", ".sh")


def check_out(out: Path, *, makes_folders: bool = False) -> None:
    """Whether a file can be written there, before it is made.

    Args:
        makes_folders: folders that are missing are made by whoever writes.

    Raises:
        UserError: it cannot, or a study lies there.
    """
    from autotune.search.storage import DATABASES  # imports optuna, which a plan need not wait for

    if out.is_dir():
        raise UserError(f"{out} is a folder: give the name of a file in it")
    if out.name in DATABASES:
        raise UserError(f"{out} is where a study is kept: name another file")
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


def beside(out: Path, style: str, what: str) -> Path:
    """A file beside `out`, of a name that no file of another `out` or format has: the winner's own are NAME.json and
    NAME.meta.json, and stay what they are whatever is exported later."""
    name = next((out.name[: -len(end)] for end in _SUFFIXES if out.name.endswith(end) and out.name != end), out.name)
    if style in ("accelerate", "sbatch") and not name.endswith(f".{style}"):
        name = f"{name}.{style}"
    return out.with_name(f"{name}.{what}")


def secrets_note(files: list[Path]) -> list[str]:
    """Return a line that names the files in which a secret is masked; nothing where there is none."""
    configs = [path for path in files if path.is_file() and not path.name.endswith((".meta.json", ".html"))]
    hidden = [str(path) for path in configs if MASK in path.read_text(encoding="utf-8", errors="replace")]
    return [f"put your own values in place of {MASK} in {', '.join(hidden)}: secrets are not written"] if hidden else []
