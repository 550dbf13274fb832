"""Command line: a thin layer that starts fast. Slow imports are inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Annotated, Any

import typer

from autotune._version import __version__
from autotune.cli.machine_commands import agent, doctor, explain, models
from autotune.cli.options import (
    Command,
    Group,
    begin,
    database_failure,
    emit,
    examples,
    fail,
    option,
    print_line,
    show_lines,
    takes_request,
    typed_command,
)
from autotune.cli.study_commands import export, report, show, spaces_app
from autotune.commands.removed import removed
from autotune.commands.request import Request
from autotune.errors import DisplayedError, ExitCode, NothingFits, ScriptFails
from autotune.masking import learn_environment
from autotune.util.streams import lasting_streams

app = typer.Typer(
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",  # panels; texts of users are not part of any help
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest DeepSpeed config that fits your GPUs, by measuring it.",
)
app.add_typer(spaces_app, name="spaces")


# -- commands ------------------------------------------------------------------------------------------------------------


@app.command(
    cls=Command,
    epilog=examples(
        "run --model gemma-2-2b --gpus 4 --budget 30m",
        "run --gpus 2 -- train.py --deepspeed ds.json",
        "run job.yaml --budget 1h",
    ),
)
@takes_request
def run(request: Request) -> None:
    """Tune, verify and export. The same study resumes."""
    shown = begin("reading the job, the machine and the search space", request.as_json)
    from autotune.commands.run import run_study

    request = request.model_copy(update={"command": typed_command()})
    as_json = request.as_json
    try:
        summary = run_study(request, shown, quiet=as_json)
    except NothingFits as error:
        if as_json and error.summary is not None:
            emit(error.summary)
        raise
    if as_json:
        emit(summary.to_json())
    else:
        show_lines([*summary.lines, *(f"wrote {path}" for path in summary.files)])
    if summary.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


@app.command(
    cls=Command,
    epilog=examples(
        "plan --model gemma-2-2b --gpu a100-80gb --gpus 8",
        "plan --model gemma-2-2b --gpus 8 --gpu rtx4090,a100-80gb,h100",
        "plan job.yaml --json --out ds.json",
    ),
)
@takes_request
def plan(request: Request) -> None:
    """Predict which configs fit, their speed and cost, and the GPUs needed. Nothing is run."""
    begin("reading the model and the cards", request.as_json)
    from autotune.commands.plan import plans
    from autotune.results.plan import fit_surely, plans_json, show_plans
    from autotune.results.tables import console

    names = [one.strip() for one in request.gpu.split(",")] if request.gpu else [None]
    found = plans(request, [*dict.fromkeys(names)], print_line)
    if request.as_json:
        emit(plans_json(found, request.whole))
    else:
        show_plans(found, console(), request.whole)
    if not fit_surely(found, request.sure):
        raise typer.Exit(ExitCode.NOTHING_FITS)


@app.command(
    cls=Command,
    epilog=examples(
        "launch mine -- train.py --deepspeed ds.json",
        "launch --model gemma-2-2b --global-batch-size 64 -- train.py",
        "launch job.yaml --max-restarts 3",
    ),
)
@takes_request
def launch(request: Request) -> None:
    """Train your script with the winner. After an OOM, restart it with a config that needs less memory.

    A study has its own model and machine. Options for them need --model.
    A study supplies no code: --python, --map and --ds-config of its run are typed
    again. Training with another batch needs --global-batch-size free.
    """
    from autotune.commands.launch import launch_training

    if not request.model and request.study is None and request.script:
        request = request.model_copy(update={"study": request.script[0], "script": request.script[1:]})
    summary = launch_training(request, print_line)
    if request.as_json:
        emit(summary.to_json())
    else:
        for line in summary.lines():
            print_line(line)
    raise typer.Exit(summary.code)


_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    show: ("show mine", "show mine --trial 3", "show mine --json"),
    report: ("report mine", "report mine --open", "report mine --out page.html"),
    export: ("export mine", "export mine --format accelerate", "export mine --trial 3 --out trial3.json"),
    explain: ("explain train.log", "explain train.log --model gemma-2-2b --gpus 4", "explain train.log --json"),
    models: ("models", "models --json", "plan --model gemma-2-2b --gpu h100"),
    doctor: ("doctor", "doctor --python ~/venv/bin/python", "doctor --nvme-path /scratch"),
}
for command, shown in _EXAMPLES.items():
    app.command(cls=Command, epilog=examples(*shown))(command)
app.command(cls=Command, hidden=True)(agent)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, option("Print the version.", "--version")] = False) -> None:
    """Print the version if `--version` is given."""
    if version:
        print(__version__)
        raise typer.Exit


@cache
def parser() -> Any:
    """Return click's group of all commands, which takes 20 ms to build."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and exit with an `ExitCode`, or with the code of a training."""
    learn_environment()
    with lasting_streams(), ExitStack() as logs:
        _call(logs)


_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "python", "python3", "-m")


def _script_before(unknown: str) -> str:
    """Return the word that starts a training's command before the unknown option of `run` or `launch`, or is it; else empty."""
    if not unknown or sys.argv[1] not in ("run", "launch"):
        return ""
    for word in sys.argv[2:]:
        if word in _LAUNCHERS or word.endswith(".py"):
            return word
        if word == "--" or word.partition("=")[0] == unknown:
            return ""
    return ""


def _call(logs: ExitStack) -> None:
    try:
        code = parser()(standalone_mode=False, prog_name="autotune", obj=logs)
        if sys.stdout is not None:
            sys.stdout.flush()  # a failed write is reported here, and not by the interpreter at its exit
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)
    except DisplayedError as error:
        fail(str(error), error.exit_code, keeps_lines=isinstance(error, ScriptFails))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors
            context = getattr(error, "ctx", None)
            helped = context.command_path if context is not None else " ".join(["autotune", *sys.argv[1:2]])
            unknown = getattr(error, "option_name", None) or ""
            script = _script_before(unknown)
            if script:
                fail(f"No such option: {unknown}. Put `--` before {script}.", ExitCode.BAD_INPUT)
            gone = removed(unknown)
            fail(f"{gone or error.format_message()} (`{helped} --help`)", ExitCode.BAD_INPUT)
        fail(*database_failure(error))


if __name__ == "__main__":
    main()
