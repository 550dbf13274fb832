"""Parser of the command after `--`, up to a Script."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotune.errors import UserError, did_you_mean
from autotune.problem.candidate import KNOBS, MICRO_BATCH
from autotune.problem.ds_config import value_at
from autotune.problem.import_time_env import settings_in, variables_after
from autotune.problem.job import ArgumentFile, Script, script_text
from autotune.script.argument_files import integers_in_words, is_ds_config, launcher_data
from autotune.script.argument_writer import read_file, with_argument_files
from autotune.script.carriers import KNOWN_FLAGS
from autotune.script.command_line import (
    ACCELERATE,
    FRAMEWORKS,
    RANKS_OPTIONS,
    CommandLine,
    framework_of,
    several_nodes,
    take_apart,
)
from autotune.script.script import check_configs_exist
from autotune.script.shell_script import started_training
from autotune.util.bounds import MOST_RANKS, whole_number
from autotune.util.interpreter import OWN, Interpreter, console_script

# -- typed command -----------------------------------------------------------------------------------------------------
#
# Conversion of the words typed after `--` to a Script: variables, launcher, target, and the named argument files.

_MPI = {"mpirun", "mpiexec", "srun"}
_RANKS_VARIABLES, _NODES_VARIABLE = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"), "NNODES"
# More names under which an argument `name=value` or `--name value` sets a knob, besides the flags of Hugging Face's parsers.
_OTHER_NAMES = {"micro_batch_size": MICRO_BATCH, **{flag[2:]: knob for knob, flag in KNOWN_FLAGS.items()}}


class TypedCommand(NamedTuple):
    """A script, and the command's settings of the machine."""

    script: Script
    ranks: int | None  # from the launcher, its file or a variable
    ranks_source: str  # option, file or variable that sets `ranks`
    variables: dict[str, str]  # for this process and its ranks
    own: dict[str, str]  # those of `variables` that the script's code sets
    started: str = ""  # the training's command, if a shell script was typed


def read_command(
    words: Sequence[str],
    maps: Sequence[str],
    worst_case: bool = False,
    ds_config: Path | None = None,
    interpreter: Interpreter = OWN,
) -> TypedCommand:
    """Parse the words typed after `--`.

    Raises:
        UserError: nothing that can be started here, a file that does not parse, several machines, or an invalid mapping.
    """
    line, started = take_apart(words), ""
    if shell := _of_shell(line):
        words = started_training(line, shell, interpreter)
        line, started = take_apart(words), shlex.join(words)
    if line.kind == ACCELERATE:
        check_module("accelerate", interpreter)
    argv, program = _target(line, interpreter)
    if ds_config and not is_ds_config(ds_config):
        raise UserError(f"--ds-config {ds_config}: expected a DeepSpeed config JSON")
    cwd = Path.cwd()
    flags = tuple(_mapping(text) for text in maps)
    launchers = _launcher_files(line)
    beside = str(ds_config.resolve()) if ds_config else launchers_config(line, launchers, str(cwd))
    script = Script(
        argv,
        str(cwd),
        (*flags, *_known_names(argv, dict(flags))),
        worst_case,
        beside,
        launcher=line.launcher,
        environment=line.environment,
        program=str(program) if program else None,
    )
    script = with_argument_files(script)
    script = dataclasses.replace(script, files=(*script.files, *launchers))
    check_configs_exist(script)
    ranks, ranks_source = _ranks(line, script)
    variables = dict(line.environment)
    if gpus := line.gpus or launcher_data(script.files).get("gpu_ids"):
        variables |= {} if gpus == "all" else {"CUDA_VISIBLE_DEVICES": str(gpus)}
    own = variables_after(settings_in(script_text(script) or ""), {**os.environ, **variables})
    return TypedCommand(script, ranks, ranks_source, {**variables, **own}, own, started)


_SHELL = re.compile(r"(.*[/ ])?(ba|da|z)?sh( .*)?")


def _of_shell(line: CommandLine) -> Sequence[str]:
    """Return the words after the shell if the line starts a shell script; empty otherwise."""
    name = "".join(line.target[:1])
    if line.kind:
        return ()
    if _SHELL.fullmatch(name):
        return line.target[1:]
    ours = os.path.isfile(name) and (name.endswith(".sh") or _SHELL.fullmatch(shebang(name)))
    return line.target if ours else ()


