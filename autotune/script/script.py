"""The user's script: flags that carry knobs, and its command under a candidate."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.problem.candidate import ACCUMULATION, KNOBS, MICRO_BATCH, RUNG_KNOBS, Candidate, Value, knobs_of
from autotune.problem.ds_config import read_config
from autotune.problem.job import Script, script_text, under_lightning
from autotune.script.argument_files import (
    CONFIG_FLAG,
    CONFIG_SUFFIXES,
    argument_names,
    carries_config,
    is_ds_config,
    launcher_data,
    launcher_file,
    own_config,
    own_files,
    renamed,
    typed_values,
    winners_copy,
)
from autotune.script.carriers import (
    KNOWN_FLAGS,
    STEP,
    can_set_knob,
    carried,
    carrier_of,
    declared_places,
    own_numbers,
    settings,
)
from autotune.script.command_line import (
    ACCELERATE,
    DEEPSPEED,
    FRAMEWORKS,
    TORCHRUN,
    CommandLine,
    framework_of,
    launcher_command,
    take_apart,
    with_options,
)
from autotune.script.environment import VARIABLE, to_set

# -- script ------------------------------------------------------------------------------------------------------------
#
# User's own training script: its command line, and the flags that carry a candidate into it.

LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")  # flags that the `deepspeed` launcher passes to every rank
_NEGATED_FLAGS = tuple(f"--{name}" for one in FRAMEWORKS for name in one.negated.values())
# flags to look for in the script's parser
FLAGS = frozenset((*KNOWN_FLAGS.values(), *_NEGATED_FLAGS, CONFIG_FLAG, *LOCAL_RANK_FLAGS))


# Slow imports (seconds) that the fork server does once for all trials, if the script's text mentions the package.
_HEAVY = {
    "transformers": ("transformers.models.auto.modeling_auto",),
    "trl": ("trl", "transformers.trainer"),
    "accelerate": ("accelerate",),
    "datasets": ("datasets",),
    "peft": ("peft",),
}
# Only for a script with a Trainer: this imports `datasets` and pyarrow, whose allocator reserves 1 GiB. That counts as memory of
# a CPU rank.
_OF_TRAINER = ("transformers.trainer", "transformers.training_args")


def heavy_imports(script: Script) -> list[str]:
    """Return the slow modules that the script will import, for the fork server."""
    framework = framework_of(script)
    if framework:
        return sorted(framework.modules)
    text = script.argv[1] if script.path is None else script_text(script) or ""
    words = set(re.findall(r"\w+", text))
    found = {module for name, modules in _HEAVY.items() if name in words for module in modules}
    if "transformers" in words and any(word.endswith(("Trainer", "TrainingArguments")) for word in words):
        found.update(_OF_TRAINER)
    if found:
        found.add("accelerate")
    return sorted(found)


def yes_or_no_flags(script: Script) -> set[str]:
    """Return the flags of boolean knobs."""
    known = (*KNOWN_FLAGS.items(), *script.flags)
    return {*_NEGATED_FLAGS, *(flag for knob, flag in known if knob in KNOBS and KNOBS[knob].is_switch)}


def candidate_of_config(config: dict[str, Any]) -> Candidate:
    """Return a DeepSpeed config as a Candidate; without a stage it is stage 0."""
    return Candidate.of({"zero_stage": 0, **knobs_of(config)})


def command(script: Script, candidate: Candidate, config: str) -> list[str]:
    """Return the script's command line for a candidate.

    The command names `config` as the DeepSpeed config file, and the copies of the argument files next to it. Knobs without a
    known flag or file are not in it; `command_sets_all` reports whether there are any.
    """
    argv = with_configs(script.argv, Path(script.cwd), lambda path, at: config, script.profile.config)
    flags = _flags(script)
    for file in own_files(script):
        argv[file.at] = renamed(argv[file.at], str(winners_copy(Path(config).resolve(), file)))
    named = config_path(script) is not None or carries_config(script)
    if not named and CONFIG_FLAG in flags and script.profile.through_arguments:
        argv = with_flag(argv, CONFIG_FLAG, config)
    return with_values(script, argv, candidate, flags)


def with_values(script: Script, argv: list[str], candidate: Candidate, flags: Set[str]) -> list[str]:
    """Return the arguments with a candidate's values in those of the flags that carry them. A typed flag overrides a file."""
    typed = argument_names(script.argv)
    for knob, place, value in carried(script, candidate):
        is_word = place in flags and not place.startswith(VARIABLE)
        if is_word and (place in typed or not can_set_knob(script, knob)):
            argv = with_flag(argv, place, value, script.profile.spellings.get(place))
    return argv


