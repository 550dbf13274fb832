"""The script's DeepSpeed config with the candidate's keys in it."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from autotune.problem.argument_files import carries, given, with_copies
from autotune.problem.candidate import BATCH_KEYS
from autotune.problem.ds_file import read_config
from autotune.problem.script import line_of, with_configs, with_setting
from autotune.rank.config import QUIET
from autotune.rank.hooks.context import Context


def announce_to_accelerate(context: Context) -> None:
    """Names the config file of a script that leaves DeepSpeed to accelerate, as `accelerate launch` does."""
    if context.script.ds_config is not None:
        context.patches.set_environment("ACCELERATE_USE_DEEPSPEED", "true")
        context.patches.set_environment("ACCELERATE_DEEPSPEED_CONFIG_FILE", context.script.ds_config)


def merged(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """A copy of the script's config with the candidate's keys in it, and without trackers where the context is quiet."""
    if context.own_config is None:
        context.own_config = copy.deepcopy(config)
        context.watcher.configured(copy.deepcopy(config))
    found = copy.deepcopy(config)
    if context.quiet:
        for key in QUIET:
            found.pop(key, None)
    if context.candidate is None:
        return found
    more = {key: value for key, value in context.job.base_config.items() if key not in (*found, *BATCH_KEYS)}
    base = {**found, **more}
    return context.candidate.ds_config(dataclasses.replace(context.job, base_config=base))


def merged_arguments(context: Context) -> list[str]:
    """The script's arguments with declared flags set and DeepSpeed config files replaced by merged ones."""
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
        # what stands on the command line goes over a file
        if value is not None and (flag in flags or not carries(script, knob)):
            argv = with_setting(script, argv, flag, value)

    def merged_file(path: Path, at: int) -> str:
        copied = context.folder / f"{path.stem}.{at}.rank{os.environ['RANK']}.json"
        copied.write_text(json.dumps(merged(context, read_config(path))))
        return str(copied)

    return with_configs(argv, Path(), merged_file, script.profile.get("config"))
