"""Where the gallery's entries lie, and all of them read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from autotune.errors import UserError, one_line
from autotune.gallery.entry import Entry, read_entry
from autotune.gallery.plausible import check


def entries_folder() -> Path:
    """Inside the package when installed, at the top of the repository otherwise."""
    package = Path(__file__).parents[1]
    inside = package / "gallery_entries"
    return inside if inside.is_dir() else package.parent / "gallery" / "entries"


@cache
def shipped_entries() -> dict[str, Entry]:
    """The entries that came with this version, by name; one that it cannot read is left out: it decides nothing."""
    found = {}
    for path in sorted(entries_folder().glob("*.json")):
        try:
            found[path.stem] = checked(path)
        except Exception:  # none of them is needed, and nobody's run ends by what lies there
            continue
    return found


def checked(path: Path) -> Entry:
    """The entry in a file.

    Raises:
        UserError: it breaks the schema, or a figure of it cannot be; the message names file and field.
    """
    entry = read_entry(path)
    try:
        check(entry)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ArithmeticError, ValueError) as error:
        raise UserError(f"{path}: its figures cannot be: {one_line(error)}") from None
    return entry
