"""The typed request of `run`, `plan` and `launch`: every option once, for the command line and for the Python API.

This module imports nothing slow, since `autotune --help` reads it.
"""

from __future__ import annotations

import numbers
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, NamedTuple

from autotune.errors import BadArgument, DisplayedError, ScriptFails, Unusable, UserError, did_you_mean
from autotune.util.bounds import MOST, invalid_reason, whole_number

# -- options -------------------------------------------------------------------------------------------------------------


class Panel(Enum):
    """Groups of options in `--help`, in this order."""

    FIRST = "Options"  # the ten that most users need
    TRAINING = "What to train"
    MACHINE = "This machine"
    SEARCH = "Search"
    RECOVERY = "Recovery"
    OUTPUT = "Output"
    TRUST = "Trust and protection"
    NODES = "Several machines"


@dataclass(frozen=True)
class Variant:
    """Differences of an option in one command. None keeps the option's own."""

    help: str | None = None
    default: object = None
    metavar: str | None = None
    required: bool = False


@dataclass(frozen=True)
class Option:
    """Command-line form of a field of Request. Its name, type and default are those of the field."""

    help: str
    panel: Panel
    commands: str = "run plan launch"  # names, separated by spaces
    first: str = ""  # commands that show the option in the first panel
    in_file: str = ""  # more commands, whose job files have the option
    flags: tuple[str, ...] = ()  # empty: the field's name with hyphens
    is_argument: bool = False  # words without a flag
    metavar: str | None = None  # value in the help; None: by the type
    complete: str = ""  # kind of names that a shell completes, see `cli.options.NAMES`; empty: none
    variable: str | None = None  # environment variable that sets the option
    in_python: bool = True  # the Python API has the option
    is_code: bool = False  # names code to run, which a job file does not supply: it must be typed
    plan: Variant = Variant()
    launch: Variant = Variant()


def _option(default: object, *attributes: Any, **more: Any) -> Any:
    """Return a field of Request that is an `Option` with these attributes. A default of `list` is an empty list."""
    metadata = {_OPTION: Option(*attributes, **more)}
    if default is list:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


# Names that `--executor` takes. The help below, and all messages that list them, are built from these.
LOCAL = "local"
SCHEDULERS = ("slurm", "ray")  # transports that bring their own nodes
_ON_MACHINES = f"{LOCAL}: this machine or --hostfile; {', '.join(SCHEDULERS)}: nodes of the scheduler"

COMMANDS = ("run", "plan", "launch")
_OPTION = "option"  # key of a field's metadata
STORAGE_VARIABLE = "AUTOTUNE_STORAGE"


