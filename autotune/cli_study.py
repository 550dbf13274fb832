"""`autotune show`, `report`, `export` and `record`: commands that read a study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from autotune.cli_options import Storage, StudyArgument
from autotune.cli_parts import Json, console, emit, load_numpy, option
from autotune.errors import readable


@readable("the study")
def show(study: StudyArgument, storage: Storage = None, as_json: Json = False) -> None:
    """A study's trials with their reasons, and its winner."""
    load_numpy()
    from autotune.results.console import show_study, study_json
    from autotune.search.study import StudyStore

    store = StudyStore.load(study, storage)
    if as_json:
        emit(study_json(store))
    else:
        show_study(store, console())


@readable("the study")
def report(
    study: StudyArgument,
    out: Annotated[Path | None, option("File to write; default: NAME.html in the study's folder.")] = None,
    show_it: Annotated[bool, option("Open it in the browser.", "--open")] = False,
    hide: Annotated[bool, option("Without paths, host names and the model's name.", "--confidential")] = False,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Write a study as one HTML page that works offline: verdict, memory, every trial, how to reproduce it."""
    load_numpy()
    from autotune.commands.report import open_in_browser, report_study

    written = report_study(study, storage, out, hide=hide)
    if as_json:
        emit({"files": [str(written)]})
    else:
        print(f"wrote {written}")
    if show_it and not open_in_browser(written):
        print(f"autotune: no browser was found: open {written.resolve()} in one", file=sys.stderr)


@readable("the study")
def export(
    study: StudyArgument,
    style: Annotated[str, option("deepspeed, accelerate, hf or sbatch.", "--format")] = "deepspeed",
    out: Annotated[Path | None, option("File to write; default: in the study's folder.")] = None,
    trial: Annotated[int | None, option("A trial's number instead of the winner.")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Write the winner as a DeepSpeed config, an accelerate config, TrainingArguments or a batch script for Slurm."""
    from autotune.results.export import export_study
    from autotune.results.targets import secrets_note

    files = export_study(study, storage, style, out, trial)
    if as_json:
        emit({"files": [str(path) for path in files]})
    else:
        print(*(f"wrote {path}" for path in files), *secrets_note(files), sep="\n")


@readable("the study")
def record(
    study: StudyArgument,
    out: Annotated[Path | None, option("Table to write; default: NAME.table.csv.gz in the study's folder.")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Write a study as a table that `run --executor replay:TABLE` and the search benchmark replay."""
    from autotune.commands.record import record_study

    table, about, count = record_study(study, storage, out)
    if as_json:
        emit({"table": str(table), "facts": str(about), "rows": count})
    else:
        print(f"wrote {table} ({count} candidates) and {about}")
