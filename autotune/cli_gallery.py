"""`autotune share` and `autotune gallery`: writing a study as a public entry, and reading entries of other users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli_options import Storage, StudyArgument
from autotune.cli_parts import Json, console, emit, option
from autotune.errors import readable

gallery_app = typer.Typer(no_args_is_help=True, help="What others have measured: listed and checked.")


@readable("the study")
def share(
    study: StudyArgument,
    out: Annotated[Path | None, option("File to write; default: share.json in the study's folder.")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Write a study as a small anonymous file for the gallery: machine, sizes of the model, candidates and how each ended."""
    from autotune.commands.gallery import share_study

    shared = share_study(study, storage, out)
    if as_json:
        emit(shared.to_json())
    else:
        for line in shared.lines():
            print(line)


@gallery_app.command("list")
def gallery_list(as_json: Json = False) -> None:
    """The best of each entry that came with this version."""
    from autotune.gallery.page import rows

    found = rows()
    if as_json:
        emit(found)
        return
    from autotune.results.tables import DataTable

    table = DataTable("model", "on", "tokens", "trains", "fastest config", box=None)
    table.add_column("tokens/s", justify="right")
    for row in found:
        table.add_row(
            *(str(row[key]) for key in ("model", "machine", "seq_len", "trained", "config", "tokens_per_second"))
        )
    console().print(table)


@gallery_app.command("check")
def gallery_check(
    files: Annotated[list[Path], typer.Argument(help="Entries, as `autotune share` writes them.")],
    as_json: Json = False,
) -> None:
    """Check entries as the gallery's tests do: their form, and whether their figures can be."""
    from autotune.commands.gallery import check_entries

    found = check_entries(files)
    if as_json:
        emit({str(path): count for path, count in found.items()})
        return
    for path, count in found.items():
        print(f"{path}: a valid entry with {count} candidates")
