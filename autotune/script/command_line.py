"""Split of a command line into variables, launcher and target."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.candidate import CHECKPOINTING
from autotune.problem.job import Script
from autotune.util.bounds import MOST, MOST_RANKS, whole_number

# -- command line ------------------------------------------------------------------------------------------------------
#
# Parser of a training's command line: variables in front, the launcher with its options, and the launcher's target.
#
# Only the standard library is imported: the parent parses the typed command, and a rank parses the command with which a
# framework restarts itself.

TORCHRUN, DEEPSPEED, ACCELERATE = "torchrun", "deepspeed", "accelerate"
_DEEPSPEED_NODE = "deepspeed.launcher.launch"  # module that `deepspeed` starts on each machine
PROGRAMS = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED, "ds": DEEPSPEED, "accelerate-launch": ACCELERATE}
MODULES = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
    "accelerate.commands.launch": ACCELERATE,
    "deepspeed.launcher.runner": DEEPSPEED,
    _DEEPSPEED_NODE: DEEPSPEED,
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options without a value, with `-` written as `_`: torch 2.13's distributed/run.py (and `use_env` of launch.py), deepspeed 0.19's
# launcher/runner.py and launch.py, accelerate 1.15's commands/launch.py. `tests/script/test_command_line.py` compares them with
# the installed versions.
_SWITCHES = {
    TORCHRUN: _names("standalone module no_python run_path virtual_local_rank use_env help version"),
    DEEPSPEED: _names(
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank quiet help"
    ),
    ACCELERATE: _names(
        "quiet cpu multi_gpu tpu ipex use_mps_device use_xpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic "
        "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network module "
        "no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16 fp8_use_autocast_during_eval debug help"
    ),
}
_READ = {  # options with a value that this module reads
    TORCHRUN: ("nproc_per_node", "nnodes"),
    DEEPSPEED: ("num_gpus", "num_accelerators", "num_nodes", "include", "exclude", "hostfile", "world_info"),
    ACCELERATE: ("num_processes", "num_machines", "config_file", "deepspeed_config_file", "gpu_ids"),
}
_SHORT = {
    TORCHRUN: {"m": "module", "r": "redirects", "t": "tee", "h": "help"},
    DEEPSPEED: {"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet", "h": "help"},
    ACCELERATE: {"m": "module", "q": "quiet", "t": "tee", "h": "help"},
}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?$")
_PYTHON_VALUED = ("-X", "-W", "--check-hash-based-pycs")
_WHOLE_MACHINE = ("gpu", "cpu", "xpu", "auto", "all")


@dataclass(frozen=True)
class CommandLine:
    """One command that starts a training."""

    environment: tuple[tuple[str, str], ...]  # NAME=value, typed before the command
    launcher: tuple[str, ...]  # the launcher and its options but for `-m`; empty if there is none
    kind: str  # TORCHRUN, DEEPSPEED, ACCELERATE, or empty
    target: tuple[str, ...]  # a file or `-m` and a module, then its arguments
    options: Mapping[str, str] = field(default_factory=dict)  # of the launcher; `-` written as `_`, no dashes in front
    python: bool = False  # Python runs the target: by an option of the launcher, or by `python` in front of it
    head: int = 0  # words of `launcher` before its options

    @property
    def ranks(self) -> int | None:
        """The launcher's ranks on this machine; None if it has no such option or takes all devices.

        Raises:
            UserError: the option's value is not a number.
        """
        if "include" in self.options and self.kind == DEEPSPEED:
            return len(self.gpus.split(",")) if self.gpus else None
        name = next((name for name in _RANKS.get(self.kind, ()) if name in self.options), None)
        if name is None or self.options[name] in (*_WHOLE_MACHINE, "-1"):
            return None
        return whole_number(self.options[name], f"{self.launcher[0]}: --{name}", 1, MOST_RANKS)

    @property
    def gpus(self) -> str | None:
        """The GPUs that the launcher shows its ranks, as in CUDA_VISIBLE_DEVICES; None: the launcher does not change them."""
        if self.kind == DEEPSPEED:
            return self.options.get("include", "").partition(":")[2] or None
        if self.kind == ACCELERATE and self.options.get("gpu_ids", "all") != "all":
            return self.options["gpu_ids"]
        return None

    @property
    def gives_local_rank(self) -> bool:
        """True if the launcher puts `--local_rank=N` before the script's arguments."""
        return self.kind == DEEPSPEED and "no_local_rank" not in self.options


_RANKS = {TORCHRUN: ("nproc_per_node",), DEEPSPEED: ("num_gpus", "num_accelerators"), ACCELERATE: ("num_processes",)}


