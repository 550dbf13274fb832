"""Helpers that the commands of the command line share."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.errors import MachineTrouble, UserError, one_line
from autotune.masking import masked_data, masked_words

if TYPE_CHECKING:
    from rich.console import Console

Text = str | None
STORAGE_VARIABLE = "AUTOTUNE_STORAGE"


_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Import numpy with one BLAS thread in this process, unless the user has chosen a number.

    The tuner's matrices are small, so that more threads only wait for cores that ranks and other programs use. With many threads,
    resuming a large study on a busy machine took four times as long. Ranks and other child processes do not inherit the setting.
    """
    if _BLAS_THREADS in os.environ or "numpy" in sys.modules:
        return
    os.environ[_BLAS_THREADS] = "1"  # OpenBLAS reads it when it is loaded
    try:
        importlib.import_module("numpy")
    finally:
        del os.environ[_BLAS_THREADS]


def option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


Json = Annotated[bool, option("One JSON object on stdout, nothing else.", "--json")]


def console(stderr: bool = False) -> Console:
    """Return a console that prints data unchanged: no markup, no emoji, and no control characters except rich's."""
    from autotune.results.tables import DataConsole

    stream = sys.stderr if stderr else sys.stdout
    make = partial(DataConsole, file=getattr(stream, "styled", stream), markup=False, emoji=False)
    found = make()
    return found if found.is_terminal else make(width=140)


def asking(as_json: bool = False) -> Callable[[str], bool] | None:
    """Return a function that asks the reader, with the default answer no; None without a terminal."""
    from autotune.streams import is_watched

    return None if as_json or not is_watched(sys.stdin) else lambda text: typer.confirm(text, err=True)


def emit(data: Any) -> None:
    text = json.dumps(masked_data(json.loads(json.dumps(data, default=str))), indent=2)
    print(text.replace("\x7f", "\\u007f"))


def typed_command() -> str:
    """Return the command line as a shell would take it again, without secrets."""
    return shlex.join(["autotune", *masked_words(sys.argv[1:])])


def say(text: str) -> None:
    with suppress(OSError):  # if nothing can be written, the exit code still reports the failure
        print(f"autotune: {text}", file=sys.stderr, flush=True)


def fail(text: str, code: int) -> None:
    say(" ".join(map(str.strip, text.splitlines())) if code == 2 else text)  # bad input is reported in one line
    sys.exit(code)


def of_a_database(error: Exception) -> tuple[str, int]:
    """Return the line and exit code of an error of a study's database, a disk or a file; raise any other error."""
    if "optuna" not in sys.modules and not isinstance(error, OSError):
        raise error
    from autotune.search.storage import failures_in_one_line

    try:
        with failures_in_one_line():
            raise error
    except (UserError, MachineTrouble) as told:
        return str(told), 2 if isinstance(told, UserError) else 4
    except OSError as of_a_file:
        if of_a_file.filename is None:
            return f"the machine refuses: {one_line(of_a_file)}", 4
        return f"{of_a_file.filename}: {of_a_file.strerror}", 2
