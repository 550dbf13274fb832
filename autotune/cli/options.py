"""Typer options from the fields of Request, and helpers of all commands."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from autotune.commands.removed import removed
from autotune.commands.request import (
    STORAGE_VARIABLE,
    Parameter,
    Request,
    flag_of,
    parameters,
    placed_errors,
    request_from,
)
from autotune.errors import ExitCode, MachineError, UserError, one_line
from autotune.masking import masked_data, masked_words
from autotune.util.streams import LOG, folded, logging_to

if TYPE_CHECKING:
    from rich.console import Console

# -- helpers of all commands -------------------------------------------------------------------------------------------

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


def show_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output."""
    from autotune.results.tables import console, print_lines

    print_lines(lines, console())


def begin(text: str, as_json: bool) -> Console:
    """Return the console of a command that takes long, after a first line about what it does if a terminal shows it.

    The line is printed before the imports of the command, which take seconds on a loaded machine.
    """
    from autotune.results.tables import console

    shown = console(stderr=as_json)
    if shown.is_terminal and not as_json:
        shown.print(f"{text} …", style="dim")
    return shown


def emit(data: dict[str, Any]) -> None:
    """Print one JSON object, with the version of its schema, and with secrets masked."""
    plain = json.loads(json.dumps({"version": 1, **data}, default=str))
    text = json.dumps(masked_data(plain), indent=2)
    print(text.replace("\x7f", "\\u007f"))


def typed_command() -> str:
    """Return the command line as a shell would take it again, without secrets."""
    return shlex.join(["autotune", *masked_words(sys.argv[1:])])


def print_line(text: str) -> None:
    """Print a message to standard error, and log it."""
    LOG.info(text)
    _print(text)


def _print(text: str) -> None:
    with suppress(OSError):  # if nothing can be written, the exit code still reports the failure
        print(folded(f"autotune: {text}", sys.stderr), file=sys.stderr, flush=True)


def fail(text: str, code: ExitCode, *, keeps_lines: bool = False) -> None:
    """Print an error and exit with the code. Code 2 (bad input) is printed in one line, unless a script's log is part of it."""
    if code == ExitCode.BAD_INPUT and not keeps_lines:
        text = " ".join(map(str.strip, text.splitlines()))
    LOG.error(text)
    _print(text)
    sys.exit(code)


def database_failure(error: Exception) -> tuple[str, ExitCode]:
    """Return the line and exit code of an error of a study's database, a disk or a file; raise any other error."""
    if "optuna" not in sys.modules and not isinstance(error, OSError):
        raise error
    from autotune.search.storage import failures_in_one_line

    try:
        with failures_in_one_line():
            raise error
    except (UserError, MachineError) as told:
        return str(told), told.exit_code
    except OSError as of_a_file:
        if of_a_file.filename is None:
            return f"the machine refuses: {one_line(of_a_file)}", ExitCode.MACHINE
        return f"{of_a_file.filename}: {of_a_file.strerror}", ExitCode.BAD_INPUT


# -- help --------------------------------------------------------------------------------------------------------------


@cache
def _shown(param: Any) -> Any:
    """Return a copy of a parameter for the help: an argument's metavar is its name, and a switch has one flag and no value."""
    words: dict[str, Any] = {}
    if getattr(param, "is_flag", False):
        words = {"metavar": "", "secondary_opts": []}
    if isinstance(param, TyperArgument):
        words = {"display_type_rich": lambda ctx: None}
    found = copy.copy(param)
    vars(found).update(words)
    return found


class _WordedHelp:
    """Command or group whose help has words for values, and each argument as its metavar."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters for the help."""
        return [*map(_shown, super().get_params(ctx))]  # type: ignore[misc]  # of the class beside it


class Command(_WordedHelp, TyperCommand):
    """Command with each argument in its usage line."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        return ["[OPTIONS]", *(str(one.metavar) for one in self.params if isinstance(one, TyperArgument))]


class Group(_WordedHelp, TyperGroup):
    """Group of commands. Without arguments it prints its help, which is no error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; without any, those of `--help`."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, and its arguments. A removed command raises UserError."""
        gone = removed(args[0]) if self.get_command(ctx, args[0]) is None else None
        if gone is not None:
            raise UserError(f"{gone} (`{ctx.command_path} --help`)")
        return super().resolve_command(ctx, args)


