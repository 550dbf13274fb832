"""Options of `run`, `plan` and `launch`, declared once: one model for command line, job file, JSON schema and Python API."""

from __future__ import annotations

import numbers
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)

from autotune.errors import BadArgument, DisplayedError, ScriptFails, UserError, did_you_mean
from autotune.problem.forms import first_problem
from autotune.util.bounds import MOST, MOST_RANKS, display_value, invalid_reason
from autotune.util.units import parse_duration, parse_memory, parse_share

# -- values --------------------------------------------------------------------------------------------------------------

_SEEDS = 2**32  # numpy's generators, and so Optuna's samplers, take seeds below this


def _plain(value: Any) -> Any:
    """Return a path or a number of Python or numpy as its text on the command line: seconds, bytes, a share or a count."""
    if isinstance(value, PurePath):
        return str(value)
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    if not abs(number) <= MOST:  # also excludes NaN
        raise ValueError("expected a number below 2**63")
    if number == int(number):
        number = int(number)
    return str(number)


def _seconds(value: object) -> object:
    return f"{_plain(value)}s" if isinstance(value, numbers.Real) else value


def _gpu_names(text: str) -> None:
    from autotune.problem.gpu_specs import named_gpu

    for name in text.split(","):
        named_gpu(name)


def _read_by(read: Callable[[str], object]) -> AfterValidator:
    """Return a check that a text can be read."""

    def check(text: str) -> str:
        try:
            read(text)
        except UserError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(check)


def parse_nodes(text: str) -> tuple[int, float]:
    """Return the machines of `2` or `2x25Gbit`, and GB/s of the network of each; 0: not given.

    Raises:
        UserError: the text is no such number.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}(?:\.\d+)?)Gbit)?", text)
    if found is None:
        raise UserError(f"expected a number of machines, like 2 or 2x25Gbit, found {display_value(text)}")
    return int(found[1]), float(found[2] or 0) / 8


def _valid(value: Any) -> Any:
    """Check the length and the characters of a text or a path."""
    why = invalid_reason(str(value))
    if why:
        raise ValueError(why)
    return value


def _one_line(text: str) -> str:
    if "\n" in text or "\r" in text:
        raise ValueError("expected one line of text")
    return text


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_words(value: object) -> object:
    """Return the words of a command that is one text, as a shell splits it."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value.replace("\\\n", " "))
    except ValueError as error:
        raise ValueError(f"not a command ({str(error).lower()})") from None


_Word = Annotated[str, BeforeValidator(_plain), AfterValidator(_valid)]
_Text = Annotated[_Word, AfterValidator(_one_line), WithJsonSchema({"type": ["string", "number"]})]
_Time = Annotated[_Text, BeforeValidator(_seconds), _read_by(parse_duration)]
_Share = Annotated[_Text, _read_by(parse_share)]
_Memory = Annotated[_Text, _read_by(parse_memory)]
_Gpus = Annotated[_Text, _read_by(_gpu_names)]
_Nodes = Annotated[_Text, _read_by(parse_nodes)]
_File = Annotated[Path, AfterValidator(_valid)]
_Texts = Annotated[list[_Word], BeforeValidator(_as_list), WithJsonSchema({"type": ["array", "string"]})]
_Command = Annotated[list[_Word], BeforeValidator(_as_words), WithJsonSchema({"type": ["array", "string"]})]
_Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]

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
class Option:
    """Command-line form of a field of Options. Its flag is the field's alias."""

    help: str
    panel: Panel
    commands: str = "run plan launch"  # names, separated by spaces
    first: str = ""  # commands that show the option in the first panel
    in_file: str = ""  # more commands, whose job files have the option
    is_argument: bool = False  # words without a flag
    metavar: str = ""  # value in the help; empty for a switch
    variable: str | None = None  # environment variable that sets the option
    in_python: bool = True  # the Python API has the option
    is_code: bool = False  # names code to run, which a job file does not supply: it must be typed
    helps: Mapping[str, str] = field(default_factory=dict)  # by command, if it differs
    metavars: Mapping[str, str] = field(default_factory=dict)  # by command, if it differs

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the help to the field's JSON schema."""
        return {**handler(core_schema), "description": self.help}


# Names that `--executor` takes. The help below, and all messages that list them, are built from these.
LOCAL = "local"
SCHEDULERS = ("slurm", "ray")  # transports that bring their own nodes
_ON_MACHINES = f"{LOCAL}: this machine or --hostfile; {', '.join(SCHEDULERS)}: nodes of the scheduler"

