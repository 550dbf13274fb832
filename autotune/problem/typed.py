"""Conversion of the words typed after `--` to a Script: variables, launcher, target, and the named argument files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotune.bounds import MOST_RANKS, whole_number
from autotune.errors import UserError, near
from autotune.problem.argument_files import is_ds_config
from autotune.problem.argument_texts import argument_files, read_file
from autotune.problem.candidate import KNOBS, MICRO_BATCH
from autotune.problem.command_line import ACCELERATE, CommandLine, several_nodes, take_apart
from autotune.problem.early_variables import after, settings_in
from autotune.problem.frameworks import framework_of
from autotune.problem.job import ArgumentFile, Script
from autotune.problem.programs import check_module, no_script, program_file
from autotune.problem.script import KNOWN_FLAGS
from autotune.problem.script_text import script_text
from autotune.problem.shell_scripts import shell_script, training_line

_MPI = {"mpirun", "mpiexec", "srun"}
_RANKS_VARIABLES, _NODES_VARIABLE = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"), "NNODES"
# options of a framework's own command
_SPELT = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
# More names under which an argument `name=value` or `--name value` sets a knob, besides the flags of Hugging Face's parsers.
_OTHER_NAMES = {"micro_batch_size": MICRO_BATCH, **{flag[2:]: knob for knob, flag in KNOWN_FLAGS.items()}}


class Typed(NamedTuple):
    """A script, and the command's settings of the machine."""

    script: Script
    ranks: int | None  # from the launcher, its file or a variable
    said: str  # origin of `ranks`
    variables: dict[str, str]  # for this process and its ranks
    own: dict[str, str]  # those of `variables` that the script's code sets


def read_command(
    words: Sequence[str], maps: Sequence[str], worst_case: bool = False, ds_config: Path | None = None
) -> Typed:
    """Parse the words typed after `--`.

    Raises:
        UserError: nothing that can be started here, a file that does not parse, several machines, or an invalid mapping.
    """
    line = take_apart(words)
    script = make_script(words, maps, worst_case, ds_config)
    ranks, said = _ranks(line, script)
    variables = dict(line.environment)
    gpus = line.gpus or next((str(ids) for file in script.files if (ids := _gpu_ids(file))), None)
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    own = after(settings_in(script_text(script) or ""), {**os.environ, **variables})
    return Typed(script, ranks, said, {**variables, **own}, own)


def make_script(
    words: Sequence[str], maps: Sequence[str], worst_case: bool = False, ds_config: Path | None = None
) -> Script:
    """Return the script of a command line; see `read_command`."""
    line = take_apart(words)
    if line.kind == ACCELERATE:
        check_module("accelerate")
    argv, program = _target(line)
    if ds_config is not None and not is_ds_config(ds_config):
        raise UserError(f"--ds-config {ds_config}: expected a DeepSpeed config JSON")
    cwd = Path.cwd()
    flags = tuple(_mapping(text) for text in maps)
    named = [flag for _, flag in flags if not flag.startswith("-")]
    files = (*argument_files(argv, cwd, named=named), *_launcher_files(line))
    beside = str(ds_config.resolve()) if ds_config is not None else launchers_config(line, files, str(cwd))
    return Script(
        argv,
        str(cwd),
        (*flags, *_known_names(argv, {knob for knob, _ in flags})),
        worst_case,
        beside,
        launcher=line.launcher,
        environment=line.environment,
        program=str(program) if program is not None else None,
        files=files,
    )


def _target(line: CommandLine) -> tuple[tuple[str, ...], Path | None]:
    """Return the words to run, and the file of an installed command if they name one."""
    argv = line.target
    if not argv:
        raise UserError("no script after `--`: expected `autotune run … -- train.py its arguments`")
    if argv[0] in _MPI:
        raise UserError(f"`-- {argv[0]} …`: give the script itself; autotune starts the ranks (like `-- train.py …`)")
    if argv[0] == "-m":
        if len(argv) < 2:
            raise UserError("`-- -m`: expected a module's name after it")
        check_module(argv[1])
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
    return argv, program_file(argv[0])


def _mapping(text: str) -> tuple[str, str]:
    knob, equals, flag = text.partition("=")
    if not equals or not flag or "=" in flag:
        raise UserError(
            f"--map {text}: expected KNOB=--FLAG, like {MICRO_BATCH}=--batch_size, or KNOB=NAME where the script is "
            "given NAME=VALUE"
        )
    if knob not in KNOBS:
        raise UserError(f"--map {text}: unknown knob {knob!r}{near(knob, KNOBS)}")
    return knob, flag


def _known_names(argv: Sequence[str], mapped: set[str]) -> list[tuple[str, str]]:
    """Return (knob, flag) of arguments with known names that Hugging Face's parsers do not read.

    Examples are `trainer.micro_batch_size=4` and `--micro-batch-size 4`.
    """
    found: dict[str, str] = {}
    for word in argv[1:]:
        name, equals, _ = word.partition("=")
        knob = _knob_named(name)
        dashed = name.startswith("--")
        if knob and knob not in mapped and (dashed or equals) and name not in KNOWN_FLAGS.values():
            found.setdefault(knob, name if dashed else name.lstrip("+"))
    return list(found.items())


def _knob_named(name: str) -> str | None:
    return _OTHER_NAMES.get(name.lstrip("+-").replace("-", "_").rpartition(".")[2])


def declared(script: Script) -> list[str]:
    """Return the user's `--map` values as typed. Flags known by name are left out, since each command derives them again."""
    return [f"{knob}={flag}" for knob, flag in script.flags if _knob_named(flag) != knob]


def _gpu_ids(file: ArgumentFile) -> object:
    """Return the GPUs in accelerate's own file, or None."""
    ids = file.data.get("gpu_ids") if file.launcher else None
    return None if ids == "all" else ids


# -- the launcher --------------------------------------------------------------------------------------------------------


def _launcher_files(line: CommandLine) -> tuple[ArgumentFile, ...]:
    """Return the file that accelerate's launcher reads: from `--config_file`, or the user's default."""
    if line.kind != ACCELERATE:
        return ()
    given = line.options.get("config_file")
    path = Path(given) if given else _default_config()
    if given and not os.path.isfile(path):
        raise UserError(f"{line.launcher[0]} --config_file {given}: no such file")
    file = read_file(path.resolve(), 0, strict=True, launcher=True) if path is not None and path.is_file() else None
    if file is None:
        return ()
    machines = file.data.get("num_machines", 1)
    if isinstance(machines, int) and machines > 1:
        raise UserError(several_nodes(f"{given or path}: num_machines: {machines}"))
    return (file,)


def _default_config() -> Path:
    """Return the path in accelerate 1.15, commands/config/config_args.py."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(home).expanduser() / "accelerate"
    return next((path for end in ("yaml", "json") if (path := folder / f"default_config.{end}").is_file()), folder)


def launchers_config(line: CommandLine, files: Sequence[ArgumentFile], cwd: str) -> str | None:
    """Return the DeepSpeed config that accelerate's launcher or its file names, or None."""
    named = (line.options.get("deepspeed_config_file") or _named_by(files)) if line.kind == ACCELERATE else None
    path = Path(cwd) / (named or "")
    return str(path.resolve()) if is_ds_config(path) else None


def _named_by(files: Sequence[ArgumentFile]) -> str | None:
    for file in files:
        inside = file.data.get("deepspeed_config") if file.launcher else None
        if isinstance(inside, dict):
            return inside.get("deepspeed_config_file")
    return None


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
