"""Consoles and tables of data: what rich takes for markup or an emoji in a text that it is given is there what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotune.streams import printable


class DataConsole(Console):
    """A Console that lets no control characters of a text reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class DataTable(Table):
    """A Table whose cells are shown as they are: errors speak of `[enforce fail at alloc_cpu.cpp:117]` and `[/src/gloo]`."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **how)
