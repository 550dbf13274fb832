"""Words of a flag on a command line: where it is given, how it is set, and how it spells yes and no."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.problem.candidate import Value
from autotune.problem.job import Script

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


def with_flag(argv: Sequence[str], flag: str, value: Value) -> list[str]:
    """Return the arguments with the flag set to this value.

    Every occurrence is replaced, since most parsers take the last; a missing flag is appended. A flag without dashes is an
    argument `name=value`, as Hydra and OmegaConf read it.
    """
    dashed, given = flag.startswith("-"), False
    found: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, typed = word.partition("=")
        if not (name == flag if dashed else equals and name.lstrip("+") == flag):
            found.append(word)
            continue
        given = True
        follows = rest[0] if rest else "--"
        if equals:
            found.append(f"{name}={_in_kind(value, typed)}")
        elif isinstance(value, bool) and no_and_yes(follows) is None:  # a switch, which takes no value
            found += [flag] if value else []
        elif follows.startswith("--"):
            found.append(f"{flag}={value}")
        else:
            found += [flag, _in_kind(value, rest.pop(0))]
    return found if given else [*found, *([flag, str(value)] if dashed else [f"{flag}={value}"])]


def _in_kind(value: Value, typed: str) -> str:
    pair = no_and_yes(typed) if isinstance(value, bool) else None
    return str(value) if pair is None else pair[bool(value)]


SPELLINGS = "spellings"  # key of a profile: flag -> words for [no, yes], if these are not `flag False` and `flag True`


def with_setting(script: Script, argv: list[str], flag: str, value: Value) -> list[str]:
    """Return the arguments with the flag set in the spelling that the script's parser was seen to accept.

    `rank/hooks/arguments.py` records the spellings.
    """
    words: list[str | None] | None = script.profile.get(SPELLINGS, {}).get(flag)
    if words is None or not isinstance(value, bool):
        return with_flag(argv, flag, value)
    takes_value = f"{flag}=" in str(words[True])
    found: list[str] = []
    place, follows = None, False  # index of the flag; whether the word before was the flag, so that its value follows
    for word in argv:
        mine = word in (flag, *words) or word.startswith(f"{flag}=")
        if mine and place is None:
            place = len(found)
        if not mine and not (follows and not word.startswith("-")):
            found.append(word)
        follows = word == flag and takes_value
    place = len(found) if place is None else place
    said = words[value]
    return [*found[:place], *([said] if said else []), *found[place:]]
