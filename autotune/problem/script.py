"""A user's own training script: its command line, and the flags that carry a candidate into it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.problem.argument_files import (
    CONFIG_FLAG,
    carries,
    carries_config,
    given,
    is_ds_config,
    launcher_file,
    own_config,
    own_files,
    renamed,
    winners_copy,
)
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, KNOBS, MICRO_BATCH, Candidate, Value, knobs_of
from autotune.problem.command_line import ACCELERATE, DEEPSPEED, TORCHRUN, CommandLine, started, take_apart, with_option
from autotune.problem.ds_file import read_config
from autotune.problem.flag_words import with_flag, with_setting
from autotune.problem.frameworks import FRAMEWORKS, framework_of
from autotune.problem.job import Script
from autotune.problem.script_text import script_text, under_lightning

# Hugging Face's names, in Trainer's arguments and in its examples' own parsers.
KNOWN_FLAGS = {
    MICRO_BATCH: "--per_device_train_batch_size",
    ACCUMULATION: "--gradient_accumulation_steps",
    CHECKPOINTING: "--gradient_checkpointing",
}
LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")  # what the `deepspeed` launcher gives every rank
_NEGATED_FLAGS = tuple(f"--{name}" for one in FRAMEWORKS for name in one.negated.values())
FLAGS = frozenset(
    (*KNOWN_FLAGS.values(), *_NEGATED_FLAGS, CONFIG_FLAG, *LOCAL_RANK_FLAGS)
)  # worth knowing whether a script has them


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
    framework = framework_of(script)
    if framework is not None:
        return sorted(framework.modules)
    text = script.argv[1] if script.path is None else script_text(script) or ""
    words = set(re.findall(r"\w+", text))
    found = {module for name, modules in _HEAVY.items() if name in words for module in modules}
    if found:
        found.add("accelerate")
    return sorted(found)


def settings(script: Script, candidate: Candidate) -> dict[str, Value]:
    """Flag and value for every knob of the candidate that a flag is known for."""
    found: dict[str, Value] = {}
    for knob, value in candidate.told(script):
        flag, negated = _flag_of(script, knob)
        if flag is not None:
            found[flag] = not value if negated else value
    return found


def yes_or_no_flags(script: Script) -> set[str]:
    """The flags of knobs that are on or off."""
    declared = (flag for knob, flag in script.flags if KNOBS[knob].kind is bool)
    return {KNOWN_FLAGS[CHECKPOINTING], *_NEGATED_FLAGS, *declared}


def candidate_of_config(config: dict[str, Any]) -> Candidate:
    """What a DeepSpeed config says, as a Candidate; without a stage it is stage 0."""
    return Candidate.of({"zero_stage": 0, **knobs_of(config)})


def command(script: Script, candidate: Candidate, config: str) -> list[str]:
    """The script's command line for a candidate, with `config` as its DeepSpeed config file, and beside it the copies of its
    argument files.

    Knobs that neither a flag nor a file is known for are not in it; `carried` says whether there are any.
    """
    argv = with_configs(script.argv, Path(script.cwd), lambda path, at: config, script.profile.get("config"))
    flags = _flags(script)
    for file in own_files(script):
        argv[file.at] = renamed(argv[file.at], str(winners_copy(Path(config).resolve(), file)))
    named = config_path(script) is not None and own_config(script) is None
    if not named and not carries_config(script) and CONFIG_FLAG in flags and script.profile.get("through_arguments"):
        argv = with_flag(argv, CONFIG_FLAG, config)
    for knob, value in candidate.told(script):
        flag, negated = _flag_of(script, knob)
        if flag in flags and not (carries(script, knob) and flag not in given(script.argv)):
            argv = with_setting(script, argv, flag, not value if negated else value)
    return argv


def _flag_of(script: Script, knob: str) -> tuple[str | None, bool]:
    """The flag of a knob, and whether it says the opposite."""
    framework = framework_of(script)
    if framework is not None and knob in framework.negated and knob not in dict(script.flags):
        return f"--{framework.negated[knob]}", True
    return {**KNOWN_FLAGS, **dict(script.flags)}.get(knob), False


def carried(script: Script) -> bool:
    """Whether `command` carries every knob of a candidate, so that nothing need be changed in the script's code or files."""
    through = bool(script.profile.get("through_arguments"))
    if config_path(script) is None and not (through and CONFIG_FLAG in _flags(script)):
        launched = line_of(script).kind == ACCELERATE
        if not carries_config(script) and not launched:
            return False
    if script.holds_batch:
        return True
    # a loop of DeepSpeed's has its batch from the config, Trainer from its own arguments, Lightning's a half of it
    theirs = (MICRO_BATCH, ACCUMULATION) if through else (ACCUMULATION,) if under_lightning(script) else ()
    return all(carries_knob(script, knob) for knob in theirs)