@dataclass
class Request:
    """Options of `run`, `plan` or `launch`, one per field, with texts as typed."""

    # -- what to train
    model: str | None = _option(
        None,
        "Name of a shipped model (`autotune models`), folder or config.json, or Hub id.",
        Panel.TRAINING,
        first="run plan launch",
        metavar="NAME",
        complete="models",
        launch=Variant("Model to plan for. It replaces the study."),
    )
    gpus: int | None = _option(
        None,
        "GPUs (or CPU ranks) to use on each machine; default: all.",
        Panel.MACHINE,
        first="run plan launch",
        plan=Variant("GPUs in each machine, like --nproc-per-node of torchrun.", default=1),
    )
    workload: str | None = _option(
        None,
        "package.module:function that returns (model, batches). It replaces the model.",
        Panel.TRAINING,
        "run plan",
        metavar="MODULE:FUNCTION",
        is_code=True,
    )
    task: str | None = _option(
        None,
        "causal-lm, masked-lm, classification, token-classification, question-answering, seq2seq or "
        "image-text; default: the task of the model's configuration.",
        Panel.TRAINING,
        "run plan",
        metavar="NAME",
    )
    image_size: int | None = _option(
        None,
        "Height and width of images in pixels, if the model's configuration has none.",
        Panel.TRAINING,
        "run plan",
        metavar="PIXELS",
    )
    seq_len: int | str | None = _option(
        None,
        "Tokens per sequence, or max; default: 2048 (CPU ranks: 64).",
        Panel.TRAINING,
        first="run plan launch",
        metavar="TOKENS",
    )
    precision: str | None = _option(
        None,
        "bf16, fp16 or fp32; default: the best that the device has.",
        Panel.TRAINING,
        first="run plan",
        metavar="NAME",
    )
    optimizer: str = _option(
        "adamw", "adamw, adam, fused_adam, lion, sgd, adagrad or muon.", Panel.TRAINING, "run plan", metavar="NAME"
    )
    global_batch_size: int | str | None = _option(
        None,
        "Sequences per optimizer step over all ranks, or free for the fastest number; default: the number in "
        "--ds-config or in your script.",
        Panel.TRAINING,
        first="run plan launch",
        metavar="NUMBER|free",
    )
    ds_config: Path | None = _option(
        None, "Your DeepSpeed config. Keys that are not tuned are kept.", Panel.TRAINING, first="run plan launch"
    )
    lora: str | None = _option(
        None,
        "LoRA adapters: r=16,targets=all-linear (or q_proj+v_proj),alpha=32; quantize=nf4 keeps base weights in 4 bits.",
        Panel.TRAINING,
        "run plan",
        metavar="SETTINGS",
    )
    attention: str | None = _option(
        None,
        "eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention.",
        Panel.TRAINING,
        "run plan",
        flags=("--attn",),
        metavar="NAME",
    )
    loss: str | None = _option(
        None,
        "full, chunked (from slices of the vocabulary: no logits as a whole) or liger (its kernel alone).",
        Panel.TRAINING,
        "run plan",
        metavar="NAME",
    )
    lengths: Path | None = _option(
        None,
        "File with the lengths of your sequences (`512,1000` a line). The winner fits the longest batch. With --seq-len they "
        "are packed into rows of that length.",
        Panel.TRAINING,
        "run plan",
    )
    script: list[str] = _option(
        list,
        "A job file with options (runs/NAME/command.yaml is one), your own training script, or both. The script is tuned "
        "without changes.",
        Panel.TRAINING,
        is_argument=True,
        metavar="[JOB.yaml] [-- SCRIPT ARGS…]",
        in_python=False,
        plan=Variant("A job file with options.", metavar="[JOB.yaml]"),
        launch=Variant(
            "A study or a job file with options, then the script to train.",
            metavar="[STUDY|JOB.yaml] [-- SCRIPT ARGS…]",
            required=True,
        ),
    )
    maps: list[str] = _option(
        list,
        "KNOB=--FLAG: flag of your script that sets a knob; repeatable.",
        Panel.TRAINING,
        "run launch",
        first="launch",
        flags=("--map",),
        metavar="KNOB=--FLAG",
    )
    worst_case: bool = _option(
        False,
        "Measure with the script's largest sample in every row (tokens, pixels), padded to the longest that it allows.",
        Panel.TRAINING,
        "run",
    )

    # -- this machine
    gpu: str | None = _option(
        None,
        "GPU by name, like rtx3090 or a100-80gb, or several to compare: rtx4090,h100; default: the GPU of this machine.",
        Panel.MACHINE,
        "plan",
        first="plan",
        metavar="NAME",
        complete="gpus",
    )
    device: str = _option("auto", "auto, cuda or cpu.", Panel.MACHINE, "run launch", metavar="NAME")
    memory_cap: str | None = _option(
        None, "Device memory that one rank may use, like 24GiB.", Panel.MACHINE, metavar="SIZE"
    )
    reserve: str | None = _option(
        None,
        "Memory of each device to leave to another process, like 20GiB for the rollout engine of RL.",
        Panel.MACHINE,
        "run plan",
        metavar="SIZE",
    )
    headroom: str | None = _option(
        None, "Share of the memory capacity to leave free; default: 5%.", Panel.MACHINE, "run", metavar="SHARE"
    )
    host_memory: str | None = _option(
        None,
        "Main memory of each machine, like 1TiB; default for a named GPU: its common cloud machine.",
        Panel.MACHINE,
        "plan",
        first="plan",
        metavar="SIZE",
    )
    parallel: int = _option(
        1, "Candidates to measure at the same time, each on its own --gpus devices.", Panel.MACHINE, "run"
    )
    python: str | None = _option(
        None,
        "Python of your training environment; default: $AUTOTUNE_PYTHON, this Python, or the active environment.",
        Panel.MACHINE,
        first="launch",
        metavar="PATH",
        is_code=True,
    )

    # -- search
    budget: str = _option(
        "30m",
        "Time for this call, verification included: 90s, 30m, 1h30m.",
        Panel.SEARCH,
        "run",
        first="run",
        metavar="TIME",
    )
    space: str | dict[str, Any] | None = _option(
        None,
        "Search space: a file, or a name from `autotune spaces list`.",
        Panel.SEARCH,
        "run plan",
        first="run",
        metavar="NAME|FILE",
        complete="spaces",
        plan=Variant(default="default"),
    )
    study: str | None = _option(
        None,
        "Name of the study. The same name resumes it.",
        Panel.SEARCH,
        "run",
        in_file="launch",
        first="run",
        metavar="NAME",
        complete="studies",
    )
    storage: str | None = _option(
        None,
        "postgresql://USER:PASSWORD@HOST/DB, mysql://, sqlite:/// or journal:FILE; default: "
        "$AUTOTUNE_STORAGE, or a file in runs/NAME. Calls with the same storage and study tune together.",
        Panel.SEARCH,
        "run launch",
        variable=STORAGE_VARIABLE,
        metavar="URL",
    )
    max_trials: int | None = _option(None, "Stop after this many trials of this call.", Panel.SEARCH, "run")
    exhaustive: bool = _option(False, "Use the whole budget.", Panel.SEARCH, "run")
    executor: str = _option(LOCAL, f"{_ON_MACHINES}.", Panel.NODES, "run launch", metavar="NAME")
    seed: int = _option(0, "Random seed for the sampler and the data.", Panel.SEARCH, "run")
    no_references: bool = _option(
        False, "Do not measure DDP and FSDP2 without DeepSpeed for comparison.", Panel.SEARCH, "run"
    )
    tokens: str | None = _option(
        None,
        "Tokens of the whole training, for its hours and cost: 1e9, 2B, 500M, 1T; default: 1B.",
        Panel.OUTPUT,
        "plan",
        first="plan",
        metavar="NUMBER",
    )

    # -- recovery
    max_restarts: int = _option(
        10, "Give up after this many restarts without a newer checkpoint.", Panel.RECOVERY, "launch", "launch"
    )
    hang_timeout: str = _option(
        "30m",
        "A training hangs if no rank computes, reads or writes for this time.",
        Panel.RECOVERY,
        "launch",
        "launch",
        metavar="TIME",
    )
    convert: bool = _option(
        False,
        "Also fall back to ZeRO stage 3. Checkpoints are converted for it.",
        Panel.RECOVERY,
        "launch",
        "launch",
        flags=("--convert-checkpoints",),
    )

    # -- several machines
    hostfile: Path | None = _option(
        None, "DeepSpeed hostfile (`worker-1 slots=8` a line): machines reached by ssh.", Panel.NODES, "run launch"
    )
    include: str | None = _option(
        None,
        "Hosts of the hostfile to use, in the syntax of DeepSpeed: worker-1@worker-2:0,1.",
        Panel.NODES,
        "run launch",
        metavar="HOSTS",
    )
    exclude: str | None = _option(
        None, "Hosts or slots of the hostfile to leave out.", Panel.NODES, "run launch", metavar="HOSTS"
    )
    nodes: int | None = _option(
        None,
        "Machines to use, of those in the hostfile, in Slurm's allocation or in Ray's cluster.",
        Panel.NODES,
        first="plan",
        plan=Variant("Machines, each with --gpus GPUs: 2 with --gpus 8 is 16 GPUs.", default=1),
    )
    interface: str | None = _option(
        None, "Network interface between the machines; default: detected.", Panel.NODES, "run launch", metavar="NAME"
    )
    exports: list[str] = _option(
        list,
        "Environment variable to pass to the machines; repeatable.",
        Panel.NODES,
        "run launch",
        flags=("--export",),
        metavar="VARIABLE",
    )
    # -- output
    out: Path | None = _option(None, "File for the winner; default: runs/NAME/NAME.json.", Panel.OUTPUT, "run")
    yes: bool = _option(
        False,
        "Ask nothing: without a GPU, tune on CPU ranks.",
        Panel.OUTPUT,
        "run",
        "run",
        flags=("--yes", "-y"),
        in_python=False,
    )
    as_json: bool = _option(False, "Print one JSON object on stdout.", Panel.OUTPUT, flags=("--json",), in_python=False)
    log_file: Path | None = _option(
        None, "Append every message to a file, with its time.", Panel.OUTPUT, "run", metavar="FILE", in_python=False
    )

    # -- trust and protection
    force: bool = _option(False, "Resume a study of another job or machine.", Panel.TRUST, "run")
    unprotected: bool = _option(
        False, "Run your code even if this machine cannot protect your files from its writes.", Panel.TRUST, "run plan"
    )
    trust_remote_code: bool = _option(
        False, "Run code of the model's repository.", Panel.TRUST, "run plan", is_code=True
    )

    # -- no options
    runs: Path = Path("runs")
    command: str = ""  # the whole command as typed

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "command":
                check_value(name, value, flag_of(name))


