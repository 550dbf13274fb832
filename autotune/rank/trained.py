"""What a script's steps trained on, and whether that is what it was told."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import Cause, Unusable
from autotune.problem.candidate import CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.script_job import TOKENS, UNCOUNTED, Counted
from autotune.rank.hooks.batches import Sizes

MOST_SHORT = 0.25  # of the steps may have a smaller batch
_NEAR = 0.1  # of the tokens that full rows have: packing leaves a few percent of them free
_SURE = 0.03  # of their mean: what its error may be
_VARYING = "the rows of the script's batches change from step to step, so its micro-batch cannot be checked"


@dataclass
class Batch:
    """What one rank trained on in one optimizer step."""

    micro_batches: int = 0  # forwards, of which backwards follow
    rows: int = 0
    sequences: int = 0  # more than rows where they are packed
    tokens: int = 0
    packed: int = 0  # rows that are all of a forward, of sequences laid end to end and told apart
    rows_by_name: Counter[str] = field(default_factory=Counter)  # of all tensors

    def add(self, sizes: Sizes) -> None:
        self.rows += sizes.rows
        self.sequences += sizes.sequences
        self.tokens += sizes.tokens
        self.packed += sizes.packed
        self.rows_by_name.update(sizes.rows_by_name)

    @property
    def flat(self) -> bool:
        """Whether every forward was one row of several sequences."""
        return self.packed == self.rows > 0


def usual_step(batches: Sequence[Batch]) -> dict[str, int]:
    """What a step has, as most have: the last one of a data set may be smaller."""
    return {
        "micros": statistics.mode(batch.micro_batches for batch in batches),
        "rows": statistics.mode(batch.rows for batch in batches),
        "sequences": statistics.mode(batch.sequences for batch in batches),
    }


def own_steps(batches: Sequence[Batch], micro_batch: int, accumulation: int, *, fed: bool) -> dict[str, Any]:
    """What the steps of a script as it is have, in the terms of `problem.script_job.batch_seen`.

    Args:
        micro_batch: of its config, as is `accumulation`.
        fed: whether DeepSpeed's own loader makes its batches, which are of as many samples each.

    Raises:
        Unusable: they have more and more, or now this and now that.
    """
    found: dict[str, Any] = usual_step(batches)
    rows = [batch.rows for batch in batches]
    if not any(rows) or usual(rows):
        flat = all(batch.flat for batch in batches) and not usual([batch.sequences for batch in batches])
        return {**found, "packed_tokens": _steady_tokens(batches, accumulation)} if flat else found
    samples = micro_batch * (found["micros"] or accumulation)
    each = {name: [batch.rows_by_name[name] for batch in batches] for name in batches[0].rows_by_name}
    steady = {name: one for name, of in each.items() if all(of) and (one := usual(of)) and one % samples == 0}
    if steady:
        name = min(steady, key=lambda name: steady[name])
        return {**found, "rows": steady[name], "sequences": steady[name], "counted_by": name, "fed": fed}
    if not fed:
        check_steady(rows)
    return {**found, "rows": 0, "sequences": 0, "uncounted": _VARYING}


def _steady_tokens(batches: Sequence[Batch], accumulation: int) -> float:
    """Mean tokens of a micro-batch; 0 where steps differ too much for that to be known."""
    each = [batch.tokens / (batch.micro_batches or accumulation) for batch in batches]
    mean = statistics.fmean(each)
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else mean
    return mean if error <= _SURE * mean else 0.0


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
    if counted.unit == TOKENS:  # these by their mean, see `check_tokens`
        asked = 0 if batch.flat else candidate.micro_batch * micros
        return _short_of(batch, micros, asked, "rows", candidate.accumulation)
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


def check_tokens(batches: Sequence[Batch], candidate: Candidate, profile: dict[str, Any]) -> None:
    """Checks the tokens of packed rows, which are full but for a few percent: nearer to what the candidate's micro-batch has than
    to that of any other.

    Raises:
        Unusable: another number of rows was laid end to end.
    """
    counted = Counted.of(profile)
    if profile.get("batch_note") or counted.unit != TOKENS:
        return
    flat = [batch for batch in batches if batch.flat]  # of others rows are counted
    if not flat:
        return
    told = candidate.accumulation * counted.micros_per_accumulation
    got = sum(batch.tokens for batch in flat) / sum(batch.micro_batches or told for batch in flat)
    asked = candidate.micro_batch * counted.per_sample
    if abs(got / asked - 1) > min(_NEAR, 0.5 / candidate.micro_batch):
        raise Unusable(
            f"the script gave {got:.0f} tokens a micro-batch where about {asked:.0f} were asked for: say which flag sets the "
            f"batch, like --map {MICRO_BATCH}=--FLAG",
            Cause.BATCH,
        )


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