def carries_knob(script: Script, knob: str) -> bool:
    """Whether a flag or a file of `command` carries a knob."""
    return _flag_of(script, knob)[0] in _flags(script) or carries(script, knob)


def half_told(script: Script, candidate: Candidate) -> str:
    """What a script computes wrongly of its batch before `prepare` (the length of a learning-rate schedule, as Hugging Face's
    `no_trainer` examples do) where a flag carries the accumulation and its loader alone the micro-batch; empty otherwise."""
    seen = script.profile
    if not seen.get("loader_prepared") or seen.get("through_arguments") or script.holds_batch:
        return ""
    if carries_knob(script, MICRO_BATCH) or not carries_knob(script, ACCUMULATION):
        return ""
    if seen["micro_batch"] == candidate.micro_batch:
        return ""
    return (
        "what the script computes before accelerate prepares its loader (steps of an epoch, the length of a schedule) is of its "
        f"own micro-batch of {seen['micro_batch']} with accumulation {candidate.accumulation}, and it trains on "
        f"{candidate.micro_batch}: tune with --map {MICRO_BATCH}=--FLAG, the flag of its batch size, and both are right"
    )


def _flags(script: Script) -> set[str]:
    """Flags that the script takes: given, declared, or seen in its parser."""
    return given(script.argv) | set(dict(script.flags).values()) | set(script.profile.get("flags", ()))


def line_of(script: Script) -> CommandLine:
    """The script's launcher, taken apart, with the script as its target."""
    line = take_apart([*script.launcher, "script"])
    return dataclasses.replace(line, environment=script.environment, target=script.argv)


def typed(script: Script) -> list[str]:
    """The whole command as it was typed."""
    line = line_of(script)
    return [*(f"{name}={value}" for name, value in script.environment), *started(line, script.launcher, script.argv)]


def training_command(script: Script, candidate: Candidate, ranks: int, config: str) -> list[str]:
    """The command that trains with a candidate without autotune, as the user starts it: the same launcher, told the ranks.

    Args:
        config: the path of the candidate's DeepSpeed config.
    """
    words, line, framework = command(script, candidate, config), line_of(script), framework_of(script)
    if line.kind:
        return started(line, _launcher_words(script, candidate, line, ranks, config), words)
    if _starts_itself(script):
        words = framework.arguments(words, ranks) if framework is not None else words
        return words if script.program is not None else ["python", *words]
    if script.program is not None:
        return [*_TORCHRUN, str(ranks), "--no-python", *words]
    return started(line, _starter(script, ranks, config), words)


RELAUNCHED = "relaunched"  # of a profile: the script starts its ranks itself
_TORCHRUN = ("torchrun", "--nproc-per-node")
_RANKS_OPTION = {TORCHRUN: "--nproc-per-node", DEEPSPEED: "--num_gpus", ACCELERATE: "--num_processes"}


def _starts_itself(script: Script) -> bool:
    """Whether the command starts its ranks itself: it was seen to, or is known to where there are several."""
    known = script.program is not None and framework_of(script) is not None
    return known or bool(script.profile.get(RELAUNCHED))


def variables_for(script: Script, ranks: int) -> dict[str, str]:
    """What stands before `training_command`: what was typed there, and by what a framework is told the ranks."""
    framework = framework_of(script)
    own = framework.environment(ranks) if framework and not script.launcher and _starts_itself(script) else {}
    return {**own, **dict(script.environment)}


