"""Sizes that a reader of this package and its benchmarks may count on, without an exception."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("autotune", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
MODULE_LINES, FUNCTION_LINES, SKIPS = 400, 60, 10


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
    assert {which: many for which, many in lines.items() if many > MODULE_LINES} == {}


def test_a_function_is_seen_at_one_glance() -> None:
    lines = dict(entry for path in MODULES for entry in functions(path))
    assert {which: many for which, many in lines.items() if many > FUNCTION_LINES} == {}


def test_the_formatter_decides() -> None:
    sources = [path for folder in ("autotune", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    mark = "# fmt: " + "skip"  # in two parts, so that this line is none
    assert sum(path.read_text().count(mark) for path in sources) <= SKIPS