def command_names_config(script: Script) -> bool:
    """Check that `command`, or accelerate's launcher in front of it, names the winner's config."""
    through = script.profile.through_arguments and CONFIG_FLAG in _flags(script)
    named = config_path(script) is not None or through or carries_config(script)
    return named or line_of(script).kind == ACCELERATE


def command_sets_all(script: Script) -> bool:
    """Check that `command` carries every knob of a candidate, so that the script's code and files need no change."""
    through = script.profile.through_arguments
    if not command_names_config(script):
        return False
    if script.holds_batch:
        return True
    # DeepSpeed's loop takes its batch from the config, Trainer from its own arguments, and Lightning only the accumulation.
    theirs = (MICRO_BATCH, ACCUMULATION) if through else (ACCUMULATION,) if under_lightning(script) else ()
    return all(carries_knob(script, knob) for knob in theirs)


def carries_knob(script: Script, knob: str) -> bool:
    """Check that a flag or a file of `command` carries a knob, or that the script computes it from a whole step."""
    computed = knob in RUNG_KNOBS and _has_place(script, STEP) and any(_has_place(script, one) for one in RUNG_KNOBS)
    return computed or _has_place(script, knob)


def _has_place(script: Script, knob: str) -> bool:
    place = carrier_of(script, knob).place
    return bool(place) and (place in _flags(script) or can_set_knob(script, knob))


def wrong_batch_warning(script: Script, candidate: Candidate) -> str:
    """Return a warning if a script computes from a wrong batch before `prepare`; empty otherwise.

    An example is the length of a learning-rate schedule in Hugging Face's `no_trainer` examples. The case occurs if a flag
    carries the accumulation, but only the loader carries the micro-batch.
    """
    seen = script.profile
    if not seen.loader_prepared or seen.through_arguments or script.holds_batch:
        return ""
    if carries_knob(script, MICRO_BATCH) or not carries_knob(script, ACCUMULATION):
        return ""
    if seen.micro_batch == candidate.micro_batch:
        return ""
    return (
        "what the script computes before accelerate prepares its loader (steps of an epoch, the length of a schedule) is of its "
        f"own micro-batch of {seen.micro_batch} with accumulation {candidate.accumulation}, and it trains on "
        f"{candidate.micro_batch}: tune with --map {MICRO_BATCH}=--FLAG, the flag of its batch size, and both are right"
    )


def _flags(script: Script) -> set[str]:
    """Return the flags that the script accepts: given, declared, or seen in its parser."""
    return {*argument_names(script.argv), *declared_places(script).values(), *script.profile.flags}


def line_of(script: Script) -> CommandLine:
    """Return the script's parsed launcher, with the script as its target."""
    line = take_apart([*script.launcher, "script"])
    return replace(line, environment=script.environment, target=script.argv)


def typed_words(script: Script) -> list[str]:
    """Return the whole command as typed, with the variables in front that the script has read.

    Flags that were found to carry the batch are in it too: a study supplies no flag that is not typed.
    """
    line, argv = line_of(script), list(script.argv)
    variables = {**to_set(script.profile.environment), **dict(script.environment)}
    for knob, place in script.profile.found_flags.items():
        if place.startswith("-") and place not in argument_names(argv):
            times = script.profile.flag_times.get(knob, 1)
            argv = with_flag(argv, place, own_numbers(script.profile)[knob] * times)
    return [*(f"{name}={value}" for name, value in variables.items()), *launcher_command(line, script.launcher, argv)]


def training_command(script: Script, candidate: Candidate, ranks: int, config: str) -> list[str]:
    """Return the command that trains with a candidate without autotune: the user's own launcher, with the number of ranks.

    Args:
        config: the path of the candidate's DeepSpeed config.
    """
    words, framework = command(script, candidate, config), framework_of(script)
    if not script.launcher and _starts_itself(script):
        words = framework.arguments(words, ranks) if framework else words
        return words if script.program is not None else ["python", *words]
    line = line_of(replace(script, launcher=script.launcher or _starter(script)))
    return launcher_command(line, _launcher_words(script, candidate, line, ranks, config), words)


_RANKS_OPTION = {TORCHRUN: "--nproc-per-node", DEEPSPEED: "--num_gpus", ACCELERATE: "--num_processes"}


