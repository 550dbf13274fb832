"""What a script's steps trained on, and whether that is what it was told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import Cause, Unusable
from autotune.problem.candidate import CHECKPOINTING, Candidate
from autotune.problem.script_job import UNCOUNTED, Counted
from autotune.rank.hooks.batches import Sizes

MOST_SHORT = 0.25  # of the steps may have a smaller batch


@dataclass
class Batch:
    """What one rank trained on in one optimizer step."""

    micro_batches: int = 0  # forwards, of which backwards follow
    rows: int = 0
    sequences: int = 0  # more than rows where they are packed
    tokens: int = 0

    def add(self, sizes: Sizes) -> None:
        self.rows += sizes.rows
        self.sequences += sizes.sequences
        self.tokens += sizes.tokens


def check_checkpointing(facts: dict[str, Any], candidate: Candidate) -> None:
    """Checks that activation checkpointing is as the candidate says, where that is its to say.

    Raises:
        Unusable: the script's code has switched it since.
    """
    told = candidate.get(CHECKPOINTING)
    if told is not None and facts["checkpointing"] and facts["checkpointed"] != told:
        on, off = ("on", "off") if told else ("off", "on")
        raise Unusable(f"the script switches activation checkpointing {off} where it was told {on}")


def check_batch(batch: Batch, candidate: Candidate, profile: dict[str, Any]) -> str:
    """Checks what a rank trained on in one step against what the candidate asks for: the speed of another batch would be
    taken for its own.

    Args:
        profile: what the script's first run has shown, see `problem.script_job.Counted`.

    Returns:
        What the step has less than was asked for, where it may be the last of a data set; empty where it is whole.

    Raises:
        Unusable: another number of micro-batches or sequences was trained.
    """
    counted = Counted.of(profile)
    if profile.get("batch_note") or not counted.unit:
        if (profile["micro_batch"], profile["accumulation"]) != (candidate.micro_batch, candidate.accumulation):
            raise Unusable(profile.get("batch_note") or UNCOUNTED, Cause.BATCH)
        held = profile.get("held")  # what its own steps have; not known of one that ran at its thriftiest alone
        return _short_of(batch, held["micros"], held["rows"], "rows", profile["accumulation"]) if held else ""
    micros = candidate.accumulation * counted.micros_per_accumulation
    # one row a forward: its samples are laid end to end
    flat = candidate.micro_batch > 1 and batch.rows == batch.micro_batches
    asked = candidate.micro_batch * counted.per_sample * candidate.accumulation
    return _short_of(batch, micros, asked, "sequences" if flat else counted.unit, candidate.accumulation)


def _short_of(batch: Batch, micros: float, asked: float, unit: str, accumulation: int) -> str:
    """What `check_batch` does, for so many micro-batches and so many of a unit, in so many steps of accumulation. The last
    step of an epoch may have fewer micro-batches, and the last of these fewer sequences."""
    seen, got = batch.micro_batches or micros, getattr(batch, unit)
    whole = asked * seen / micros
    gave = f"the script gave {got} {unit} a step where {asked:g} were asked for"
    if abs(seen - micros) > 0.5:
        gave = f"the script accumulated {seen} micro-batches where {micros:g} were asked for"
        flag = "sets it, like --map gradient_accumulation_steps=--FLAG"
    else:
        flag = "sets the batch, like --map train_micro_batch_size_per_gpu=--FLAG"
    fits = not asked or whole - asked / accumulation + 0.5 <= got <= whole + 0.5
    if seen > micros + 0.5 or not fits:
        raise Unusable(f"{gave}: say which flag {flag}", Cause.BATCH)
    return f"{gave}: say which flag {flag}" if seen < micros - 0.5 or got < asked - 0.5 else ""


def usual(rows: Sequence[int]) -> int:
    """The rows of most steps; 0 where steps differ by more than a last batch now and then."""
    most = statistics.mode(rows)
    smaller = sum(one < most for one in rows)
    return 0 if max(rows) > most or smaller > max(1, MOST_SHORT * len(rows)) else most


def check_steady(rows: Sequence[int]) -> None:
    """Checks the rows of a script's own steps: of one that trains on more and more a speed says nothing.

    Raises:
        Unusable: they differ by more than a last batch now and then.
    """
    if any(rows) and not usual(rows):
        raise Unusable(
            f"the script's batch changes from step to step ({min(rows)} to {max(rows)} rows a rank): no step's time can be "
            "compared with another's; give it a constant batch"
        )


def check_beside(rows: Sequence[int], number: str, candidate: Candidate, profile: dict[str, Any]) -> None:
    """Checks the steps of an engine made after the first: they are as they were, or larger by as much as the first's.

    Raises:
        Unusable: they are neither, or it made none in the first run.
    """
    if "beside" not in profile:  # none was seen, or an earlier version's first run counted none
        return
    own = profile["beside"].get(number)
    if own == 0:  # the batch is held: nothing of the candidate's reaches it
        return
    known = own or 0
    times = candidate.micro_batch * candidate.accumulation / (profile["micro_batch"] * profile["accumulation"])
    other = [one for one in rows if abs(one - known) > 0.5 and abs(one - known * times) > 0.5]
    if other and (max(other) > known * max(1, times) or len(other) > max(1, MOST_SHORT * len(rows))):
        raise Unusable(
            f"an engine beside the first trained on {other[-1]} rows a step, and in the script's own steps on {known}",
            Cause.BATCH,
        )