class Parameter(NamedTuple):
    """An option as one command has it."""

    name: str  # of the field
    types: tuple[Any, ...]  # without None
    default: object  # MISSING: the option is required
    help: str
    metavar: str | None
    panel: Panel
    option: Option


@cache
def _types() -> dict[str, tuple[Any, ...]]:
    """Return the types of each field of Request, without None."""
    hints = typing.get_type_hints(Request).items()
    split = {name: typing.get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints}
    return {
        name: tuple(dict if typing.get_origin(one) is dict else one for one in types if one is not NoneType)
        for name, types in split.items()
    }


def parameters(command: str, *, in_file: bool = False) -> list[Parameter]:
    """Return the options of a command in the order of its help: the most used ones first, then by panel.

    Args:
        command: `run`, `plan` or `launch`.
        in_file: the options of its job files, which are some more.
    """
    found = []
    for one in fields(Request):
        option: Option | None = one.metadata.get(_OPTION)
        if option is None or command not in [*option.commands.split(), *(option.in_file.split() if in_file else ())]:
            continue
        own = {"plan": option.plan, "launch": option.launch}.get(command, Variant())
        default = None if one.default is MISSING else one.default
        default = MISSING if own.required else default if own.default is None else own.default
        panel = Panel.FIRST if command in option.first.split() else option.panel
        shown = (own.help or option.help, own.metavar or option.metavar, panel)
        found.append(Parameter(one.name, _types()[one.name], default, *shown, option))
    return sorted(found, key=lambda one: [*Panel].index(one.panel))


