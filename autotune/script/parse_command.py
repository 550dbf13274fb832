"""Parser of the command after `--`, up to a Script."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotune.errors import UserError, did_you_mean
from autotune.problem.candidate import KNOBS, MICRO_BATCH
from autotune.problem.ds_config import value_at
from autotune.problem.import_time_env import settings_in, variables_after
from autotune.problem.job import ArgumentFile, Script, script_text
from autotune.script.argument_files import is_ds_config, launcher_data
from autotune.script.argument_writer import argument_files, read_file
from autotune.script.command_line import ACCELERATE, FRAMEWORKS, CommandLine, framework_of, several_nodes, take_apart
from autotune.script.script import KNOWN_FLAGS, check_configs_exist
from autotune.util.bounds import MOST_RANKS, whole_number
from autotune.util.interpreter import OWN, Interpreter, console_script

# -- typed command -----------------------------------------------------------------------------------------------------
#
# Conversion of the words typed after `--` to a Script: variables, launcher, target, and the named argument files.

_MPI = {"mpirun", "mpiexec", "srun"}
_RANKS_VARIABLES, _NODES_VARIABLE = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"), "NNODES"
# options of a framework's own command
_SPELT = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
# More names under which an argument `name=value` or `--name value` sets a knob, besides the flags of Hugging Face's parsers.
_OTHER_NAMES = {"micro_batch_size": MICRO_BATCH, **{flag[2:]: knob for knob, flag in KNOWN_FLAGS.items()}}


class TypedCommand(NamedTuple):
    """A script, and the command's settings of the machine."""

    script: Script
    ranks: int | None  # from the launcher, its file or a variable
    ranks_source: str  # option, file or variable that sets `ranks`
    variables: dict[str, str]  # for this process and its ranks
    own: dict[str, str]  # those of `variables` that the script's code sets


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
    line = take_apart(words)
    script = make_script(words, maps, worst_case, ds_config, interpreter)
    ranks, ranks_source = _ranks(line, script)
    variables = dict(line.environment)
    if gpus := line.gpus or launcher_data(script.files).get("gpu_ids"):
        variables |= {} if gpus == "all" else {"CUDA_VISIBLE_DEVICES": str(gpus)}
    own = variables_after(settings_in(script_text(script) or ""), {**os.environ, **variables})
    return TypedCommand(script, ranks, ranks_source, {**variables, **own}, own)