def _target(line: CommandLine, interpreter: Interpreter) -> tuple[tuple[str, ...], Path | None]:
    """Return the words to run, and the file of an installed command if they name one."""
    argv = line.target
    if not argv:
        raise UserError("no script after `--`: expected `autotune run … -- train.py its arguments`")
    if argv[0] in _MPI:
        raise UserError(f"`-- {argv[0]} …`: give the script itself; autotune starts the ranks (like `-- train.py …`)")
    if argv[0] == "-m":
        if len(argv) < 2:
            raise UserError("`-- -m`: expected a module's name after it")
        check_module(argv[1], interpreter)
        return argv, None
    path = Path(argv[0])
    if os.path.isfile(path):
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise UserError(f"{argv[0]} is no Python script: give the training's .py file")
        return argv, None
    if line.python or path.suffix == ".py" or "/" in argv[0]:
        raise UserError(f"no script {argv[0]}: expected a Python file, or `-m` and a module")
    return argv, program_file(argv[0], interpreter)


def _mapping(text: str) -> tuple[str, str]:
    knob, equals, flag = text.partition("=")
    if not equals or not flag or "=" in flag:
        raise UserError(
            f"--map {text}: expected KNOB=--FLAG, like {MICRO_BATCH}=--batch_size, or KNOB=NAME where the script is "
            "given NAME=VALUE"
        )
    if knob not in KNOBS:
        raise UserError(f"--map {text}: unknown knob {knob!r}{did_you_mean(knob, KNOBS)}")
    return knob, flag


def _known_names(argv: Sequence[str], mapped: dict[str, str]) -> list[tuple[str, str]]:
    """Return (knob, flag) of arguments with known names that Hugging Face's parsers do not read.

    Examples are `trainer.micro_batch_size=4` and `--micro-batch-size 4`.
    """
    found: dict[str, str] = {}
    for word in argv[1:]:
        name, equals, _ = word.partition("=")
        knob, is_flag = _knob_named(name), equals or name.startswith("--")
        if knob and knob not in mapped and is_flag and name not in KNOWN_FLAGS.values():
            found.setdefault(knob, name.lstrip("+"))
    return list(found.items())


def _knob_named(name: str) -> str | None:
    plain = name.lstrip("+-").replace("-", "_").rpartition(".")[2]
    return _OTHER_NAMES.get(plain.removeprefix("use_").removeprefix("enable_"))


def declared(script: Script) -> list[tuple[str, str]]:
    """Return (knob, flag) of the user's `--map`. Flags known by name are left out, since each command derives them again."""
    return [(knob, flag) for knob, flag in script.flags if _knob_named(flag) != knob]


# -- the launcher --------------------------------------------------------------------------------------------------------


def _launcher_files(line: CommandLine) -> tuple[ArgumentFile, ...]:
    """Return the file that accelerate's launcher reads: from `--config_file`, or the user's default."""
    if line.kind != ACCELERATE:
        return ()
    given = line.options.get("config_file")
    path = Path(given) if given else _default_config()
    if given and not path.is_file():
        raise UserError(f"{line.launcher[0]} --config_file {given}: no such file")
    file = read_file(path.resolve(), 0, strict=True, launcher=True) if path.is_file() else None
    if file is None:
        return ()
    machines = file.data.get("num_machines", 1)
    if isinstance(machines, int) and machines > 1:
        raise UserError(several_nodes(f"{path}: num_machines: {machines}"))
    return (file,)


def _default_config() -> Path:
    """Return the path in accelerate 1.15, commands/config/config_args.py."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(home).expanduser() / "accelerate"
    return next((path for end in ("yaml", "json") if (path := folder / f"default_config.{end}").is_file()), folder)


def launchers_config(line: CommandLine, files: Sequence[ArgumentFile], cwd: str) -> str | None:
    """Return the DeepSpeed config that accelerate's launcher or its file names, or None."""
    if line.kind != ACCELERATE:
        return None
    inside = value_at(launcher_data(files), ("deepspeed_config", "deepspeed_config_file"))
    path = Path(cwd) / (line.options.get("deepspeed_config_file") or inside or "")
    return str(path.resolve()) if is_ds_config(path) else None


