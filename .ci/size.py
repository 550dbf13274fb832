"""Fail if the code grows: `python .ci/size.py [--lower] [FOLDER]` compares sizes with the ceilings in pyproject.toml.

`[tool.autotune.size]` has one row for each package, and totals for `autotune`, `tests` and `benchmarks`. A row has the ceilings
of the four counts in `COUNTS`. Lines are not counted, since a limit on lines makes the lines denser. A ceiling only goes down:
`--lower` writes today's counts where they are smaller, and removes the rows of packages that are gone.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

TOTALS = ("autotune", "tests", "benchmarks")
COUNTS = ("tokens", "branches", "conditional expressions", "numeric constants")
SECTION = "[tool.autotune.size]"

_READ = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.comprehension, ast.Match)


def counts_of(text: str) -> Counter[str]:
    """Return the counts of one module's text. A numeric constant is a module-level assignment of a plain number."""
    tree = ast.parse(text)
    nodes = Counter(type(node) for node in ast.walk(tree))
    assigned = [node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    constants = [value for value in assigned if isinstance(value, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    values = (
        sum(token.type in _READ for token in tokens),
        sum(nodes[kind] for kind in _BRANCHES),
        nodes[ast.IfExp],
        sum(isinstance(one.value, (int, float)) for one in constants),
    )
    return Counter(dict(zip(COUNTS, values, strict=True)))


def sizes(root: Path) -> dict[str, Counter[str]]:
    """Return the counts of each package of `autotune` and of each total, by path."""
    found: dict[str, Counter[str]] = {}
    for total in TOTALS:
        for path in sorted((root / total).rglob("*.py")):
            counts = counts_of(path.read_text(encoding="utf-8"))
            parts = path.relative_to(root).parts
            rows = [total]
            if total == "autotune" and len(parts) > 2:
                rows.append("/".join(parts[:2]))
            for row in rows:
                found.setdefault(row, Counter()).update(counts)
    return found


def complaints(found: dict[str, Counter[str]], ceilings: dict[str, list[int]]) -> list[str]:
    """Return one line for each exceeded ceiling, and for each row that has no package or no ceiling."""
    lines = [f"{row} is gone: remove its row, or run --lower" for row in ceilings.keys() - found.keys()]
    for row, counts in found.items():
        if row not in ceilings:
            lines.append(f"{row} has no ceiling in {SECTION}")
            continue
        for name, ceiling in zip(COUNTS, ceilings[row], strict=True):
            if counts[name] > ceiling:
                lines.append(f"{row} has {counts[name]} {name}, {counts[name] - ceiling} more than its ceiling")
    return sorted(lines)


def lowered(found: dict[str, Counter[str]], ceilings: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the smaller of count and ceiling for each row. A new row has its counts."""
    rows = {}
    for row, counts in sorted(found.items()):
        today = [counts[name] for name in COUNTS]
        rows[row] = [min(pair) for pair in zip(today, ceilings.get(row, today), strict=True)]
    return rows


def with_ceilings(pyproject: str, ceilings: dict[str, list[int]]) -> str:
    """Return the text of pyproject.toml with these rows in the section."""
    rows = "".join(f'"{row}" = {values}\n' for row, values in ceilings.items())
    return re.sub(rf"({re.escape(SECTION)}[^\n]*\n)(?:\"[^\n]*\n)*", lambda head: head[1] + rows, pyproject)


def main() -> None:
    """Print the sizes, and compare them with the ceilings or lower the ceilings."""
    words = sys.argv[1:]
    root = Path(__file__).parents[1]
    if words and not words[-1].startswith("-"):
        root = Path(words.pop())
    path = root / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    ceilings = tomllib.loads(text)["tool"]["autotune"]["size"]
    found = sizes(root)
    for row, counts in found.items():
        print(f"{row:22s} " + ", ".join(f"{counts[name]:7d} {name}" for name in COUNTS))
    if words == ["--lower"]:
        path.write_text(with_ceilings(text, lowered(found, ceilings)), encoding="utf-8")
        return
    lines = complaints(found, ceilings)
    sys.exit("\n".join(lines) if lines else 0)


if __name__ == "__main__":
    main()