def make_script(
    words: Sequence[str],
    maps: Sequence[str],
    worst_case: bool = False,
    ds_config: Path | None = None,
    interpreter: Interpreter = OWN,
) -> Script:
    """Return the script of a command line; see `read_command`."""
    line = take_apart(words)
    if line.kind == ACCELERATE:
        check_module("accelerate", interpreter)
    argv, program = _target(line, interpreter)
    if ds_config is not None and not is_ds_config(ds_config):
        raise UserError(f"--ds-config {ds_config}: expected a DeepSpeed config JSON")
    cwd = Path.cwd()
    flags = tuple(_mapping(text) for text in maps)
    named = [flag for _, flag in flags if not flag.startswith("-")]
    files = (*argument_files(argv, cwd, named=named), *_launcher_files(line))
    beside = str(ds_config.resolve()) if ds_config is not None else launchers_config(line, files, str(cwd))
    script = Script(
        argv,
        str(cwd),
        (*flags, *_known_names(argv, dict(flags))),
        worst_case,
        beside,
        launcher=line.launcher,
        environment=line.environment,
        program=str(program) if program is not None else None,
        files=files,
    )
    check_configs_exist(script)
    return script


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
    if (shell := shell_script(argv)) is not None:
        raise UserError(no_script(argv[0], training_line(shell)))
    path = Path(argv[0])
    if os.path.isfile(path):
        with path.open("rb") as file:
            start = file.read(4096)
        if b"\0" in start:
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
    return _OTHER_NAMES.get(name.lstrip("+-").replace("-", "_").rpartition(".")[2])


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
    known = {**os.environ, **dict(line.environment)}
    nodes = known.get(_NODES_VARIABLE, "")
    if framework.variables and nodes.isdecimal() and whole_number(nodes, _NODES_VARIABLE) > 1:
        raise UserError(several_nodes(f"{_NODES_VARIABLE}={nodes}"))
    for name in _RANKS_VARIABLES if framework.variables else ():
        if known.get(name, "").isdecimal():
            return whole_number(known[name], name, 0, MOST_RANKS), f"{name}={known[name]}"
    for at, word in enumerate(script.argv):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(script.argv[at + 1 : at + 2])
        if name in _SPELT and value.isdecimal():
            return whole_number(value, name, 0, MOST_RANKS), f"{name} {value}"
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
    known = next((one for one in FRAMEWORKS if name in one.programs), None)
    if found is None and known is not None:
        raise UserError(
            f"`-- {name} …`: {known.package} is not installed in {_environment(python)}: "
            f"`pip install {known.package}` there, or give the Python that has it"
        )
    if found is None:
        raise UserError(f"no script {name}: expected a Python file, `-m` and a module, or an installed command")
    theirs = interpreter_of(Path(found))
    if theirs is None:
        raise UserError(no_script(name))
    if _other(theirs, python):
        raise UserError(
            f"`-- {name} …`: {found} is of {_environment(theirs)}, and ranks run in {_environment(python)}: "
            f"install it there, or give the Python that has it"
        )
    return Path(found)


def no_script(name: str, started: str = "") -> str:
    """Return an error for a command that Python cannot run, with a replacement.

    Args:
        started: the command that it starts, if known.
    """
    if not started:
        return f"`-- {name} …`: a command, no script: give what it starts, like `-- train.py …` or `-- -m trl.scripts.sft …`"
    filled = ", with its variables filled in" if "$" in started else ""
    return f"`-- {name} …`: a shell script: give what it starts{filled}: `-- {started}`"


def check_module(name: str, interpreter: Interpreter = OWN) -> None:
    """Check that a module can be found, if the ranks' interpreter is this one. Another interpreter is not checked.

    Raises:
        UserError: the module was not found.
    """
    top = name.partition(".")[0]
    if interpreter.is_other or os.path.isdir(top) or os.path.isfile(f"{top}.py"):
        return
    if importlib.util.find_spec(top) is None:
        known = next((one for one in FRAMEWORKS if top in one.packages), None)
        install = f": `pip install {known.package}` there, or give the Python that has it" if known else ""
        raise UserError(f"`-- -m {name} …`: no module {top} here, nor in {_environment(interpreter.path)}{install}")


def interpreter_of(program: Path) -> str | None:
    """Return the Python in a program's shebang, or None if the program is not a Python one."""
    try:
        with program.open("rb") as file:
            start = file.read(1024)
    except OSError:
        return None
    if not start.startswith(b"#!") or b"\0" in start:
        return None
    lines = start.decode(errors="replace").splitlines()
    said = lines[0][2:].strip()
    if said == "/bin/sh" and len(lines) > 1:  # pip's form if the path is too long for the kernel or has blanks
        long = re.match(r"'''exec' (\"[^\"]+\"|\S+) \"\$0\"", lines[1])
        said = long[1].strip('"') if long else said
    name = said.rpartition("/")[2].split()
    return said if name and any("python" in part for part in name) else None


def _environment(python: str) -> str:
    return str(Path(python).parent.parent)


def _other(interpreter: str, python: str) -> bool:
    """Check that two interpreters belong to different environments; `/usr/bin/env python` matches any."""
    if interpreter.startswith("/usr/bin/env") or not Path(interpreter).exists():
        return False
    return os.path.realpath(os.path.dirname(interpreter)) != os.path.realpath(os.path.dirname(python))