def flag_of(name: str) -> str:
    """Return the command-line flag of a field of Request."""
    (found,) = (one for one in fields(Request) if one.name == name)
    option: Option | None = found.metadata.get(_OPTION)
    return option.flags[0] if option is not None and option.flags else f"--{name.replace('_', '-')}"


_MOST_OF = {"gpus": 4096, "nodes": 4096, "parallel": 4096, "image_size": 65_536}  # limits of options that count things


def check_value(name: str, value: object, shown: str) -> None:
    """Check the bounds of a field's value.

    Args:
        shown: the option in the message.

    Raises:
        UserError: it is out of bounds.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        whole_number(value, shown, -MOST, _MOST_OF.get(name, MOST))
    for one in value if isinstance(value, list) else [str(value) if isinstance(value, Path) else value]:
        if why := invalid_reason(one):
            raise UserError(f"{shown}: {why}")


# -- options of the Python API -----------------------------------------------------------------------------------------

MOST_NUMBER = 2**63
_WORDS = 'expected a list of words, like ["train.py", "--epochs", "1"]'


def request_of(function: str, command: object, options: Mapping[str, object], *beside: str, **known: object) -> Request:
    """Return the Request of a function of the Python API. None keeps a field's default.

    Args:
        function: command that the function is named after in `Option.commands`.
        command: words of the training script.
        beside: options of the function that are no fields.
        known: fields that the function takes as its own parameters.

    Raises:
        UserError: there is no such option, or its field cannot have the value.
    """
    taken = {one.name for one in parameters(function) if one.option.in_python}
    allowed = {*taken, "runs"} - {*known}
    for name in options:
        if name not in allowed:
            raise UserError(f"no option {name!r}{did_you_mean(str(name), sorted({*allowed, *beside}))}")
    given = {**options, **known}
    values = {name: convert(name, value, _types()[name]) for name, value in given.items() if value is not None}
    script = [] if command is None else _list("command", command, _WORDS)
    return Request(script=script, **values)


def convert(name: str, value: object, types: Sequence[Any]) -> Any:
    """Return the value converted to one of a field's types.

    Raises:
        UserError: it cannot be converted; the message begins with `name`.
    """
    if list[str] in types:
        return _list(name, value, "expected a list of texts")
    if dict in types and isinstance(value, Mapping):
        return dict(value)
    if int in types and str in types:  # a number or a word; texts are parsed later
        return _plain(name, value) if isinstance(value, str) else _whole(name, value)
    kind = next(one for one in types if one is not dict)
    return _TAKES[kind](name, value)


_OTHER_FLAGS = {"--trial": "trial", "--format": "style"}  # of `autotune export`


@contextmanager
def python_errors() -> Iterator[None]:
    """Rename options to parameters in the errors of the body of the `with`, for the Python API.

    Raises:
        BadArgument: the body raised UserError. Other errors keep their type.
    """
    try:
        yield
    except DisplayedError as error:
        names = {flag_of(one.name): one.name for one in fields(Request) if _OPTION in one.metadata} | _OTHER_FLAGS
        text = re.sub(r"(?<![\w-])--[a-z][a-z-]*", lambda found: names.get(found[0], found[0]), str(error))
        if type(error) in (UserError, ScriptFails):
            raise BadArgument(text) from None
        raise (Unusable(text, error.cause) if isinstance(error, Unusable) else type(error)(text)) from None


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | PurePath):
        raise _refused(name, "a path", value)
    return Path(_plain(name, str(value)))


def _text(name: str, value: object) -> str:
    """Return a text; a number becomes its text: seconds, bytes, a share or a count, as on the command line."""
    if isinstance(value, str | PurePath):
        return _plain(name, str(value))
    number = _number(name, value, "a text, a path or a number")
    return str(int(number)) if number == int(number) else str(number)


def _whole(name: str, value: object) -> int:
    number = _number(name, value, "a whole number", int)
    if number != int(number):
        raise _refused(name, "a whole number", value)
    return int(number)


def _real(name: str, value: object) -> float:
    return float(_number(name, value, "a number", float))


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, "True or False", value)
    return value


_TAKES: dict[type, Callable[[str, object], object]] = {
    Path: _path,
    bool: _switch,
    int: _whole,
    float: _real,
    str: _text,
}


def _list(name: str, value: object, expected: str) -> list[str]:
    """Return the texts of paths and numbers. A single text is refused: it would be split into letters."""
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        raise UserError(f"{name}: {expected}, found {_shown_option(value)}")
    return [
        word if isinstance(word, str) and "\0" not in word else _text(f"{name}[{at}]", word)
        for at, word in enumerate(value)
    ]


def _number(name: str, value: object, expected: str, parse: Callable[[str], int | float] | None = None) -> int | float:
    """Return a plain number from one of Python's or numpy's types, or from a text that `parse` reads."""
    if parse is not None and isinstance(value, str):
        with suppress(ValueError):
            value = parse(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refused(name, expected, value)
    number: Any = value
    if not abs(number) < MOST_NUMBER:  # also excludes NaN
        raise UserError(f"{name}: the number is not possible: expected less than 2**63")
    return int(number) if isinstance(value, numbers.Integral) else float(number)


def _plain(name: str, text: str) -> str:
    if any(sign in text for sign in "\0\n\r"):
        raise _refused(name, "one line of text", text)
    return text


def _refused(name: str, expected: str, value: object) -> UserError:
    return UserError(f"{name}: expected {expected}, found {_shown_option(value)}")


def _shown_option(value: object) -> str:
    """Return a short text quoted, and the type of any other value."""
    if isinstance(value, bool | int | float) and abs(value) < MOST_NUMBER:
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    return f"a value of type {type(value).__name__}"


# -- typed keywords --------------------------------------------------------------------------------------------------------

_ANNOTATIONS: dict[Any, str] = {
    str: "str | float | PurePath",
    Path: "str | PurePath",
    int: "int",
    float: "float",
    bool: "bool",
    list[str]: "Sequence[str]",
    dict: "Mapping[str, Any]",
}
_KEYWORDS = [
    '"""Keyword arguments of the Python API, from the fields of Request.',
    "",
    "`autotune run --help` describes them. `python -m autotune.commands.request >",
    "autotune/commands/keywords.py` writes this file.",
    '"""',
    "",
    "from __future__ import annotations",
    "",
    "from collections.abc import Mapping, Sequence",
    "from pathlib import PurePath",
    "from typing import Any, TypedDict",
]


