"""`autotune spaces`: listing, showing and validating search spaces."""

from __future__ import annotations

from typing import Annotated

import typer

from autotune.cli_parts import Json, emit

spaces_app = typer.Typer(no_args_is_help=True, help="List, show and validate search spaces.")
SpaceArgument = Annotated[str, typer.Argument(help="Name or file.")]


@spaces_app.command("list")
def spaces_list(as_json: Json = False) -> None:
    """The shipped search spaces."""
    from autotune.problem.space_file import load_space, shipped_spaces

    found = {name: load_space(name).about for name in shipped_spaces()}
    if as_json:
        emit(found)
        return
    for name, about in found.items():
        print(f"{name:12} {about}")


@spaces_app.command("show")
def spaces_show(space: SpaceArgument) -> None:
    """A search space's file, comments included."""
    from autotune.problem.space_file import load_space

    print(load_space(space).text, end="")


@spaces_app.command("knobs")
def spaces_knobs(as_json: Json = False) -> None:
    """Every knob that a space may have: where it is read, what it needs, whether it changes what is computed."""
    from autotune.problem.knobs import KNOBS, facts

    found = {name: facts(knob) for name, knob in KNOBS.items()}
    if as_json:
        emit(found)
        return
    for name, told in found.items():
        print(f"{name}\n    {'; '.join(f'{what}: {said}' for what, said in told.items())}")


@spaces_app.command("validate")
def spaces_validate(space: SpaceArgument, as_json: Json = False) -> None:
    """Check a search space, and count what it holds."""
    from autotune.problem.space_file import load_space

    found = load_space(space)
    families = sum(1 for _ in found.families())
    if as_json:
        emit({"name": found.name, "families": families, "knobs": {n: list(d.values) for n, d in found.knobs.items()}})
        return
    for name, domain in found.knobs.items():
        when = "; ".join(f"{knob} in {list(values)}" for knob, values in domain.when)
        print(f"{name:32} {', '.join(map(str, domain.values))}{f'  (when {when})' if when else ''}")
    print(f"{found.name}: valid, {families} engines before batch shapes")
