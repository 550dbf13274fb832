"""Consoles and tables of data: what rich takes for markup or an emoji in a text that it is given is there what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotune.masking import masked
from autotune.util.streams import printable


class DataConsole(Console):
    """A Console that lets no control characters of a text reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable, with unprintable characters replaced."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class DataTable(Table):
    """Table that shows its cells unchanged.

    Errors contain `[enforce fail at alloc_cpu.cpp:117]` and `[/src/gloo]`, which look like markup.
    """

    def add_row(self, *cells: Any, **how: Any) -> None:
        """Add a row; texts are masked and not parsed as markup."""
        super().add_row(*(Text(masked(cell)) if isinstance(cell, str) else cell for cell in cells), **how)