COMMANDS = ("run", "plan", "launch")
STORAGE_VARIABLE = "AUTOTUNE_STORAGE"
_OTHER_FLAGS = {
    "attention": "attn",
    "maps": "map",
    "exports": "export",
    "convert": "convert-checkpoints",
    "as_json": "json",
    "whole": "all",
}


def _flag(name: str) -> str:
    return _OTHER_FLAGS.get(name, name.replace("_", "-"))


class Options(BaseModel):
    """Options of `run`, `plan` or `launch`, one per field. Texts are parsed by the setup of the command."""

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        loc_by_alias=False,
        alias_generator=_flag,
        defer_build=True,
        title="Job file of autotune",
    )

    # -- what to train
    model: Annotated[
        _Text | None,
        Option(
            "Name of a shipped model (`autotune models`), folder or config.json, or Hub id.",
            Panel.TRAINING,
            first="run plan launch",
            metavar="NAME",
            helps={"launch": "Model to plan for. It replaces the study."},
        ),
    ] = None
    gpus: Annotated[
        _Ranks | None,
        Option(
            "GPUs (or CPU ranks) to use on each machine; default: all.",
            Panel.MACHINE,
            first="run plan launch",
            metavar="NUMBER",
            helps={"plan": "GPUs in each machine, like --nproc-per-node of torchrun; default: 1."},
        ),
    ] = None
    workload: Annotated[
        _Text | None,
        Option(
            "package.module:function that returns (model, batches). It replaces the model.",
            Panel.TRAINING,
            "run",
            metavar="MODULE:FUNCTION",
            is_code=True,
        ),
    ] = None
    task: Annotated[
        _Text | None,
        Option(
            "causal-lm, masked-lm, classification, token-classification, question-answering, seq2seq or "
            "image-text; default: the task of the model's configuration.",
            Panel.TRAINING,
            "run plan",
            metavar="NAME",
        ),
    ] = None
    image_size: Annotated[
        Annotated[int, Field(ge=1, le=65_536)] | None,
        Option(
            "Height and width of images in pixels, if the model's configuration has none.",
            Panel.TRAINING,
            "run",
            metavar="PIXELS",
        ),
    ] = None
    seq_len: Annotated[
        _Text | None,
        Option(
            "Tokens per sequence, or max; default: 2048 (CPU ranks: 64).",
            Panel.TRAINING,
            first="run plan launch",
            metavar="TOKENS",
        ),
    ] = None
    precision: Annotated[
        _Text | None,
        Option(
            "bf16, fp16 or fp32; default: the best that the device has.",
            Panel.TRAINING,
            first="run plan",
            metavar="NAME",
        ),
    ] = None
    optimizer: Annotated[
        _Text,
        Option("adamw, adam, fused_adam, lion, sgd, adagrad or muon.", Panel.TRAINING, "run plan", metavar="NAME"),
    ] = "adamw"
    global_batch_size: Annotated[
        _Text | None,
        Option(
            "Sequences per optimizer step over all ranks, or free for the fastest number; default: the number in "
            "--ds-config or in your script.",
            Panel.TRAINING,
            first="run plan launch",
            metavar="NUMBER|free",
        ),
    ] = None
    ds_config: Annotated[
        _File | None,
        Option(
            "Your DeepSpeed config. Keys that are not tuned are kept.",
            Panel.TRAINING,
            first="run plan launch",
            metavar="PATH",
        ),
    ] = None
    lora: Annotated[
        _Text | None,
        Option(
            "LoRA adapters: r=16,targets=all-linear (or q_proj+v_proj),alpha=32; quantize=nf4 keeps base weights in 4 bits.",
            Panel.TRAINING,
            "run plan",
            metavar="SETTINGS",
        ),
    ] = None
    attention: Annotated[
        _Text | None,
        Option(
            "eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention.",
            Panel.TRAINING,
            "run plan",
            metavar="NAME",
        ),
    ] = None
    loss: Annotated[
        _Text | None,
        Option(
            "full, chunked (from slices of the vocabulary: no logits as a whole) or liger (its kernel alone).",
            Panel.TRAINING,
            "run plan",
            metavar="NAME",
        ),
    ] = None
    lengths: Annotated[
        _File | None,
        Option(
            "File with the lengths of your sequences (`512,1000` a line). The winner fits the longest batch. With --seq-len they "
            "are packed into rows of that length.",
            Panel.TRAINING,
            "run plan",
            metavar="PATH",
        ),
    ] = None
    script: Annotated[
        _Command,
        Option(
            "A job file with options (runs/NAME/command.yaml is one), your own training script, or both. The script is tuned "
            "without changes.",
            Panel.TRAINING,
            is_argument=True,
            metavar="[JOB.yaml] [-- SCRIPT ARGS…]",
            in_python=False,
            helps={
                "plan": "A job file with options.",
                "launch": "A study or a job file with options, then the script to train.",
            },
            metavars={"plan": "[JOB.yaml]", "launch": "[STUDY|JOB.yaml] [-- SCRIPT ARGS…]"},
        ),
    ] = []
    maps: Annotated[
        _Texts,
        Option(
            "KNOB=--FLAG: flag of your script that sets a knob; repeatable.",
            Panel.TRAINING,
            "run launch",
            first="launch",
            metavar="KNOB=--FLAG",
        ),
    ] = []
    worst_case: Annotated[
        bool,
        Option(
            "Measure with the script's largest sample in every row (tokens, pixels), padded to the longest that it allows.",
            Panel.TRAINING,
            "run",
        ),
    ] = False

    # -- this machine
    gpu: Annotated[
        _Gpus | None,
        Option(
            "GPU by name, like rtx3090 or a100-80gb, or several to compare: rtx4090,h100; default: the GPU of this machine.",
            Panel.MACHINE,
            "plan",
            first="plan",
            metavar="NAME",
        ),
    ] = None
    device: Annotated[_Text, Option("auto, cuda or cpu.", Panel.MACHINE, "run launch", metavar="NAME")] = "auto"
    memory_cap: Annotated[
        _Memory | None,
        Option("Device memory that one rank may use, like 24GiB.", Panel.MACHINE, "run launch", metavar="SIZE"),
    ] = None
    reserve: Annotated[
        _Memory | None,
        Option(
            "Memory of each device to leave to another process, like 20GiB for the rollout engine of RL.",
            Panel.MACHINE,
            "run plan",
            metavar="SIZE",
        ),
    ] = None
    headroom: Annotated[
        _Share | None,
        Option("Share of the memory capacity to leave free; default: 5%.", Panel.MACHINE, "run", metavar="SHARE"),
    ] = None
    host_memory: Annotated[
        _Memory | None,
        Option(
            "Main memory of each machine, like 1TiB; default for a named GPU: its common cloud machine.",
            Panel.MACHINE,
            "plan",
            first="plan",
            metavar="SIZE",
        ),
    ] = None
    sure: Annotated[
        _Share,
        Option(
            "Exit with code 3 if the chance that the config fits is smaller.",
            Panel.MACHINE,
            "plan",
            first="plan",
            metavar="SHARE",
        ),
    ] = "80%"
    parallel: Annotated[
        _Ranks,
        Option(
            "Candidates to measure at the same time, each on its own --gpus devices.",
            Panel.MACHINE,
            "run",
            metavar="NUMBER",
        ),
    ] = 1
    python: Annotated[
        _Text | None,
        Option(
            "Python of your training environment; default: $AUTOTUNE_PYTHON, this Python, or the active environment.",
            Panel.MACHINE,
            first="launch",
            metavar="PATH",
            is_code=True,
        ),
    ] = None

    # -- search
    budget: Annotated[
        _Time,
        Option(
            "Time for this call, verification included: 90s, 30m, 1h30m.",
            Panel.SEARCH,
            "run",
            first="run",
            metavar="TIME",
        ),
    ] = "30m"
    space: Annotated[
        _Text | dict[str, Any] | None,
        Option(
            "Search space: a file, or a name from `autotune spaces list`.",
            Panel.SEARCH,
            "run plan",
            first="run",
            metavar="NAME|FILE",
        ),
    ] = None
    study: Annotated[
        _Text | None,
        Option(
            "Name of the study. The same name resumes it.",
            Panel.SEARCH,
            "run",
            in_file="launch",
            first="run",
            metavar="NAME",
        ),
    ] = None
    storage: Annotated[
        _Text | None,
        Option(
            "postgresql://USER:PASSWORD@HOST/DB, mysql://, sqlite:/// or journal:FILE; default: "
            "$AUTOTUNE_STORAGE, or a file in runs/NAME. Calls with the same storage and study tune together.",
            Panel.SEARCH,
            "run launch",
            variable=STORAGE_VARIABLE,
            metavar="URL",
        ),
    ] = None
    max_trials: Annotated[
        Annotated[int, Field(ge=1, le=MOST)] | None,
        Option("Stop after this many trials of this call.", Panel.SEARCH, "run", metavar="NUMBER"),
    ] = None
    exhaustive: Annotated[bool, Option("Use the whole budget.", Panel.SEARCH, "run")] = False
    sampler: Annotated[
        _Text | None,
        Option(
            "Sampler of Optuna that proposes in place of autotune's: tpe, gp, random or PACKAGE:CLASS.",
            Panel.SEARCH,
            "run",
            metavar="NAME",
            in_python=False,
            is_code=True,
        ),
    ] = None
    executor: Annotated[_Text, Option(f"{_ON_MACHINES}.", Panel.NODES, "run launch", metavar="NAME")] = LOCAL
    seed: Annotated[
        int,
        Field(ge=0, lt=_SEEDS),
        Option("Random seed for the sampler and the data.", Panel.SEARCH, "run", metavar="NUMBER"),
    ] = 0
    no_references: Annotated[
        bool, Option("Do not measure DDP and FSDP2 without DeepSpeed for comparison.", Panel.SEARCH, "run")
    ] = False
    tokens: Annotated[
        _Text | None,
        Option(
            "Tokens of the whole training, for its hours and cost: 1e9, 2B, 500M, 1T; default: 1B.",
            Panel.OUTPUT,
            "plan",
            first="plan",
            metavar="NUMBER",
        ),
    ] = None

    # -- recovery
    max_restarts: Annotated[
        int,
        Field(ge=0, le=MOST),
        Option(
            "Give up after this many restarts without a newer checkpoint.",
            Panel.RECOVERY,
            "launch",
            "launch",
            metavar="NUMBER",
        ),
    ] = 10
    hang_timeout: Annotated[
        _Time,
        Option(
            "A training hangs if no rank computes, reads or writes for this time.",
            Panel.RECOVERY,
            "launch",
            "launch",
            metavar="TIME",
        ),
    ] = "30m"
    convert: Annotated[
        bool,
        Option("Also fall back to ZeRO stage 3. Checkpoints are converted for it.", Panel.RECOVERY, "launch", "launch"),
    ] = False

    # -- several machines
    hostfile: Annotated[
        _File | None,
        Option(
            "DeepSpeed hostfile (`worker-1 slots=8` a line): machines reached by ssh.",
            Panel.NODES,
            "run launch",
            metavar="PATH",
        ),
    ] = None
    include: Annotated[
        _Text | None,
        Option(
            "Hosts of the hostfile to use, in the syntax of DeepSpeed: worker-1@worker-2:0,1.",
            Panel.NODES,
            "run launch",
            metavar="HOSTS",
        ),
    ] = None
    exclude: Annotated[
        _Text | None, Option("Hosts or slots of the hostfile to leave out.", Panel.NODES, "run launch", metavar="HOSTS")
    ] = None
    nodes: Annotated[
        _Nodes | None,
        Option(
            "Machines to use, of those in the hostfile, in Slurm's allocation or in Ray's cluster.",
            Panel.NODES,
            first="plan",
            metavar="NUMBER",
            helps={
                "plan": "Machines, each with --gpus GPUs: 2 with --gpus 8 is 16 GPUs; 2x25Gbit: and with that network; "
                "default: 1."
            },
        ),
    ] = None
    interface: Annotated[
        _Text | None,
        Option("Network interface between the machines; default: detected.", Panel.NODES, "run launch", metavar="NAME"),
    ] = None
    exports: Annotated[
        _Texts,
        Option(
            "Environment variable to pass to the machines; repeatable.", Panel.NODES, "run launch", metavar="VARIABLE"
        ),
    ] = []

    # -- output
    out: Annotated[
        _File | None,
        Option(
            "File for the winner; default: runs/NAME/NAME.json.",
            Panel.OUTPUT,
            "run plan",
            metavar="PATH",
            helps={"plan": "File for the DeepSpeed config of the answer."},
        ),
    ] = None
    whole: Annotated[
        bool, Option("Also each way to train; with --json every prediction.", Panel.OUTPUT, "plan", in_python=False)
    ] = False
    as_json: Annotated[bool, Option("Print one JSON object on stdout.", Panel.OUTPUT, in_python=False)] = False
    log_file: Annotated[
        _File | None,
        Option("Append every message to a file, with its time.", Panel.OUTPUT, "run", metavar="FILE", in_python=False),
    ] = None

    # -- trust and protection
    force: Annotated[bool, Option("Resume a study of another job or machine.", Panel.TRUST, "run")] = False
    unprotected: Annotated[
        bool,
        Option(
            "Run your code even if this machine cannot protect your files from its writes.", Panel.TRUST, "run plan"
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, Option("Run code of the model's repository.", Panel.TRUST, "run plan", is_code=True)
    ] = False


class Request(Options):
    """Call of a command: its options, and what no job file has."""

    runs: _File = Path("runs")
    command: str = ""  # the whole command as typed


def request_from(values: Mapping[str, object], shown: Callable[[str], str]) -> Request:
    """Return the request of these values, by field or by flag without dashes.

    Args:
        shown: returns a field's name for messages.

    Raises:
        UserError: a field is unknown or cannot have its value.
    """
    try:
        return Request.model_validate(dict(values))
    except ValidationError as error:
        (name, *_), problem = first_problem(error, Request)
        raise UserError(f"{shown(name)}: {problem}") from None


@contextmanager
def placed_errors(places: Mapping[str, str]) -> Iterator[None]:
    """Replace the flag with which an error of the body of the `with` begins, for options of a job file.

    Args:
        places: `file:line: option` by flag.
    """
    try:
        yield
    except UserError as error:
        flag = str(error).partition(" ")[0].rstrip(":")
        error.replace_text(str(error).replace(flag, places.get(flag, flag), 1))
        raise


class Parameter(NamedTuple):
    """An option as one command has it."""

    name: str  # of the field
    default: Any
    panel: Panel
    help: str
    metavar: str
    option: Option


@cache
def parameters(command: str, *, in_file: bool = False) -> tuple[Parameter, ...]:
    """Return the options of a command in the order of its help: the most used ones first, then by panel.

    Args:
        command: `run`, `plan` or `launch`.
        in_file: the options of its job files, which are some more.
    """
    found = []
    for name, about in Options.model_fields.items():
        option = next(one for one in about.metadata if isinstance(one, Option))
        users = option.commands.split()
        if in_file:
            users += option.in_file.split()
        if command not in users:
            continue
        panel = Panel.FIRST if command in option.first.split() else option.panel
        help = option.helps.get(command, option.help)
        metavar = option.metavars.get(command, option.metavar)
        found.append(Parameter(name, about.default, panel, help, metavar, option))
    return tuple(sorted(found, key=lambda one: [*Panel].index(one.panel)))


def flag_of(name: str) -> str:
    """Return the command-line flag of a field."""
    return f"--{_flag(name)}"


# -- Python API --------------------------------------------------------------------------------------------------------


def request_of(function: str, command: object, options: Mapping[str, object], **known: object) -> Request:
    """Return the Request of a function of the Python API. None keeps a field's default.

    Args:
        function: command that the function is named after in `Option.commands`.
        command: the training script and its arguments.
        known: fields that the function takes as its own parameters.

    Raises:
        UserError: there is no such option, or its field cannot have the value.
    """
    allowed = {one.name for one in parameters(function) if one.option.in_python} | {"runs"}
    for name in options:
        if name not in allowed:
            raise UserError(f"no option {name!r}{did_you_mean(str(name), sorted(allowed))}")
    given = {"script": command, **options, **known}
    values = {name: value for name, value in given.items() if value is not None}
    return request_from(values, lambda name: "command" if name == "script" else name)


_FLAGS_OF_EXPORT = {"--trial": "trial", "--format": "style"}


@contextmanager
def python_errors() -> Iterator[None]:
    """Rename options to parameters in the errors of the body of the `with`, for the Python API.

    Raises:
        BadArgument: the body raised UserError. Other errors keep their type.
    """
    try:
        yield
    except DisplayedError as error:
        names = {flag_of(name): name for name in Options.model_fields} | _FLAGS_OF_EXPORT
        text = re.sub(r"(?<![\w-])--[a-z][a-z-]*", lambda found: names.get(found[0], found[0]), str(error))
        if type(error) in (UserError, ScriptFails):
            raise BadArgument(text) from None
        error.replace_text(text)
        raise
