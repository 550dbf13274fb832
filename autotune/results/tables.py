"""Tables of data: what rich takes for markup or an emoji in a text that it is given is there what it is."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.masking import masked


class DataTable(Table):
    """A Table whose cells are shown as they are: errors speak of `[enforce fail at alloc_cpu.cpp:117]` and `[/src/gloo]`."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*(Text(masked(cell)) if isinstance(cell, str) else cell for cell in cells), **how)
