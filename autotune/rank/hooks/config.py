"""Candidate keys in DeepSpeed configs and command-line arguments."""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

from autotune.problem.candidate import RUNG_KNOBS
from autotune.problem.ds_config import read_config
from autotune.rank.ds_config import QUIET
from autotune.rank.hooks.base import Context
from autotune.rank.patches import Call
from autotune.script.argument_files import argument_names, with_copies
from autotune.script.carriers import KNOWN_FLAGS, declared_places, settings
from autotune.script.profile import over_present
from autotune.script.script import (
    FLAGS,
    LOCAL_RANK_FLAGS,
    line_of,
    no_and_yes,
    with_configs,
    with_values,
    yes_or_no_flags,
)


def announce_to_accelerate(context: Context) -> None:
    """Name the config file of a script that leaves DeepSpeed to accelerate, as `accelerate launch` does."""
    if context.script.ds_config is not None:
        context.patches.set_environment("ACCELERATE_USE_DEEPSPEED", "true")
        context.patches.set_environment("ACCELERATE_DEEPSPEED_CONFIG_FILE", context.script.ds_config)


def merged(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Return `with_candidate` of the config (or config file) for the engine that trains.

    The first config seen is reported as the script's own.
    """
    if context.own_config is None:
        context.own_config = copy.deepcopy(config)
        context.watcher.configured(copy.deepcopy(config))
    return with_candidate(context, config)


def note_own(context: Context, config: dict[str, Any], *, again: bool = False) -> None:
    """Record the config of the engine that trains as the script's own.

    The first config seen may belong to another engine: accelerate has one for each plugin.

    Args:
        config: config passed to the engine.
        again: True if the first config seen belongs to another engine, unless accelerate or Trainer read it.
    """
    own = next((said for plugin, said in context.plugins if getattr(plugin(), "config", None) is config), None)
    if own is None and again and not context.plugins:
        own = config
    if context.candidate is None and own is not None and own != context.own_config:
        context.own_config = copy.deepcopy(own)
        context.watcher.configured(copy.deepcopy(own))


def kept_configs(context: Context) -> list[Any]:
    """Return the ZeRO sections of accelerate's other plugins (a teacher's) that differ from the trained engine's."""
    own = (context.own_config or {}).get("zero_optimization")
    if not any(said == context.own_config for _, said in context.plugins):
        return []
    return [zero for _, said in context.plugins if (zero := said.get("zero_optimization")) != own]


def with_candidate(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with the candidate's keys, and without trackers if the context is quiet."""
    found = without_trackers(context, config)
    if context.candidate is None:
        return found
    return context.candidate.ds_config(over_present(context.job, found))


def without_trackers(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config, without trackers if the context is quiet."""
    return {key: copy.deepcopy(value) for key, value in config.items() if not (context.quiet and key in QUIET)}


def merged_arguments(context: Context) -> list[str]:
    """Return the script's arguments with declared flags set and DeepSpeed config files replaced by merged ones."""
    script = context.script
    argv = with_copies(script, context.folder)[2 if script.is_module else 1 :]
    if line_of(script).gives_local_rank:
        argv.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    if context.candidate is None:
        return argv
    # Other known flags are set in argparse's result.
    flags = {*argument_names(argv), *declared_places(script).values()}
    argv = with_values(script, argv, context.candidate, flags)

    def merged_file(path: Path, at: int) -> str:
        copied = context.folder / f"{path.stem}.{at}.rank{os.environ['RANK']}.json"
        copied.write_text(json.dumps(merged(context, read_config(path))), encoding="utf-8")
        return str(copied)

    return with_configs(argv, Path(), merged_file, script.profile.config)


# -- arguments ---------------------------------------------------------------------------------------------------------
#
# Hook argparse: flags that carry knobs, and the rank as a flag, which the `deepspeed` launcher passes unlike torchrun.

_LITERAL = ("False", "True")
_PAIRS = (_LITERAL, ("false", "true"), ("0", "1"), ("no", "yes"), ("off", "on"), ("", "True"))  # words for no and yes


def install(context: Context) -> None:
    """Make every parser of the script return the candidate's values for such flags."""
    wanted = settings(context.script, context.candidate) if context.candidate is not None else {}
    told = yes_or_no_flags(context.script)
    carriers = {
        flag: knob for knob, flag in {**KNOWN_FLAGS, **dict(context.script.flags)}.items() if knob in RUNG_KNOBS
    }

    def parse_known_args(call: Call) -> Any:
        (found, rest), parser = call(), call.owner
        actions = parser._option_string_actions
        context.flags |= actions.keys() & FLAGS
        if context.candidate is None:
            context.integers |= _integers(parser, found)
        for flag in actions.keys() & told:
            if (said := _spelt(parser, flag, found)) is not None:
                context.spellings[flag] = said
        for flag, knob in carriers.items():
            if flag in actions:
                context.note_said(knob, getattr(found, actions[flag].dest, None))
        for flag, value in wanted.items():
            action = actions.get(flag)
            if action is not None and hasattr(found, action.dest):
                if isinstance(value, bool):
                    pair = _pair(parser, action, found)
                    value = _taken(parser, action, pair[value]) if pair else value
                setattr(found, action.dest, value)
        for flag in LOCAL_RANK_FLAGS:
            action = actions.get(flag)
            if action is not None and getattr(found, action.dest, None) == action.default:
                setattr(found, action.dest, int(os.environ["LOCAL_RANK"]))
        return found, rest

    context.patches.wrap(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def _integers(parser: Any, found: Any) -> dict[str, int]:
    """Return the positive integers that a parser has read, by the long flag of each."""
    values = {}
    for action in parser._actions:
        value = getattr(found, action.dest, None)
        flag = next((one for one in action.option_strings if one.startswith("--")), None)
        if flag is not None and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            values[flag] = value
    return values


def _spelt(parser: Any, flag: str, found: Any) -> list[str | None] | None:
    """Return the words for no and yes on a command line; a word of None means to omit the flag.

    Returns:
        None if `flag False` and `flag True` are read literally, or if nothing is known.
    """
    action = parser._option_string_actions[flag]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [next((one for one in action.option_strings if one.startswith("--no-")), None), flag]
    if action.nargs == 0:
        return [flag, None] if action.const is False else [None, flag]
    pair = _pair(parser, action, found)
    return [f"{flag}={word}" for word in pair] if pair not in (None, _LITERAL) else None


def _pair(parser: Any, action: Any, found: Any) -> tuple[str, str] | None:
    """Return the words for no and yes as the value of a flag, or None for a flag without such a value.

    A script may compare the word itself. Its spelling follows the flag's value, its default or its choices.
    """
    if action.nargs not in (None, "?"):
        return None
    for one in (getattr(found, action.dest, None), action.default, *(action.choices or ())):
        pair = no_and_yes(one) if isinstance(one, str) else None
        if pair is not None and all(_taken(parser, action, word) == word for word in pair):
            return pair
    # the ints 0 and 1 are equal to False and True
    return next((pair for pair in _PAIRS if [_taken(parser, action, word) for word in pair] == [False, True]), None)


def _taken(parser: Any, action: Any, word: str) -> Any:
    """Return the value that a parser's flag makes of a word, or None if it refuses the word."""
    try:
        value = parser._registry_get("type", action.type, action.type)(word)
    except Exception:  # a script's own type may raise anything
        return None
    return None if action.choices is not None and value not in action.choices else value