def keywords_text() -> str:
    """Return the text of `commands/keywords.py`: a class for the options of several commands, then one for each command."""
    users: dict[str, tuple[str, ...]] = {"runs": COMMANDS}
    for command in COMMANDS:
        for one in parameters(command):
            if one.option.in_python:
                users[one.name] = (*users.get(one.name, ()), command)
    lines = [*_KEYWORDS]
    shared = sorted({one for one in users.values() if len(one) > 1}, key=lambda one: (-len(one), one))
    for commands in [*shared, *((command,) for command in COMMANDS)]:
        bases = ["TypedDict"]
        if len(commands) == 1:
            bases = [_class_name(several) for several in shared if commands[0] in several]
        lines += ["", "", f"class {_class_name(commands)}({', '.join(bases)}, total=False):"]
        if len(commands) == 1:
            function = "tune" if commands[0] == "run" else commands[0]
            lines += [f'    """Options of `autotune.{function}`; None keeps the default."""', ""]
        for name in sorted(one for one, by in users.items() if by == commands):
            lines.append(f"    {name}: {' | '.join(_ANNOTATIONS[kind] for kind in _types()[name])} | None")
    return "\n".join([*lines, ""])


def _class_name(commands: Sequence[str]) -> str:
    return f"{'_' * (len(commands) > 1)}{''.join(map(str.title, commands))}Options"


if __name__ == "__main__":
    print(keywords_text(), end="")
