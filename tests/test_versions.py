"""Versions: which are refused, which are only said to be new, and how they are compared."""

import re
from pathlib import Path

import pytest

from autotune import versions
from autotune.versions import RANGES, complaint, installed, newer, release

ROOT = Path(__file__).parent.parent
INSIDE = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "deepspeed": "0.18.4",
    "transformers": "4.57.6",
    "accelerate": None,
}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.18.2", (0, 18, 2)),
        ("2.6.0a0+git1234", (2, 6, 0)),
        ("5.0.0rc1", (5, 0, 0)),
        ("5.24.0.dev0", (5, 24, 0)),
        ("0.16", (0, 16)),
        ("unknown", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_numbers_of_a_version(text: str | None, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_a_range_are_inside(name: str) -> None:
    for end in RANGES[name]:
        found = {**INSIDE, name: ".".join(map(str, end)) + ".9"}
        assert complaint(found) == ""
        assert newer(found) == []


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("deepspeed", "0.15.4", "deepspeed 0.15.4 (expected 0.16 or newer)"),
        ("torch", "2.5.1+cu121", "torch 2.5.1+cu121 (expected 2.6 or newer)"),
        ("transformers", "4.50.3", "transformers 4.50.3 (expected 4.51 or newer)"),
        ("python", "3.10.18", "python 3.10.18 (expected 3.11 or newer)"),
        ("accelerate", "0.34.2", "accelerate 0.34.2 (expected 1.3 or newer)"),
    ],
)
def test_what_is_too_old_is_said_in_one_line(name: str, version: str, said: str) -> None:
    assert complaint({**INSIDE, name: version}) == f"too old: {said}"


def test_all_that_are_too_old_are_in_one_line() -> None:
    line = complaint({**INSIDE, "torch": "2.1", "deepspeed": "0.9"})
    assert line == "too old: torch 2.1 (expected 2.6 or newer), deepspeed 0.9 (expected 0.16 or newer)"


@pytest.mark.parametrize(("name", "version"), [("deepspeed", "0.20.0"), ("deepspeed", "1.0+git"), ("torch", "2.14.1")])
def test_what_is_newer_is_allowed_and_said(name: str, version: str) -> None:
    found = {**INSIDE, name: version}
    assert complaint(found) == ""
    (line,) = newer(found)
    assert line.startswith(f"{name} {version} is newer than ")


def test_the_tested_environment_is_inside() -> None:
    assert complaint(installed()) == ""
    assert installed()["deepspeed"]


def test_the_ranges_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, (oldest, _) in RANGES.items():
        wanted = "requires-python = " if name == "python" else f'"{name}'
        assert re.search(rf"{re.escape(wanted)}\"?>={re.escape('.'.join(map(str, oldest)))}\"", text), name


def test_nothing_is_imported_but_the_standard_library() -> None:
    """Other modules, and other interpreters, may import it before anything is known of them."""
    found = re.findall(r"^\s*(?:from|import) (\w+)", Path(versions.__file__).read_text(), re.MULTILINE)
    assert set(found) <= {"__future__", "collections", "enum", "importlib", "platform", "re", "sys"}
