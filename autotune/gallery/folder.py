"""Folder of the gallery's entries, and the function that reads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from autotune.errors import UserError, one_line
from autotune.gallery.entry import Entry, read_entry
from autotune.gallery.plausible import check


def entries_folder() -> Path:
    """Return the folder: inside the package if installed, otherwise at the top of the repository."""
    package = Path(__file__).parents[1]
    inside = package / "gallery_entries"
    return inside if inside.is_dir() else package.parent / "gallery" / "entries"


@cache
def shipped_entries() -> dict[str, Entry]:
    """Read the entries of this version, by name. An unreadable entry is left out, as no decision depends on it."""
    found = {}
    for path in sorted(entries_folder().glob("*.json")):
        try:
            found[path.stem] = checked(path)
        except Exception:  # entries are optional, so none of them may end a run
            continue
    return found


def checked(path: Path) -> Entry:
    """Read an entry and check its figures.

    Raises:
        UserError: the entry breaks the schema, or a figure is impossible; the message names file and field.
    """
    entry = read_entry(path)
    try:
        check(entry)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ArithmeticError, ValueError) as error:
        raise UserError(f"{path}: its figures cannot be: {one_line(error)}") from None
    return entry