def _ranks(line: CommandLine, script: Script) -> tuple[int | None, str]:
    """Return the number of ranks in the command, and its origin."""
    if line.ranks is not None:
        return line.ranks, " ".join(line.launcher)
    for file in script.files:
        said = file.data.get("num_processes") if file.launcher else None
        if isinstance(said, int) and said > 0:
            return said, f"{file.path}: num_processes: {said}"
    framework = framework_of(script) if script.program else None
    if framework is None:
        return None, ""
    known = {**os.environ, **dict(line.environment)} if framework.variables else {}
    nodes = known.get(_NODES_VARIABLE, "")
    if nodes.isdecimal() and whole_number(nodes, _NODES_VARIABLE) > 1:
        raise UserError(several_nodes(f"{_NODES_VARIABLE}={nodes}"))
    for name in _RANKS_VARIABLES:
        if known.get(name, "").isdecimal():
            return whole_number(known[name], name, 0, MOST_RANKS), f"{name}={known[name]}"
    typed = integers_in_words(script.argv)
    for name in RANKS_OPTIONS:
        if name in typed:
            return typed[name], f"{name} {typed[name]}"
    return None, ""


# -- programs ----------------------------------------------------------------------------------------------------------
#
# Commands installed by a package (`trl`, `llamafactory-cli`): Python files in an environment's folder of programs.


def program_file(name: str, interpreter: Interpreter = OWN) -> Path:
    """Return the Python file of an installed command. The ranks' environment takes precedence over PATH.

    Raises:
        UserError: the command is missing, is no Python program, or belongs to another environment.
    """
    python, found = interpreter.path, console_script(name, interpreter)
    if found is None:
        raise UserError(
            f"no script {name}: expected a Python file, `-m` and a module, or a command that is installed in "
            f"{_environment(python)}{_how_to_install(name)}"
        )
    theirs = shebang(found)
    if "python" not in theirs.rpartition("/")[2]:
        raise UserError(
            f"`-- {name} …`: a command, no script: give what it starts, like `-- train.py …` or `-- -m trl.scripts.sft …`"
        )
    if _other(theirs, python):
        raise UserError(
            f"`-- {name} …`: {found} is of {_environment(theirs)}, and ranks run in {_environment(python)}: "
            f"install it there, or give the Python that has it"
        )
    return Path(found)


def check_module(name: str, interpreter: Interpreter = OWN) -> None:
    """Check that a module can be found, if the ranks' interpreter is this one. Another interpreter is not checked.

    Raises:
        UserError: the module was not found.
    """
    top = name.partition(".")[0]
    if interpreter.is_other or os.path.isdir(top) or os.path.isfile(f"{top}.py"):
        return
    if importlib.util.find_spec(top) is None:
        where = _environment(interpreter.path)
        raise UserError(f"`-- -m {name} …`: no module {top} here, nor in {where}{_how_to_install(top)}")


def _how_to_install(name: str) -> str:
    """Return how to install a framework, by the name of its command or module; empty for others."""
    known = next((one for one in FRAMEWORKS if name in (*one.programs, *one.packages)), None)
    return f": `pip install {known.package}` there, or give the Python that has it" if known else ""


def shebang(program: str) -> str:
    """Return the words that start a program, as its first line names them; empty if it has no such line."""
    with open(program, "rb") as file:
        start = file.read(1024)
    if not start.startswith(b"#!") or b"\0" in start:
        return ""
    first, _, second = start[2:].decode(errors="replace").partition("\n")
    # pip's form if the path is too long for the kernel or has blanks
    long = re.match(r"'''exec' (\"[^\"]+\"|\S+) \"\$0\"", second)
    return long[1].strip('"') if long else first.strip()


def _environment(python: str) -> str:
    return str(Path(python).parent.parent)


def _other(interpreter: str, python: str) -> bool:
    """Check that two interpreters belong to different environments; `/usr/bin/env python` matches any."""
    if interpreter.startswith("/usr/bin/env") or not Path(interpreter).exists():
        return False
    return os.path.realpath(os.path.dirname(interpreter)) != os.path.realpath(os.path.dirname(python))