def take_apart(words: Sequence[str]) -> CommandLine:
    """Parse a command line, split into words as a shell does.

    Raises:
        UserError: the command starts nothing, an option has no value, or it spans machines.
    """
    environment, rest = _assignments(list(words))
    rest, python = _without_python(rest)
    head, kind = _launcher(rest, python)
    if not kind:
        return CommandLine(environment, (), "", tuple(rest), python=python)
    options, given, target = _options(kind, rest[head:])
    launcher = [*rest[:head], *given]
    if python and rest[0] == "-m":
        launcher = ["python", *launcher]
        head += 1
    if not target:
        raise UserError(f"`-- {' '.join(launcher)}`: no script after the launcher's options")
    _one_machine(kind, launcher[0], options)
    if "module" in options:
        target = ["-m", *target]
    return CommandLine(
        environment, tuple(launcher), kind, tuple(target), options, python="no_python" not in options, head=head
    )


def with_options(line: CommandLine, wanted: Mapping[str, str]) -> list[str]:
    """Return the launcher's words with these options set.

    Every occurrence is replaced, since the launcher takes the last; a missing option is appended.

    Args:
        wanted: values by name as typed, like `--nproc-per-node`.
    """
    words, left = list(line.launcher), dict(wanted)
    names = {_canonical(line.kind, name): name for name in wanted}
    for key, at, end in _walk(line.kind, line.launcher, line.head):
        if key in names:
            given, equals, _ = words[at].partition("=")
            value = wanted[names[key]]
            words[at:end] = [f"{given}={value}"] if equals else [given, value]
            left.pop(names[key], None)
    return [*words, *(word for option in left.items() for word in option)]