def examples(*commands: str) -> str:
    """Return the end of a command's help with these examples, each as typed after `autotune`."""
    lines = (one.replace("[", "\\[") for one in commands)  # no markup
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  autotune {one}" for one in lines)


# -- options -----------------------------------------------------------------------------------------------------------


def option(help: str, *names: str, metavar: str = "") -> Any:
    """Declare an option of one command, with its help, its names, and a word for its value; a switch has none."""
    return typer.Option(*names, help=help, metavar=metavar)


def shared(name: str) -> Any:
    """Declare an option that is a field of Options, for a command without panels."""
    return _declared(next(one for one in parameters("run") if one.name == name), None)


def _declared(parameter: Parameter, panel: str | None) -> Any:
    option = parameter.option
    help = parameter.help
    if isinstance(parameter.default, str | int) and not isinstance(parameter.default, bool):
        help = f"{help.removesuffix('.')}; default: {parameter.default}."
    shown: dict[str, Any] = {"metavar": parameter.metavar, "help": help}
    if option.is_argument:
        return typer.Argument(**shown)
    flags = [flag_of(parameter.name)]
    if parameter.default is False and panel is not None:
        name = flags[0].removeprefix("--")
        off = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        flags = [f"--{name}/--{off}"]  # the second turns off a switch of a job file
    return typer.Option(*flags, rich_help_panel=panel, envvar=option.variable, show_envvar=False, **shown)


def takes_request(command: Callable[[Request], None]) -> Callable[..., None]:
    """Return a typer command for a function of a Request. Its options are the fields for the function's name.

    Options have no default here, so that every value was typed, or set by a variable. All are texts, lists of texts or switches,
    which the Request converts.
    """
    name = command.__name__

    def call(ctx: typer.Context, **values: Any) -> None:
        load_numpy()
        os.environ.pop(STORAGE_VARIABLE, None)  # already read, and ranks need no password
        typed = {one: value for one, value in values.items() if value is not None and value != []}
        values, places = _with_job_file(name, typed)
        request = request_from(values, flag_of)
        with placed_errors(places), ExitStack() as alone:
            logs = ctx.obj if isinstance(ctx.obj, ExitStack) else alone  # `main`'s, which logs its errors, too
            logs.enter_context(logging_to(request.log_file))
            command(request)

    found = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for one in parameters(name):
        kind = type(one.default) if isinstance(one.default, bool | list) else str
        annotation: Any = Annotated[(list[str] if kind is list else kind) | None, _declared(one, one.panel.value)]
        found.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    call.__name__, call.__doc__ = name, command.__doc__
    call.__annotations__ = {one.name: one.annotation for one in found}
    vars(call)["__signature__"] = inspect.Signature(found)
    return call


def _with_job_file(command: str, typed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a command's values: typed ones, and those of the job file that its first word names, with their places by flag.

    Raises:
        UserError: the file is wrong, or the command takes no words besides it.
    """
    words = typed.pop("script", [])
    found, places = dict[str, Any](), dict[str, str]()
    if words and words[0].lower().endswith((".yaml", ".yml", ".json")):
        from autotune.commands.job_file import read_job  # imports yaml

        path = Path(words.pop(0))
        given = {*typed, "script"} if words else {*typed}
        found, places = read_job(path, command, given, print_line)
        if command == "launch" and "script" in found and not {"study", "model"} & {*typed, *found}:
            raise UserError(f"{path} names no study. Add `study: NAME` to it, or `model: NAME`.")
    if command == "plan":
        if words:
            raise UserError(f"plan {shlex.join(words[:1])}: expected a job file, or options like --model NAME")
        found.pop("script", None)
    elif words:
        found["script"] = words
    return {**found, **typed}, places


Json = Annotated[bool, shared("as_json")]
Storage = Annotated[str | None, shared("storage")]
Python = Annotated[str | None, shared("python")]
StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study, or its folder.")]
