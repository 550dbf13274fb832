"""Places that carry a candidate's values into a script: flags, variables, arguments by name, and keys of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, KNOBS, MICRO_BATCH, Candidate, Value
from autotune.problem.ds_config import read_config, value_at
from autotune.problem.job import ArgumentFile, Script, ScriptProfile
from autotune.script.argument_files import (
    ALIASES,
    Place,
    argument_names,
    config_place,
    find_key,
    own_files,
    place_to_add,
)
from autotune.script.command_line import framework_of

STEP = BATCH_KEYS[0]  # name of the samples of a rank's optimizer step, among the knobs that places carry
# Hugging Face's names, in Trainer's arguments and in the parsers of its examples.
KNOWN_FLAGS = {knob: f"--{one.trainer}" for knob, one in KNOBS.items() if one.trainer}
# words of a name that tell that it holds a batch or an accumulation
OF_A_BATCH = re.compile(r"batch|accum|micro|(?<![a-z])(?:m?bsz?|acc|gas)(?![a-z])", re.IGNORECASE)


class Carrier(NamedTuple):
    """Place that carries a knob, or the samples of a rank's whole step (`STEP`)."""

    place: str  # `--flag`, `$VARIABLE`, or a dotted name in a file or of a word `name=value`; empty: none is known
    factor: int = 1  # its value is this multiple of the knob's, of a batch over ranks or in tokens
    negated: bool = False


def declared_places(script: Script) -> dict[str, str]:
    """Return the places that the user declared, or that were found, by knob. `Script.flags` has none for a whole step."""
    return {**script.profile.found_flags, **dict(script.flags)}


def with_profile(script: Script, profile: ScriptProfile) -> Script:
    """Return the script with findings, and with the flags that were found to carry knobs."""
    found = {knob: place for knob, place in profile.found_flags.items() if knob != STEP}
    return replace(script, profile=profile, flags=tuple({**found, **dict(script.flags)}.items()))


def carrier_of(script: Script, knob: str) -> Carrier:
    """Return the place that carries a knob: declared or found, a framework's own, or Hugging Face's."""
    declared, framework = declared_places(script).get(knob), framework_of(script)
    if declared is not None:
        is_found = script.profile.found_flags.get(knob) == declared  # `--map` may name another
        return Carrier(declared, script.profile.flag_times.get(knob, 1) if is_found else 1)
    if framework and knob in framework.negated:
        return Carrier(f"--{framework.negated[knob]}", negated=True)
    return Carrier(KNOWN_FLAGS.get(knob, ""))


def own_numbers(profile: ScriptProfile) -> dict[str, int]:
    """Return the numbers of a rank's own batch that places may carry."""
    micro_batch, accumulation = profile.micro_batch, profile.accumulation
    return {MICRO_BATCH: micro_batch, ACCUMULATION: accumulation, STEP: micro_batch * accumulation}


def carried(script: Script, candidate: Candidate) -> Iterator[tuple[str, str, Value]]:
    """Yield (knob, place, value) of every knob of the candidate whose carrier is known, and of a whole step's samples."""
    values = dict(candidate.passed_knobs(script))
    if MICRO_BATCH in values:
        values[STEP] = candidate.rows_per_rank
    for knob, value in values.items():
        place, factor, negated = carrier_of(script, knob)
        if negated:
            value = not value
        elif factor > 1:
            value = int(value) * factor
        if place:
            yield knob, place, value


def settings(script: Script, candidate: Candidate) -> dict[str, Value]:
    """Return the values of `carried` by place."""
    return {place: value for _, place, value in carried(script, candidate)}


# -- in a file -----------------------------------------------------------------------------------------------------------


def place_in_file(script: Script, data: dict[str, Any], knob: str) -> Place | None:
    """Return the place of a knob in a file: an existing one, or one to add to a Trainer's arguments."""
    name = carrier_of(script, knob).place
    if knob in declared_places(script):
        declared = tuple(name.split("."))
        return declared if value_at(data, declared) is not None else None
    if not name:
        return None
    name = name.removeprefix("--")
    return find_key(data, (name, *ALIASES.get(knob, ()))) or place_to_add(script, data, name)


def can_set_knob(script: Script, knob: str) -> bool:
    """Check that one of the command's files sets the knob, or could."""
    return any(place_in_file(script, file.data, knob) for file in own_files(script))


def changes_for(script: Script, file: ArgumentFile, candidate: Candidate, config: str | None) -> dict[Place, Any]:
    """Return the values that a candidate changes in a file, by place.

    Args:
        config: the path of the DeepSpeed config with the candidate in it; None leaves the file's own.
    """
    typed = argument_names(script.argv)
    found: dict[Place, Any] = {}
    for knob, _, value in carried(script, candidate):
        place = place_in_file(script, file.data, knob)
        if place is not None and f"--{place[-1]}" not in typed:
            found[place] = value
    if config is not None and (place := config_place(script, file.data)) is not None:
        found[place] = config
        if isinstance(value_at(file.data, place), dict):  # the script's own code may expect one
            found[place] = read_config(Path(config))
        framework = framework_of(script)
        if framework and framework.superseded in file.data:
            found[(framework.superseded,)] = None
    return found
