"""The commands show, report, export and spaces."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import (
    Command,
    Group,
    Json,
    Storage,
    StudyArgument,
    emit,
    examples,
    load_numpy,
    option,
    show_lines,
)
from autotune.errors import readable

# -- commands for a study ----------------------------------------------------------------------------------------------


@readable("the study")
def show(
    study: StudyArgument,
    trial: Annotated[
        int | None, option("Show everything stored of this trial: outcome, evidence, logs.", metavar="NUMBER")
    ] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show the trials of a study with their outcomes, and the winner."""
    load_numpy()
    from autotune.results.console import record_json, show_study, study_json, trial_lines
    from autotune.results.tables import console
    from autotune.search.study import StudyStore

    store = StudyStore.load(study, storage)
    if trial is not None:
        record = store.record(trial)
        if as_json:
            emit(record_json(record))
        else:
            show_lines(trial_lines(store, record))
    elif as_json:
        emit(study_json(store))
    else:
        show_study(store, console())


@readable("the study")
def report(
    study: StudyArgument,
    out: Annotated[
        Path | None, option("File to write; default: NAME.html in the study's folder.", metavar="PATH")
    ] = None,
    show_it: Annotated[bool, option("Open the page in the browser.", "--open")] = False,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Write a study as one HTML page that works offline: winner, memory, trials and how to reproduce it."""
    load_numpy()
    from autotune.commands.study_output import report_study

    written = report_study(study, storage, out)
    if as_json:
        emit({"files": [str(written)]})
    else:
        print(f"wrote {written}")
    if show_it and not webbrowser.open(written.resolve().as_uri()):
        print(f"autotune: no browser was found: open {written.resolve()} in one", file=sys.stderr)


@readable("the study")
def export(
    study: StudyArgument,
    style: Annotated[
        str,
        option(
            "File to write: deepspeed (JSON), accelerate (YAML), hf (TrainingArguments), fsdp (FSDP2) or sbatch (Slurm).",
            "--format",
            metavar="deepspeed|accelerate|hf|fsdp|sbatch",
        ),
    ] = "deepspeed",
    out: Annotated[Path | None, option("File to write; default: in the study's folder.", metavar="PATH")] = None,
    trial: Annotated[int | None, option("Number of a trial to export instead of the winner.", metavar="NUMBER")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Write the winner as a DeepSpeed, accelerate or FSDP2 config, TrainingArguments or a Slurm batch script."""
    from autotune.results.console import exported_json
    from autotune.results.export import export_store
    from autotune.results.output_files import secrets_note
    from autotune.search.study import StudyStore

    store = StudyStore.load(study, storage)
    files = export_store(store, style, out, trial)
    told = exported_json(store, files, style, trial)
    if as_json:
        emit(told)
    else:
        print(*(f"wrote {path}" for path in files), *secrets_note(files), *told["lines"], sep="\n")


# -- commands for search spaces ----------------------------------------------------------------------------------------

spaces_app = typer.Typer(cls=Group, help="List, show and validate search spaces.")
SpaceArgument = Annotated[str, typer.Argument(metavar="SPACE", help="Name or file of the space.")]


@spaces_app.command(
    "list", cls=Command, epilog=examples("spaces list", "spaces list --json", "run --model gemma-2-2b --space zero3")
)
def spaces_list(as_json: Json = False) -> None:
    """List the shipped search spaces."""
    from autotune.problem.space import load_space, shipped_spaces

    found = {name: load_space(name).about for name in shipped_spaces()}
    if as_json:
        emit({"spaces": found})
        return
    show_lines(f"{name:12} {about}" for name, about in found.items())


@spaces_app.command(
    "show",
    cls=Command,
    epilog=examples("spaces show default", "spaces show zero3 > mine.yaml", "run --model gemma-2-2b --space mine.yaml"),
)
def spaces_show(space: SpaceArgument) -> None:
    """Print the file of a search space with its comments."""
    from autotune.problem.space import load_space

    print(load_space(space).text, end="")


@spaces_app.command("knobs", cls=Command, epilog=examples("spaces knobs", "spaces knobs --json", "spaces show default"))
def spaces_knobs(as_json: Json = False) -> None:
    """List the knobs of spaces: which stages read them, what they need, and which change the results."""
    from autotune.problem.knobs import KNOBS, facts

    found = {name: facts(knob) for name, knob in KNOBS.items()}
    if as_json:
        emit({"knobs": found})
        return
    for name, told in found.items():
        show_lines([name, *(f"    {what}: {said}" for what, said in told.items())])


@spaces_app.command(
    "validate",
    cls=Command,
    epilog=examples("spaces validate mine.yaml", "spaces validate default", "spaces validate default --json"),
)
def spaces_validate(space: SpaceArgument, as_json: Json = False) -> None:
    """Check a search space and count its engines."""
    from autotune.problem.space import load_space

    found = load_space(space)
    families = sum(1 for _ in found.families())
    if as_json:
        emit({"name": found.name, "families": families, "knobs": {n: list(d.values) for n, d in found.knobs.items()}})
        return
    for name, domain in found.knobs.items():
        when = "; ".join(f"{knob} in {list(values)}" for knob, values in domain.when)
        print(f"{name:32} {', '.join(map(str, domain.values))}{f'  (when {when})' if when else ''}")
    print(f"{found.name}: valid, {families} engines before batch shapes")