def _starts_itself(script: Script) -> bool:
    """Check that the command starts its ranks itself: the probe run showed it, or the framework is known to."""
    known = script.program is not None and framework_of(script) is not None
    return known or bool(script.profile.relaunched)


def read_variables(script: Script, candidate: Candidate) -> dict[str, str]:
    """Return the variables that the script reads, with the values of a candidate in those that carry its knobs."""
    found = to_set(script.profile.environment)
    for place, value in settings(script, candidate).items():
        if place.startswith(VARIABLE):
            found[place.removeprefix(VARIABLE)] = str(value)
    return found


def variables_for(script: Script, candidate: Candidate, ranks: int) -> dict[str, str]:
    """Return the variables in front of `training_command`: typed or read ones, and those that pass the ranks to a framework."""
    framework = framework_of(script)
    own = framework.environment(ranks) if framework and not script.launcher and _starts_itself(script) else {}
    return {**own, **dict(script.environment), **read_variables(script, candidate)}


def _launcher_words(script: Script, candidate: Candidate, line: CommandLine, ranks: int, config: str) -> list[str]:
    """Return the launcher's words as typed, with the number of ranks and the winner's config inserted."""
    file, wanted = launcher_file(script), dict[str, str]()
    given_ranks = line.ranks or launcher_data(script.files).get("num_processes")
    if ranks != given_ranks and "include" not in line.options:
        shown = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        if line.kind == DEEPSPEED and len(shown) >= ranks and all(one.isdigit() for one in shown):
            # With `--num_gpus` it ignores this variable and takes the first GPUs (deepspeed 0.19.8, launcher/runner.py).
            wanted["--include"] = f"localhost:{','.join(shown[:ranks])}"
        else:
            wanted[_RANKS_OPTION[line.kind]] = str(ranks)
    inside = CONFIG_FLAG in argument_names(script.argv) or carries_config(script)
    if file is not None:
        wanted["--config_file"] = str(winners_copy(Path(config).resolve(), file))
        if (precision := file.data.get("mixed_precision", "no")) != "no" and "mixed_precision" not in line.options:
            wanted["--mixed_precision"] = str(precision)
    elif line.kind == ACCELERATE and (script.ds_config or not inside):  # `--deepspeed` may be a switch
        wanted["--deepspeed_config_file"] = config
    known = {**(file.data.get("deepspeed_config") or {} if file else {}), **line.options}
    if line.kind == ACCELERATE and ACCUMULATION in known and not script.holds_batch:
        wanted[f"--{ACCUMULATION}"] = str(candidate.engine_batch(script.profile)[1])
    switched = "--deepspeed_config_file" in wanted and "use_deepspeed" not in line.options
    return [*with_options(line, wanted), *(["--use_deepspeed"] if switched else [])]


def _starter(script: Script) -> tuple[str, ...]:
    """Return the launcher for a script that was typed without one."""
    if script.program is not None:
        return ("torchrun", "--no-python")
    if script.ds_config is not None:
        return ("accelerate", "launch")
    takes_rank = not set(LOCAL_RANK_FLAGS).isdisjoint(script.profile.flags)
    return ("deepspeed",) if takes_rank and not script.profile.through_arguments else ("torchrun",)


# flags of DeepSpeed, transformers and accelerate whose value is a DeepSpeed config file
_CONFIG_FLAGS = (CONFIG_FLAG, "--deepspeed_config", "--deepspeed_config_file", "--deepscale_config")


def config_path(script: Script) -> Path | None:
    """Return the DeepSpeed config file that the command names, or None if the config is elsewhere."""
    if script.ds_config is not None:
        return Path(script.ds_config)
    for path in _config_files(script.argv, Path(script.cwd), script.profile.config).values():
        return path
    inside = own_config(script)
    return inside if isinstance(inside, Path) else None


def named_configs(script: Script) -> list[Path]:
    """Return the DeepSpeed config files that the command names: by content, or by one of DeepSpeed's own flags."""
    flagged = [path for name in _flagged_configs(script) if os.path.isfile(path := Path(script.cwd, name))]
    files = _config_files(script.argv, Path(script.cwd), script.profile.config).values()
    return list(dict.fromkeys(path.resolve() for path in (config_path(script), *flagged, *files) if path))


def check_configs_exist(script: Script) -> None:
    """Check that the DeepSpeed config files exist that the command names by one of DeepSpeed's own flags.

    Raises:
        UserError: there is no such file.
    """
    for name in _flagged_configs(script):
        if name.endswith(CONFIG_SUFFIXES) and not Path(script.cwd, name).exists():
            raise UserError(f"{name}: no such file; expected the DeepSpeed config")


