"""docs/modules.md lists every module of the package under its folder; the documents of the design name no missing file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autotune"
TEXT = (ROOT / "docs" / "modules.md").read_text()
DESIGN = [ROOT / "docs" / name for name in ("architecture.md", "modules.md", "internals.md")]
_ROOM = re.compile(r"^### `autotune/`$|^### `(?P<folder>[\w/]+)/`$")
_NAME = re.compile(r"`((?:[\w-]+/)*\w+\.py)`")


def holds_code(path: Path) -> bool:
    """Not so an `__init__.py` that is empty or a docstring."""
    if path.name != "__init__.py":
        return True
    return any(not isinstance(line, ast.Expr) for line in ast.parse(path.read_text()).body)


def named_modules(text: str) -> list[str]:
    """Paths below autotune/ of what the first columns of the rooms' tables name."""
    found, folder = [], None
    for line in text.splitlines():
        if line.startswith("#"):
            room = _ROOM.match(line)
            folder = room and (room["folder"] or "")
        elif folder is not None and line.startswith("| `"):
            found += [f"{folder}/{name}".lstrip("/") for name in _NAME.findall(line.split("|")[1])]
    return found


MODULES = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if holds_code(path)}


def test_every_module_stands_in_its_room_once() -> None:
    named = named_modules(TEXT)
    assert {name for name in named if named.count(name) > 1} == set()
    assert MODULES - set(named) == set(), "not in docs/modules.md"
    assert set(named) - MODULES == set(), "in docs/modules.md, and not in autotune/"


@pytest.mark.parametrize("path", DESIGN, ids=lambda path: path.name)
def test_every_named_file_exists(path: Path) -> None:
    """A module may be named by the end of its path."""
    named = set(_NAME.findall(path.read_text()))
    ends = {name for name in named if any(f"/{module}".endswith(f"/{name}") for module in MODULES)}
    assert {name for name in named - ends if not (ROOT / name).exists()} == set()


def test_architecture_fits_on_two_screens() -> None:
    assert len(DESIGN[0].read_text().splitlines()) <= 125


def test_every_room_says_what_it_does_not_know() -> None:
    """Before its table: what may be touched there, and what may not be known."""
    rooms = re.split(r"^### ", TEXT.partition("## The rooms")[2].partition("\n## ")[0], flags=re.MULTILINE)[1:]
    folders = {path.parent.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py") if holds_code(path)}
    assert len(rooms) == len(folders)
    for room in rooms:
        said = room.partition("\n| module")[0]
        assert re.search(r"\b(no|not|nothing|never|none|neither)\b", said, re.IGNORECASE), room.splitlines()[0]


def test_a_missing_module_and_one_too_many_are_found() -> None:
    """That the reader above reads."""
    text = (
        "### `autotune/`\n| `cli.py` | x |\n### `group/`\n| `a.py`, `b.py` | beside `c.py` |\n## Else\n| `d.py` | y |\n"
    )
    assert named_modules(text) == ["cli.py", "group/a.py", "group/b.py"]
