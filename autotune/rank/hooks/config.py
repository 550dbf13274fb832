"""Merge the candidate's keys into the script's DeepSpeed config."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from autotune.problem.argument_files import carries, given, with_copies
from autotune.problem.ds_file import read_config
from autotune.problem.flag_words import with_setting
from autotune.problem.script import line_of, with_configs
from autotune.problem.script_job import over_present
from autotune.rank.config import QUIET
from autotune.rank.hooks.context import Context


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
    flags = given(argv)
    told = dict(context.candidate.told(script))
    for knob, flag in script.flags:
        value = told.get(knob)
        # a flag on the command line overrides an argument file
        if value is not None and (flag in flags or not carries(script, knob)):
            argv = with_setting(script, argv, flag, value)

    def merged_file(path: Path, at: int) -> str:
        copied = context.folder / f"{path.stem}.{at}.rank{os.environ['RANK']}.json"
        copied.write_text(json.dumps(merged(context, read_config(path))), encoding="utf-8")
        return str(copied)

    return with_configs(argv, Path(), merged_file, script.profile.get("config"))
