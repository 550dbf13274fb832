"""What the benchmarks share: their command line, tables of 100 columns, and JSON files."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WIDTH = 100  # columns of a printed table
CANNOT_RUN = (
    77  # exit status where the machine lacks what a benchmark needs, which its last line names; automake's, meson's
)


# -- the command line ------------------------------------------------------------------------------------------------


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: `--small` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="fewest steps, rows and seeds: shows that it runs, measures nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result is written")
    return parser


def parse(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """The parsed command line; under `--small` these are the defaults, and what is typed still counts."""
    if parser.parse_known_args()[0].small:
        parser.set_defaults(**small)
    arguments = parser.parse_args()
    if arguments.small and arguments.json is not None and arguments.json.resolve().parent == RESULTS.resolve():
        parser.error(f"--small measures nothing: its result does not belong in {RESULTS}")
    return arguments


# -- tables ----------------------------------------------------------------------------------------------------------


def print_table(title: str, rows: Sequence[dict[str, Any]], keys: int = 1, console: Console | None = None) -> None:
    """Prints rows within 100 columns and breaks lines at spaces only.

    What is too wide for one table becomes several below each other, each with the first `keys` columns, which say what a
    row is about. A column that does not fit even beside those is printed as lines of its own.
    """
    console = console or Console(width=WIDTH)
    columns = list(dict.fromkeys(name for row in rows for name in row))  # a row may lack some
    cells = {name: [as_text(row.get(name)) for row in rows] for name in columns}
    console.print(title, style="italic", highlight=False)
    for part in split_columns(cells, columns[:keys], columns[keys:], console.width):
        widths = fitting_widths({name: cells[name] for name in part}, console.width)
        if widths is None:
            _print_lines(cells, part, len(rows), console)
            continue
        table = Table(box=box.HEAVY_HEAD)
        for name in part:
            table.add_column(name, width=widths[name])
        for at in range(len(rows)):
            table.add_row(*(cells[name][at] for name in part))
        console.print(table)


def as_text(value: Any) -> str:
    if value is None:
        return "—"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def split_columns(cells: dict[str, list[str]], keys: list[str], others: list[str], width: int) -> list[list[str]]:
    """The columns of each table: as many as fit beside the keys, in their order."""
    parts: list[list[str]] = [list(keys)]
    for name in others:
        wider = [*parts[-1], name]
        if len(parts[-1]) > len(keys) and fitting_widths({n: cells[n] for n in wider}, width) is None:
            wider = [*keys, name]
            parts.append(wider)
        parts[-1] = wider
    return parts


def fitting_widths(cells: dict[str, list[str]], width: int) -> dict[str, int] | None:
    """A width for every column so that no word is broken; None where there is none.

    The widest columns give way first.
    """
    whole = {name: max(len(text) for text in (name, *texts)) for name, texts in cells.items()}
    least = {
        name: max(len(word) for text in (name, *texts) for word in text.split() or [""])
        for name, texts in cells.items()
    }
    left = width - 1 - 3 * len(cells)  # borders and padding
    if sum(least.values()) > left:
        return None
    while sum(whole.values()) > left:
        widest = max((name for name in whole if whole[name] > least[name]), key=whole.__getitem__)
        whole[widest] -= 1
    return whole


def _print_lines(cells: dict[str, list[str]], columns: list[str], rows: int, console: Console) -> None:
    for at in range(rows):
        for name in columns:
            console.print(f"{name}: {cells[name][at]}", highlight=False, markup=False)
        console.print()


# -- what was measured -----------------------------------------------------------------------------------------------


def tree(*folders: str) -> str:
    """A name for the committed contents of folders of the repository, and whether the working tree differs from them."""
    asked = ["git", "rev-parse", *(f"HEAD:{folder}" for folder in folders)]
    names = subprocess.run(asked, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout.split()
    changed = subprocess.run(
        ["git", "status", "--porcelain", *folders], cwd=HERE.parent, capture_output=True, text=True
    )
    return "+".join(name[:10] for name in names) + ("+changed" if changed.stdout.strip() else "")


# -- results ---------------------------------------------------------------------------------------------------------


def write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")


def kept_rows(path: Path | None, key: str, anew: Sequence[str] | range) -> list[dict[str, Any]]:
    """Rows of an earlier result whose `key` is not measured anew this time."""
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text()) if row[key] not in anew]
