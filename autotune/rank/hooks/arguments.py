"""argparse: flags that carry knobs, and the rank, which the `deepspeed` launcher gives by a flag and torchrun does not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from autotune.problem.candidate import RUNG_KNOBS
from autotune.problem.script import FLAGS, KNOWN_FLAGS, LOCAL_RANK_FLAGS, settings
from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """Every parser of the script that has such a flag gives the candidate's value for it."""
    wanted = settings(context.script, context.candidate) if context.candidate is not None else {}
    carriers = {
        flag: knob for knob, flag in {**KNOWN_FLAGS, **dict(context.script.flags)}.items() if knob in RUNG_KNOBS
    }

    def parse_known_args(original: Callable[..., Any], parser: Any, /, *args: Any, **kwargs: Any) -> Any:
        found, rest = original(parser, *args, **kwargs)
        actions = parser._option_string_actions
        context.flags |= actions.keys() & FLAGS
        for flag, knob in carriers.items():
            if flag in actions:
                context.note_said(knob, getattr(found, actions[flag].dest, None))
        for flag, value in wanted.items():
            action = actions.get(flag)
            if action is not None and hasattr(found, action.dest):
                setattr(found, action.dest, value)
        for flag in LOCAL_RANK_FLAGS:
            action = actions.get(flag)
            if action is not None and getattr(found, action.dest, None) == action.default:
                setattr(found, action.dest, int(os.environ["LOCAL_RANK"]))
        return found, rest

    context.patches.wrap(argparse.ArgumentParser, "parse_known_args", parse_known_args)
