"""What the commands of the command line share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Text = str | None


def option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


Json = Annotated[bool, option("One JSON object on stdout, nothing else.", "--json")]


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=140)


def emit(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))
