"""A user's own training script: its command line, and the flags that carry a candidate into it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UserError, near
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, KNOBS, MICRO_BATCH, Candidate, Value, knobs_of
from autotune.problem.job import Script

# Hugging Face's names, in Trainer's arguments and in its examples' own parsers.
KNOWN_FLAGS = {
    MICRO_BATCH: "--per_device_train_batch_size",
    ACCUMULATION: "--gradient_accumulation_steps",
    CHECKPOINTING: "--gradient_checkpointing",
}
CONFIG_FLAG = "--deepspeed"  # of Hugging Face's parsers: the config's file
LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")  # what the `deepspeed` launcher gives every rank
FLAGS = frozenset((*KNOWN_FLAGS.values(), CONFIG_FLAG, *LOCAL_RANK_FLAGS))  # worth knowing whether a script has them
_LAUNCHERS = {"deepspeed", "torchrun", "accelerate", "mpirun", "srun"}
# One of these at the top makes a JSON file a DeepSpeed config.
_DS_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


# Imports of seconds that a fork server pays once for all trials, where a script's text speaks of them.
_HEAVY = {
    "transformers": ("transformers.trainer", "transformers.training_args"),
    "trl": ("trl", "transformers.trainer"),
    "accelerate": ("accelerate",),
    "datasets": ("datasets",),
    "peft": ("peft",),
}


def heavy_imports(script: Script) -> list[str]:
    """Modules that the script will import, of those that are worth importing beforehand."""
    text = script.argv[1] if script.path is None else ""
    if script.path is not None and script.path.is_file():
        text = script.path.read_text(errors="replace")
    words = set(re.findall(r"\w+", text))
    found = {module for name, modules in _HEAVY.items() if name in words for module in modules}
    if found:
        found.add("accelerate")
    return sorted(found)


def settings(script: Script, candidate: Candidate) -> dict[str, Value]:
    """Flag and value for every knob of the candidate that a flag is known for."""
    flags = {**KNOWN_FLAGS, **dict(script.flags)}
    return {flags[name]: value for name, value in candidate.knobs if name in flags}


def candidate_of_config(config: dict[str, Any]) -> Candidate:
    """What a DeepSpeed config says, as a Candidate; without a stage it is stage 0."""
    return Candidate.of({"zero_stage": 0, **knobs_of(config)})


def command(script: Script, candidate: Candidate, config: str) -> list[str]:
    """The script's command line for a candidate, with `config` as its DeepSpeed config file.

    Knobs that no flag is known for are not in it; `carried` says whether there are any.
    """
    argv = with_configs(script.argv, Path(script.cwd), lambda path, at: config)
    flags = _flags(script)
    if argv == list(script.argv) and CONFIG_FLAG in flags and script.profile.get("through_arguments"):
        argv = with_flag(argv, CONFIG_FLAG, config)
    for flag, setting in settings(script, candidate).items():
        if flag in flags:
            argv = with_flag(argv, flag, setting)
    return argv


def carried(script: Script) -> bool:
    """Whether `command` carries every knob of a candidate, so that nothing need be changed in the script's code or files."""
    flags, through = {**KNOWN_FLAGS, **dict(script.flags)}, bool(script.profile.get("through_arguments"))
    if config_path(script) is None and not (through and CONFIG_FLAG in _flags(script)):
        return False
    # a loop of DeepSpeed's has its batch from the config, Trainer from its own arguments
    return not through or {flags[MICRO_BATCH], flags[ACCUMULATION]} <= _flags(script)


def _flags(script: Script) -> set[str]:
    """Flags that the script takes: given, declared, or seen in its parser."""
    given = {word.partition("=")[0] for word in script.argv}
    return given | set(dict(script.flags).values()) | set(script.profile.get("flags", ()))