# -- shell scripts -----------------------------------------------------------------------------------------------------
#
# Shell scripts that start a training. Python cannot run them, but the command that they start could be given instead.

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_MOST_BYTES = 1 << 20
_LONGEST = 500  # characters of a quoted line
# words in front of a command
_BEFORE = set("exec nohup time then do else srun mpirun mpiexec uv conda {".split())
_BETWEEN = re.compile(r"\s*(?:&&|\|\||;)\s*")
_QUOTED = re.compile(r"\b(?:ba|da|z|k)?sh\s+-\w*c\s+(['\"])(.*)\1")
_AFTER = re.compile(r"\s+(?:\||\d?>|&|#).*")  # pipes, redirections and comments after a command
_ASSIGNED = re.compile(r"^\w+=['\"](?:\$\S+ )*")  # a command in a variable, after others
_PROGRAMS = {name for one in FRAMEWORKS for name in one.programs}


def shell_script(words: Sequence[str]) -> Path | None:
    """Return the shell script that these words start, directly or by a shell (`bash train.sh`); None if there is none."""
    path = Path(words[0])
    if os.path.isfile(path):  # `os.path.isfile` accepts a text of any length; Path refuses a long one
        return path if path.suffix[1:] in _SHELLS or _names_a_shell(path) else None
    named = (Path(word) for word in words[1:] if not word.startswith("-")) if path.name in _SHELLS else ()
    return next((one for one in named if os.path.isfile(one)), None)


def _names_a_shell(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(256).decode(errors="replace")
    if not first.startswith("#!") or interpreter_of(path) is not None:  # programs of pip may begin with a shell, too
        return False
    return not _SHELLS.isdisjoint(part.rpartition("/")[2] for part in first[2:].split())


def training_line(path: Path) -> str:
    """Return the line of a shell script that starts its training; empty if none was found.

    Commands of launchers and frameworks are preferred to plain Python, and then commands with a DeepSpeed config. If
    several launcher commands are left, the first is returned, since later ones evaluate. If several plain Python commands are
    left, the last is returned, since earlier ones prepare data.
    """
    try:
        text = path.read_text(errors="replace", encoding="utf-8") if path.stat().st_size <= _MOST_BYTES else ""
    except OSError:
        return ""
    lines = [_QUOTED.sub(r"&& \2", line) for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    commands = [_command(_alone(part).split()) for line in lines for part in _BETWEEN.split(line)]
    most = max(map(_likely, commands), default=0)
    alike = [command for command in commands if _likely(command) == most] if most else [[]]
    alike = [command for command in alike if "deepspeed" in " ".join(command[1:])] or alike
    line = " ".join(alike[-1 if most == 1 else 0])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def _alone(part: str) -> str:
    """Return a command without its surroundings: parentheses of a subshell, or a variable or a quote around it."""
    part = _AFTER.sub("", part).strip().lstrip("(")
    if part.count(")") > part.count("("):
        part = part.rstrip(") ")
    if part.count('"') % 2 or part.count("'") % 2:
        part = _ASSIGNED.sub("", part).strip("'\"")
    return part


def _command(words: list[str]) -> list[str]:
    """Return the words without those in front of a command (`srun --nodes 1 torchrun …`)."""
    if not words or words[0] not in _BEFORE:
        return words
    return next((words[at:] for at in range(1, len(words)) if _likely(words[at:])), [])


def _likely(words: Sequence[str]) -> int:
    """Rate how likely a command is a training: 2 for a launcher or a framework, 1 for Python, 0 for anything else."""
    try:
        line = take_apart(words)
    except UserError:  # the launcher is configured for several nodes
        return 2
    if line.kind or not _PROGRAMS.isdisjoint(line.target[:1]):
        return 2
    runs = line.target[:1] == ("-m",) or "".join(line.target[:1]).endswith(".py")
    return int(line.python and runs and line.target[:2] != ("-m", "pip"))
