"""Sizes that a reader of this package and its benchmarks may count on. What an exception is worth is said beside it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("autotune", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
MODULE_LINES, FUNCTION_LINES, SKIPS = 400, 60, 10
LONGER_MODULES: dict[str, int] = {}  # path: lines, where a table of facts needs them
LONGER_FUNCTIONS: dict[str, int] = {}  # path::name: lines


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(path::name, lines with the body and without decorators) of every function and method."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{name(path)}::{node.name}", node.end_lineno - node.lineno + 1


def test_a_module_is_read_in_one_sitting() -> None:
    lines = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {which: many for which, many in lines.items() if many > LONGER_MODULES.get(which, MODULE_LINES)} == {}


def test_a_function_is_seen_at_one_glance() -> None:
    lines = dict(entry for path in MODULES for entry in functions(path))
    assert {which: many for which, many in lines.items() if many > LONGER_FUNCTIONS.get(which, FUNCTION_LINES)} == {}


def test_exceptions_are_needed() -> None:
    for path, lines in LONGER_MODULES.items():
        assert MODULE_LINES < len((ROOT / path).read_text().splitlines()) <= lines
    found = dict(entry for path in MODULES for entry in functions(path))
    for which, lines in LONGER_FUNCTIONS.items():
        assert FUNCTION_LINES < found[which] <= lines


def test_the_formatter_decides() -> None:
    sources = [path for folder in ("autotune", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    mark = "# fmt: " + "skip"  # in two parts, so that this line is none
    assert sum(path.read_text().count(mark) for path in sources) <= SKIPS