def _launcher_words(script: Script, candidate: Candidate, line: CommandLine, ranks: int, config: str) -> list[str]:
    """The typed launcher's words, with the number of ranks and the winner's config in them."""
    file = launcher_file(script)
    named = next((one.data.get("num_processes") for one in script.files if one.launcher), None)
    wanted: dict[str, str] = {}
    if ranks not in (line.ranks, named if line.ranks is None else None) and "include" not in line.options:
        option, value = _deepspeed_ranks(ranks) if line.kind == DEEPSPEED else (_RANKS_OPTION[line.kind], str(ranks))
        wanted[option] = value
    elsewhere = CONFIG_FLAG in given(script.argv) or carries_config(script)
    if file is not None:
        wanted["--config_file"] = str(winners_copy(Path(config).resolve(), file))
        if (precision := file.data.get("mixed_precision", "no")) != "no" and "mixed_precision" not in line.options:
            wanted["--mixed_precision"] = str(precision)
    elif line.kind == ACCELERATE and not elsewhere:
        wanted["--deepspeed_config_file"] = config
        if "use_deepspeed" not in line.options:
            line = dataclasses.replace(line, launcher=(*line.launcher, "--use_deepspeed"))
    known = {**(file.data.get("deepspeed_config") or {} if file else {}), **line.options}
    if line.kind == ACCELERATE and ACCUMULATION in known and not script.holds_batch:
        wanted[f"--{ACCUMULATION}"] = str(candidate.accumulation)
    for name, value in wanted.items():
        line = dataclasses.replace(line, launcher=tuple(with_option(line, name, value)))
    return list(line.launcher)


def _deepspeed_ranks(ranks: int) -> tuple[str, str]:
    """The option of DeepSpeed's launcher for so many ranks: with `--num_gpus` it would not look at CUDA_VISIBLE_DEVICES and take
    the first (deepspeed 0.19.8, launcher/runner.py)."""
    shown = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if len(shown) >= ranks and all(one.isdigit() for one in shown):
        return "--include", f"localhost:{','.join(shown[:ranks])}"
    return _RANKS_OPTION[DEEPSPEED], str(ranks)


def _starter(script: Script, ranks: int, config: str) -> list[str]:
    """The launcher for a script that was typed without one."""
    if script.ds_config is None:
        if not script.profile.get("through_arguments") and set(LOCAL_RANK_FLAGS) & set(script.profile.get("flags", ())):
            return ["deepspeed", *_deepspeed_ranks(ranks)]
        return [*_TORCHRUN, str(ranks)]
    return ["accelerate", "launch", "--use_deepspeed", "--deepspeed_config_file", config, "--num_processes", str(ranks)]


def config_path(script: Script) -> Path | None:
    """The DeepSpeed config file that the command names; None where the config stands elsewhere."""
    if script.ds_config is not None:
        return Path(script.ds_config)
    found = _config_files(script.argv, Path(script.cwd), script.profile.get("config"))
    named = next((path for _, _, path in found), None)
    inside = own_config(script) if named is None else None
    return inside if isinstance(inside, Path) else named


def _config_files(argv: Sequence[str], cwd: Path, own: dict[str, Any] | None) -> list[tuple[int, str, Path]]:
    """(index of the argument, prefix like `--config=` or nothing, path) of every DeepSpeed config file in the arguments; of
    several files only the one that holds the script's `own` config, where that is known: others are of other engines."""
    found = []
    for at, word in enumerate(argv):
        head, equals, value = word.partition("=")
        path = cwd / (value if equals else word)
        if is_ds_config(path):
            found.append((at, f"{head}=" if equals else "", path))
    paths = dict.fromkeys(path for _, _, path in found)
    if own is None or len(paths) < 2:
        return found
    read = next((path for path in paths if read_config(path) == own), None)
    return [one for one in found if one[2] == read]


def several_configs(script: Script) -> bool:
    """Whether the command names more than one DeepSpeed config file."""
    return len({path for _, _, path in _config_files(script.argv, Path(script.cwd), None)}) > 1


def with_configs(
    argv: Sequence[str], cwd: Path, renamed: Callable[[Path, int], str], own: dict[str, Any] | None = None
) -> list[str]:
    """The arguments with every DeepSpeed config file that the first engine reads replaced by `renamed(path, index of the
    argument)`.

    Args:
        own: what that file holds, where it is known; None takes every one.
    """
    found = list(argv)
    for at, head, path in _config_files(argv, cwd, own):
        found[at] = head + renamed(path, at)
    return found