def make_script(command: list[str], maps: list[str], worst_case: bool = False, ds_config: Path | None = None) -> Script:
    """The script of a command line.

    Raises:
        UserError: it is no Python script, or a mapping is none.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words:
        raise UserError("no script after `--`: expected `autotune run … -- train.py its arguments`")
    if words[0] in _LAUNCHERS:
        raise UserError(f"`-- {words[0]} …`: give the script itself; autotune starts the ranks (like `-- train.py …`)")
    if words[0] == "-m":
        if len(words) < 2:
            raise UserError("`-- -m`: expected a module's name after it")
    else:
        path = Path(words[0])
        if not path.is_file() and shutil.which(words[0]):
            raise UserError(
                f"`-- {words[0]} …`: a command, no script: give what it starts, like `-- train.py …` or "
                "`-- -m trl.scripts.sft …`"
            )
        if not path.is_file():
            raise UserError(f"no script {words[0]}: expected a Python file, or `-m` and a module")
        if b"\0" in path.read_bytes()[:4096]:
            raise UserError(f"{words[0]} is no Python script: give the training's .py file")
    if ds_config is not None and not is_ds_config(ds_config):
        raise UserError(f"--ds-config {ds_config}: expected a DeepSpeed config JSON")
    own = str(ds_config.resolve()) if ds_config is not None else None
    return Script(tuple(words), os.getcwd(), tuple(_mapping(text) for text in maps), worst_case, own)


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


def starter(script: Script, ranks: int, config: str) -> list[str]:
    """The launcher's command line that starts the script's ranks without autotune."""
    if script.ds_config is None:
        if not script.profile.get("through_arguments") and set(LOCAL_RANK_FLAGS) & set(script.profile.get("flags", ())):
            return ["deepspeed", "--num_gpus", str(ranks)]
        return ["torchrun", "--nproc-per-node", str(ranks)]
    return ["accelerate", "launch", "--use_deepspeed", "--deepspeed_config_file", config, "--num_processes", str(ranks)]


def is_ds_config(path: Path) -> bool:
    """Whether the file is a DeepSpeed config."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and not _DS_KEYS.isdisjoint(data)


def config_path(script: Script) -> Path | None:
    """The DeepSpeed config file that the command names; None where the config stands elsewhere."""
    if script.ds_config is not None:
        return Path(script.ds_config)
    return next((path for _, _, path in _config_files(script.argv, Path(script.cwd))), None)


def _config_files(argv: Sequence[str], cwd: Path) -> Iterator[tuple[int, str, Path]]:
    """(index of the argument, prefix like `--config=` or nothing, path) of every DeepSpeed config file in the arguments."""
    for at, word in enumerate(argv):
        head, equals, value = word.partition("=")
        path = cwd / (value if equals else word)
        if is_ds_config(path):
            yield at, f"{head}=" if equals else "", path


def with_configs(argv: Sequence[str], cwd: Path, renamed: Callable[[Path, int], str]) -> list[str]:
    """The arguments with every DeepSpeed config file replaced by `renamed(path, index of the argument)`."""
    found = list(argv)
    for at, head, path in _config_files(argv, cwd):
        found[at] = head + renamed(path, at)
    return found


def with_flag(argv: list[str], flag: str, value: Value) -> list[str]:
    """The arguments with the flag set to this value: in place where it is given, else at the end.

    A flag without dashes is an argument `name=value`, as Hydra and OmegaConf read it.
    """
    found = list(argv)
    for at, word in enumerate(found):
        if not flag.startswith("-"):
            name, equals, _ = word.partition("=")
            if equals and name.lstrip("+") == flag:
                found[at] = f"{name}={value}"
                return found
            continue
        if word == flag:
            if at + 1 < len(found) and not found[at + 1].startswith("--"):
                found[at + 1] = str(value)
                return found
            found[at] = f"{flag}={value}"
            return found
        if word.startswith(flag + "="):
            found[at] = f"{flag}={value}"
            return found
    return [*found, *([flag, str(value)] if flag.startswith("-") else [f"{flag}={value}"])]
