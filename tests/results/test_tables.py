"""Long tables look as rich lays them out."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.results.tables import DataTable

WORDS = (
    "z3",
    "mb64",
    "no-overlap",
    "rbs=5e+08",
    "[/src/gloo]",
    "a" * 50,
    "…",
    "模型模型",
    "two  spaces ",
    "\n",
    "",
    "e\u0301",
)
STYLES = ("", "green", "bold red")


def printed(table: Table, width: int, colours: bool) -> str:
    out = io.StringIO()
    terminal: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor"} if colours else {}
    console = Console(file=out, width=width, markup=False, emoji=False, **terminal)
    console.print(table)
    return out.getvalue()


def filled(made: type[Table], rows: int, seed: int) -> Table:
    """A table like that of `show`, of the rows that the seed draws."""
    chosen = random.Random(seed)
    table = made(box=None, pad_edge=False, header_style="bold")
    for number in range(6):
        table.add_column(f"column {number}", overflow="fold", justify="right" if number % 3 == 0 else "left")
    for _ in range(rows):
        texts = [" ".join(chosen.choices(WORDS, k=chosen.randrange(5))) for _ in range(6)]
        styled = Text(texts[2], style=chosen.choice(STYLES))
        cells = [Text(text) for text in texts]
        table.add_row(*cells[:2], styled, *cells[3:])
    return table


@pytest.mark.few(3)
@pytest.mark.parametrize("width", [60, 100, 140, 1000])
@pytest.mark.parametrize("colours", [False, True])
def test_a_long_table_is_laid_out_as_rich_does(width: int, colours: bool) -> None:
    for seed in range(3):
        ours, theirs = filled(DataTable, 120, seed), filled(Table, 120, seed)
        assert printed(ours, width, colours) == printed(theirs, width, colours)


def test_a_long_table_does_not_go_through_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any) -> Any:
        raise AssertionError("laid out by rich")

    monkeypatch.setattr(Table, "_render", slow)
    assert printed(filled(DataTable, 120, 0), 140, False)
    with pytest.raises(AssertionError, match="by rich"):
        printed(filled(DataTable, 20, 0), 140, False)
