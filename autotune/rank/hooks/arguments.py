"""Hook argparse: flags that carry knobs, and the rank as a flag, which the `deepspeed` launcher passes unlike torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from autotune.problem.candidate import RUNG_KNOBS
from autotune.problem.flag_words import no_and_yes
from autotune.problem.script import FLAGS, KNOWN_FLAGS, LOCAL_RANK_FLAGS, settings, yes_or_no_flags
from autotune.rank.hooks.context import Context

_WORDS = {False: ("False", "false", "0", "no", "off", ""), True: ("True", "true", "1", "yes", "on")}


def install(context: Context) -> None:
    """Make every parser of the script return the candidate's values for such flags."""
    wanted = settings(context.script, context.candidate) if context.candidate is not None else {}
    told = yes_or_no_flags(context.script)
    carriers = {
        flag: knob for knob, flag in {**KNOWN_FLAGS, **dict(context.script.flags)}.items() if knob in RUNG_KNOBS
    }

    def parse_known_args(original: Callable[..., Any], parser: Any, /, *args: Any, **kwargs: Any) -> Any:
        found, rest = original(parser, *args, **kwargs)
        actions = parser._option_string_actions
        context.flags |= actions.keys() & FLAGS
        for flag in actions.keys() & told:
            if (said := _spelt(parser, flag, found)) is not None:
                context.spellings[flag] = said
        for flag, knob in carriers.items():
            if flag in actions:
                context.note_said(knob, getattr(found, actions[flag].dest, None))
        for flag, value in wanted.items():
            action = actions.get(flag)
            if action is not None and hasattr(found, action.dest):
                words = _in_words(parser, action, found) if isinstance(value, bool) else None
                setattr(found, action.dest, value if words is None else words[bool(value)])
        for flag in LOCAL_RANK_FLAGS:
            action = actions.get(flag)
            if action is not None and getattr(found, action.dest, None) == action.default:
                setattr(found, action.dest, int(os.environ["LOCAL_RANK"]))
        return found, rest

    context.patches.wrap(argparse.ArgumentParser, "parse_known_args", parse_known_args)


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
    if action.nargs not in (None, "?"):
        return None
    if (pair := _in_words(parser, action, found)) is not None:
        return [f"{flag}={word}" for word in pair]
    words = [next((word for word in _WORDS[value] if _read(parser, action, word) is value), None) for value in _WORDS]
    if None in words or words == ["False", "True"]:
        return None
    return [f"{flag}={word}" for word in words]


def _in_words(parser: Any, action: Any, found: Any) -> tuple[str, str] | None:
    """Return the words for no and yes of a flag with a word as its value, or None for other flags.

    The spelling follows the flag's value, its default or its choices, because the script compares the word.
    """
    for one in (getattr(found, action.dest, None), action.default, *(action.choices or ())):
        pair = no_and_yes(one) if isinstance(one, str) and action.nargs in (None, "?") else None
        if pair is not None and all(_taken(parser, action, word) == word for word in pair):
            return pair
    return None


def _taken(parser: Any, action: Any, word: str) -> Any:
    """Return the value that a parser's flag makes of a word, or None if it refuses the word."""
    try:
        value = parser._registry_get("type", action.type, action.type)(word)
    except Exception:  # a script's own type may raise anything
        return None
    return None if action.choices is not None and value not in action.choices else value


def _read(parser: Any, action: Any, word: str) -> bool | None:
    """Return a word as the parser's flag reads it, or None if the word is refused or neither yes nor no."""
    value = _taken(parser, action, word)
    return bool(value) if value in (0, 1) else None  # True for ints 0 and 1 too