def _walk(kind: str, words: Sequence[str], at: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield each of a launcher's options: its name, the index of its first word, and the index after its last word."""
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        given, equals, _ = words[at].partition("=")
        key = _canonical(kind, given)
        end = at + 1 + (not equals and key not in _SWITCHES[kind])
        yield key, at, end
        at = end


def launcher_command(line: CommandLine, launcher: Sequence[str], target: Sequence[str]) -> list[str]:
    """Return the whole command, from a launcher's words and a target (a file, or `-m` and a module, then its arguments)."""
    spelt_out = line.kind == DEEPSPEED and target[0] == "-m"
    return [*launcher, *(["--module", *target[1:]] if spelt_out else target)]


def _assignments(words: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    if words[:1] == ["env"]:
        words = words[1:]
    count = next((at for at, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    pairs = (word.partition("=") for word in words[:count])
    return tuple((name, value) for name, _, value in pairs), words[count:]


def _without_python(words: list[str]) -> tuple[list[str], bool]:
    """Return the words after `python` and its own options, and whether the command began with `python`."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return words, False
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _PYTHON_VALUED else 1
    return words[at:], True


def _launcher(words: list[str], python: bool) -> tuple[int, str]:
    """Return the number of words that name the launcher, and its kind."""
    if not words:
        return 0, ""
    if words[0] == "-m" and len(words) > 1 and python:
        if words[1] == "accelerate.commands.accelerate_cli" and words[2:3] == ["launch"]:
            return 3, ACCELERATE
        return (2, MODULES[words[1]]) if words[1] in MODULES else (0, "")
    name = Path(words[0]).name
    if name == "accelerate" and words[1:2] == ["launch"]:
        return 2, ACCELERATE
    return (1, PROGRAMS[name]) if name in PROGRAMS else (0, "")


def _options(kind: str, words: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the launcher's options, their words but for `-m`, and the words after them."""
    found: dict[str, str] = {}
    given: list[str] = []
    end = 0
    for key, at, end in _walk(kind, words):
        name, equals, value = words[at].partition("=")
        if end > len(words):
            raise UserError(f"`-- {kind} … {name}`: expected a value after it")
        found[key] = value if equals else "".join(words[at + 1 : end])
        given += words[at:end] if key != "module" else []
    return found, given, words[end + (words[end : end + 1] == ["--"]) :]


def _canonical(kind: str, name: str) -> str:
    """Return `nproc_per_node` for `--nproc-per-node`, `--nproc_per_node` and `--nproc` (argparse accepts prefixes)."""
    if not name.startswith("--"):
        return _SHORT[kind].get(name[1:], name[1:])
    key = name[2:].replace("-", "_")
    known = {*_SWITCHES[kind], *_READ[kind]}
    begun = [one for one in known if one.startswith(key)]
    return begun[0] if key not in known and len(begun) == 1 else key


def _one_machine(kind: str, launcher: str, options: Mapping[str, str]) -> None:
    """Raise UserError if the ranks are spread over several machines."""
    nodes = {TORCHRUN: "nnodes", DEEPSPEED: "num_nodes", ACCELERATE: "num_machines"}[kind]
    most = options.get(nodes, "1").rpartition(":")[2]
    if most.lstrip("-").isdecimal() and whole_number(most, f"{launcher} --{nodes}", -MOST) > 1:
        raise UserError(several_nodes(f"{launcher} --{nodes} {options[nodes]}"))
    if kind != DEEPSPEED:
        return
    hosts = options.get("include", "").split("@")
    if len(hosts) > 1 or hosts[0].partition(":")[0] not in ("", "localhost", "127.0.0.1"):
        raise UserError(several_nodes(f"{launcher} --include {options['include']}"))
    if options.get("exclude"):
        raise UserError(
            f"{launcher} --exclude {options['exclude']}: name the GPUs that are meant, like --include localhost:1,2,3"
        )
    hostfile = Path(options.get("hostfile") or "/dev/null")
    if os.path.isfile(hostfile):
        count = len(re.findall(r"^[ \t]*[^#\s]", hostfile.read_text(encoding="utf-8"), re.MULTILINE))
        if count > 1:
            raise UserError(several_nodes(f"{launcher} --hostfile {hostfile} ({count} hosts)"))


def several_nodes(what: str) -> str:
    """Return the error for a command that trains on several nodes."""
    return f"{what}: trainings over several nodes are autotune's to start: give it --hostfile FILE, and a command for one machine"


# -- frameworks --------------------------------------------------------------------------------------------------------
#
# Frameworks whose own command starts the ranks: how each receives their number, and how its files name a knob.
#
# This table does not list what a framework does inside its ranks. A rank runs the framework's command and takes over at
# the point that would start other processes (`rank/hooks/launchers.py`).


@dataclass(frozen=True)
class Framework:
    """Command of one framework."""

    package: str  # name on PyPI
    packages: tuple[str, ...]  # names of its Python packages
    programs: tuple[str, ...]
    modules: tuple[str, ...]  # imported once for all trials, to save time
    variables: dict[str, str] = field(default_factory=dict)  # variables that make it start RANKS ranks
    words: tuple[str, ...] = ()  # words at the end of its command with the same effect
    separated: bool = False  # put `--` before these words
    superseded: str = (
        ""  # argument that names a launcher's config with DeepSpeed in it, which would contradict the winner's
    )
    negated: dict[str, str] = field(default_factory=dict)  # knob -> name of the setting that switches it off

    def environment(self, ranks: int) -> dict[str, str]:
        """Return the framework's environment variables for a number of ranks."""
        return {name: value.replace("RANKS", str(ranks)) for name, value in self.variables.items()}

    def arguments(self, argv: Sequence[str], ranks: int) -> list[str]:
        """Return the command's words, changed so that it starts `ranks` ranks with DeepSpeed."""
        words = list(argv)
        if self.superseded and (flag := f"--{self.superseded}") in words:
            del words[words.index(flag) : words.index(flag) + 2]
        given = any(word.partition("=")[0] in RANKS_OPTIONS for word in words)
        added = [word.replace("RANKS", str(ranks)) for word in self.words if not given or word == "--use_deepspeed"]
        if any(word in words for word in ("--use_deepspeed", "--launcher")):
            added = [word for word in added if word != "--use_deepspeed"]
        return [*words, *(["--"] if self.separated and "--" not in words and added else []), *added]


# options of a framework's own command
RANKS_OPTIONS = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
# accelerate is the only launcher of these that also starts CPU ranks
_BY_ACCELERATE = ("--use_deepspeed", "--num_processes", "RANKS")
_TRAINER = ("transformers.trainer", "transformers.training_args", "accelerate", "datasets", "peft")

# llamafactory 0.9.5 launcher.py, ms-swift 4.6.0 swift/cli/main.py, axolotl 0.19.0 axolotl/cli/utils/train.py, trl 1.16
# trl/cli/commands/training.py
FRAMEWORKS = (
    Framework(
        "llamafactory",
        ("llamafactory",),
        ("llamafactory-cli", "lmf"),
        (*_TRAINER, "trl"),
        variables={"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "RANKS"},
        negated={CHECKPOINTING: "disable_gradient_checkpointing"},
    ),
    Framework("ms-swift", ("swift",), ("swift",), (*_TRAINER, "trl"), variables={"NPROC_PER_NODE": "RANKS"}),
    Framework("axolotl", ("axolotl",), ("axolotl",), (*_TRAINER, "trl"), words=_BY_ACCELERATE, separated=True),
    Framework("trl", ("trl",), ("trl",), (*_TRAINER, "trl"), words=_BY_ACCELERATE, superseded="accelerate_config"),
)


def framework_of(script: Script) -> Framework | None:
    """Return the framework whose command or module the script is, or None."""
    if script.program is not None:
        return next((one for one in FRAMEWORKS if Path(script.program).name in one.programs), None)
    top = script.target.partition(".")[0] if script.is_module else ""
    return next((one for one in FRAMEWORKS if top in one.packages), None)
