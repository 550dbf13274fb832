"""Consoles, lines and tables of data, in which rich takes no text for markup or an emoji."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotune.masking import masked
from autotune.util.streams import LOG, folded, printable


class DataConsole(Console):
    """A Console that lets no control characters of a text reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable, with unprintable characters replaced."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console(stderr: bool = False) -> Console:
    """Return a console that prints data unchanged: no markup, no emoji, and no control characters except rich's."""
    stream = sys.stderr if stderr else sys.stdout
    make = partial(DataConsole, file=getattr(stream, "styled", stream), markup=False, emoji=False)
    found = make()
    return found if found.is_terminal else make(width=140)


WINNER = "winner: "  # begins the line of a winner, which is green


def print_line(text: str, out: Console, style: str = "") -> None:
    """Print and log a message, folded at words on a terminal."""
    LOG.info(text)
    out.print(folded(text, out.file), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_lines(lines: Iterable[str], out: Console) -> None:
    """Print messages."""
    for line in lines:
        print_line(line, out, "bold green" * line.startswith(WINNER))


class DataTable(Table):
    """Table that shows its cells unchanged.

    Errors contain `[enforce fail at alloc_cpu.cpp:117]` and `[/src/gloo]`, which look like markup.
    """

    def add_row(self, *cells: Any, **how: Any) -> None:
        """Add a row; texts are masked and not parsed as markup."""
        super().add_row(*(Text(masked(cell)) if isinstance(cell, str) else cell for cell in cells), **how)
