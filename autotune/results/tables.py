"""Consoles and tables of data: what rich takes for markup or an emoji in a text that it is given is there what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from autotune.masking import masked
from autotune.util.streams import printable

_FEW_ROWS = 100  # rows that rich lays out in a few milliseconds

_Lines = list[list[Segment]]


class DataConsole(Console):
    """A Console that lets no control characters of a text reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable, with unprintable characters replaced."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class DataTable(Table):
    """Table that shows its cells unchanged.

    Errors contain `[enforce fail at alloc_cpu.cpp:117]` and `[/src/gloo]`, which look like markup.

    A long table without borders is laid out here with the same result. rich creates about ten objects per cell, which takes 4
    s for 5,000 rows.
    """

    def add_row(self, *cells: Any, **how: Any) -> None:
        """Add a row; texts are masked and not parsed as markup."""
        super().add_row(*(Text(masked(cell)) if isinstance(cell, str) else cell for cell in cells), **how)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.row_count <= _FEW_ROWS or self.box is not None or self.title or self.caption or self.show_footer:
            return super().__rich_console__(console, options)
        return self._lines(console, options)

    def _lines(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        widths = self._widths(console, options)
        columns = [
            _Column(self, column, width, console, options) for column, width in zip(self.columns, widths, strict=True)
        ]
        yield from _side_by_side([column.header() for column in columns], columns, top=False)
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield from _side_by_side([column.cell(cell) for column, cell in zip(columns, row, strict=True)], columns)

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return rich's column widths with padding. Only the cells with a column's longest line and longest word decide them."""
        deciding = DataTable(box=None, pad_edge=self.pad_edge, header_style=self.header_style, padding=self.padding)
        chosen = [_deciding(list(column.cells)) for column in self.columns]
        for column in self.columns:
            deciding.add_column(column.header, justify=column.justify, overflow=column.overflow, no_wrap=column.no_wrap)
        for row in zip(*chosen, strict=True):
            deciding.add_row(*row)
        return deciding._calculate_column_widths(console, options)


def _deciding(cells: list[Any]) -> list[Any]:
    longest = max(cells, key=lambda cell: max(map(cell_len, cell.plain.splitlines()), default=0))
    widest = max(cells, key=lambda cell: max(map(cell_len, cell.plain.split()), default=0))
    return [longest, widest]


class _Column:
    """One column of a table, of known width."""

    def __init__(self, table: Table, column: Column, width: int, console: Console, options: ConsoleOptions) -> None:
        at, last = column._index, len(table.columns) - 1
        _, right, _, left = table.padding
        self.left = left if at or table.pad_edge else 0
        self.right = right if at < last or table.pad_edge else 0
        self.column, self.width, self.console = column, width, console
        self._inner = width - self.left - self.right
        self._header_style = console.get_style(table.header_style) + console.get_style(column.header_style)
        self._options = options.update(
            width=width,
            justify=column.justify,
            no_wrap=column.no_wrap,
            overflow=column.overflow,
            height=None,
            highlight=False,
        )
        self._styled: dict[tuple[str, str], _Lines] = {}  # by text and style, as outcomes are few
        self.blank = [Segment(" " * width)]

    def header(self) -> _Lines:
        return self._by_rich(self.column.header, self._header_style)

    def cell(self, cell: Text) -> _Lines:
        """Return the cell's lines, each as wide as the column."""
        if cell.style or cell.spans:
            key = cell.plain, str(cell.style)
            if cell.spans or key not in self._styled:
                self._styled[key] = self._by_rich(cell, None)
            return self._styled[key]
        text, justify = cell.plain, self.column.justify
        if not (text.isascii() and text.isprintable()):  # its width may differ from its length
            return self._by_rich(cell, None)
        if len(text) > self._inner:
            folded = cell.wrap(
                self.console, self._inner, justify=justify, overflow=self.column.overflow, no_wrap=self.column.no_wrap
            )
            return [self._line(line.plain) for line in folded]
        return [self._line(text.rstrip().rjust(self._inner) if justify == "right" else text)]

    def _line(self, text: str) -> list[Segment]:
        return [Segment(f"{' ' * self.left}{text.ljust(self._inner)}{' ' * self.right}")]

    def _by_rich(self, cell: Any, style: Style | None) -> _Lines:
        padded = Padding(cell, (0, self.right, 0, self.left))
        return self.console.render_lines(padded, self._options, style=style)


def _side_by_side(cells: list[_Lines], columns: list[_Column], top: bool = True) -> Iterator[Segment]:
    """Yield the segments of a table row, line by line. Shorter cells get blank lines below, or above in a header."""
    height = max(map(len, cells))
    for at in range(height):
        for lines, column in zip(cells, columns, strict=True):
            line = at if top else at - height + len(lines)
            yield from lines[line] if 0 <= line < len(lines) else column.blank
        yield Segment.line()