def _flagged_configs(script: Script) -> list[str]:
    """Return the values of DeepSpeed's own flags that name a config."""
    return [value for flag, value in typed_values([*script.argv, *script.launcher]) if flag in _CONFIG_FLAGS]


def _config_files(argv: Sequence[str], cwd: Path, own: dict[str, Any] | None) -> dict[int, Path]:
    """Return the DeepSpeed config files that arguments name, by the argument's index.

    If several files are named and the script's `own` config is known, only the file with that config is returned: the others
    belong to other engines.
    """
    named = {at: cwd / (word.partition("=")[2] or word) for at, word in enumerate(argv)}
    found = {at: path for at, path in named.items() if is_ds_config(path)}
    if own is None or len({*found.values()}) < 2:
        return found
    read = next((path for path in found.values() if read_config(path) == own), None)
    return {at: path for at, path in found.items() if path == read}


def several_configs(script: Script) -> bool:
    """Check that the command names more than one DeepSpeed config file."""
    return len({*_config_files(script.argv, Path(script.cwd), None).values()}) > 1


def with_configs(
    argv: Sequence[str], cwd: Path, copy_of: Callable[[Path, int], str], own: dict[str, Any] | None = None
) -> list[str]:
    """Return the arguments with config files replaced by `copy_of(path, index of the argument)`.

    Only files that the first engine reads are replaced.

    Args:
        own: the contents of that file if known; None replaces every file.
    """
    found = list(argv)
    for at, path in _config_files(argv, cwd, own).items():
        found[at] = renamed(found[at], copy_of(path, at))
    return found


# -- flag words --------------------------------------------------------------------------------------------------------
#
# Words of a flag on a command line: where it is given, how it is set, and how it spells yes and no.

# pairs of no and yes that parsers of truth values accept
_NO_AND_YES = (
    ("false", "true"),
    ("0", "1"),
    ("no", "yes"),
    ("off", "on"),
    ("disable", "enable"),
    ("disabled", "enabled"),
    ("f", "t"),
    ("n", "y"),
)


def no_and_yes(word: str) -> tuple[str, str] | None:
    """Return a pair (no, yes) in the spelling of the word: `Off` gives `Off` and `On`. Return None if it is neither."""
    pair = next((pair for pair in _NO_AND_YES if word.lower() in pair), None)
    return pair if pair is None or word == word.lower() else (pair[0].title(), pair[1].title())


def with_flag(argv: Sequence[str], flag: str, value: Value, spelt: Sequence[str | None] | None = None) -> list[str]:
    """Return the arguments with the flag set to this value.

    Every occurrence is replaced, since most parsers take the last; a missing flag is appended. A flag without dashes is an
    argument `name=value`, as Hydra and OmegaConf read it.

    Args:
        spelt: words for no and yes that the script's parser was seen to accept (`rank/hooks/config.py`), of which a None is left
            out. A value is given once by these.
    """
    dashed, given, found, rest = flag.startswith("-"), False, list[str](), list(argv)
    accepted, said = list[str | None](), list[str]()
    if spelt and isinstance(value, bool):
        accepted, said = [*spelt], [*filter(None, [spelt[value]])]
    while rest:
        word = rest.pop(0)
        name, equals, typed = word.partition("=")
        is_name = name == flag if dashed else equals and name.lstrip("+") == flag
        if not is_name and word not in accepted:
            found.append(word)
            continue
        follows = rest[0] if rest else "--"
        if accepted:
            if word == flag and f"{flag}=" in str(accepted[True]) and not follows.startswith("-"):
                rest.pop(0)
            found += [] if given else said
        elif equals:
            found.append(f"{name}={_in_kind(value, typed)}")
        elif isinstance(value, bool) and no_and_yes(follows) is None:  # a switch, which takes no value
            found += [flag] if value else []
        elif follows.startswith("--"):
            found.append(f"{flag}={value}")
        else:
            found += [flag, _in_kind(value, rest.pop(0))]
        given = True
    if given:
        return found
    if accepted:
        return [*found, *said]
    return [*found, flag, str(value)] if dashed else [*found, f"{flag}={value}"]


def _in_kind(value: Value, typed: str) -> str:
    pair = no_and_yes(typed) if isinstance(value, bool) else None
    return str(value) if pair is None else pair[bool(value)]
