"""Record the batches that a script's steps trained on, and check them against the candidate."""

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

MOST_SHORT = 0.25  # share of steps that may have a smaller batch
_NEAR = 0.1  # relative deviation from the tokens of full rows, because packing leaves a few percent free
_SURE = 0.03  # largest relative standard error of the mean tokens
_VARYING = "the rows of the script's batches change from step to step, so its micro-batch cannot be checked"


@dataclass
class Batch:
    """Contents of one rank's batch in one optimizer step."""

    micro_batches: int = 0  # forwards that a backward follows
    rows: int = 0
    sequences: int = 0  # more than rows if rows are packed
    tokens: int = 0
    packed: int = 0  # rows that fill a forward alone with concatenated, separable sequences
    rows_by_name: Counter[str] = field(default_factory=Counter)  # rows of each tensor

    def add(self, sizes: Sizes) -> None:
        self.rows += sizes.rows
        self.sequences += sizes.sequences
        self.tokens += sizes.tokens
        self.packed += sizes.packed
        self.rows_by_name.update(sizes.rows_by_name)

    @property
    def flat(self) -> bool:
        """True if every forward had one row of several sequences."""
        return self.packed == self.rows > 0


def usual_step(batches: Sequence[Batch]) -> dict[str, int]:
    """Return the most frequent counts per step, since a data set's last step may be smaller."""
    return {
        "micros": statistics.mode(batch.micro_batches for batch in batches),
        "rows": statistics.mode(batch.rows for batch in batches),
        "sequences": statistics.mode(batch.sequences for batch in batches),
    }


def own_steps(batches: Sequence[Batch], micro_batch: int, accumulation: int, *, fed: bool) -> dict[str, Any]:
    """Return the counts per step of a probe run, in the terms of `problem.script_job.batch_seen`.

    Args:
        micro_batch: micro-batch of the script's config.
        accumulation: accumulation of the script's config.
        fed: True if DeepSpeed's own loader makes the batches, which have equal numbers of samples.

    Raises:
        Unusable: the counts grow or vary between steps.
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
    """Return the mean tokens of a micro-batch, or 0 if steps differ too much."""
    each = [batch.tokens / (batch.micro_batches or accumulation) for batch in batches]
    mean = statistics.fmean(each)
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else mean
    return mean if error <= _SURE * mean else 0.0


def check_checkpointing(facts: dict[str, Any], candidate: Candidate) -> None:
    """Check that activation checkpointing is as the candidate sets it, if the candidate sets it.

    Raises:
        Unusable: the script's code has changed it since.
    """
    told = candidate.get(CHECKPOINTING)
    if told is not None and facts["checkpointing"] and facts["checkpointed"] != told:
        on, off = ("on", "off") if told else ("off", "on")
        raise Unusable(f"the script switches activation checkpointing {off} where it was told {on}")


def check_batch(batch: Batch, candidate: Candidate, profile: dict[str, Any]) -> str:
    """Check one rank's batch of one step against the candidate, whose speed must not come from another batch.

    Args:
        profile: facts of the probe run, see `problem.script_job.Counted`.

    Returns:
        A text about a smaller batch, if the step may be a data set's last; empty for a full batch.

    Raises:
        Unusable: the numbers of micro-batches or sequences differ.
    """
    counted = Counted.of(profile)
    if profile.get("batch_note") or not counted.unit:
        if (profile["micro_batch"], profile["accumulation"]) != (candidate.micro_batch, candidate.accumulation):
            raise Unusable(profile.get("batch_note") or UNCOUNTED, Cause.BATCH)
        held = profile.get("held")  # counts of the script's own steps; missing if only the thriftiest settings ran
        return _short_of(batch, held["micros"], held["rows"], "rows", profile["accumulation"]) if held else ""
    micros = candidate.accumulation * counted.micros_per_accumulation
    if counted.unit == TOKENS:  # tokens are checked by their mean, see `check_tokens`
        asked = 0 if batch.flat else candidate.micro_batch * micros
        return _short_of(batch, micros, asked, "rows", candidate.accumulation)
    # one row per forward with concatenated samples
    flat = candidate.micro_batch > 1 and batch.rows == batch.micro_batches
    asked = candidate.micro_batch * counted.per_sample * candidate.accumulation
    return _short_of(batch, micros, asked, "sequences" if flat else counted.unit, candidate.accumulation)


def _short_of(batch: Batch, micros: float, asked: float, unit: str, accumulation: int) -> str:
    """Compare a step with the expected micro-batches and units, see `check_batch`.

    The last step of an epoch may have fewer micro-batches, and its last micro-batch fewer sequences.
    """
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
    """Check the mean tokens of packed rows, which are full except for a few percent.

    The mean must be closer to that of the candidate's micro-batch than to that of any other.

    Raises:
        Unusable: the number of concatenated rows differs.
    """
    counted = Counted.of(profile)
    if profile.get("batch_note") or counted.unit != TOKENS:
        return
    flat = [batch for batch in batches if batch.flat]  # rows of other batches are counted
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
    """Return the rows of most steps, or 0 if more steps differ than an occasional last batch."""
    most = statistics.mode(rows)
    smaller = sum(one < most for one in rows)
    return 0 if max(rows) > most or smaller > max(1, MOST_SHORT * len(rows)) else most


def check_steady(rows: Sequence[int]) -> None:
    """Check that the rows of a probe run are constant, because a growing batch has no comparable speed.

    Raises:
        Unusable: more steps differ than an occasional last batch.
    """
    if any(rows) and not usual(rows):
        raise Unusable(
            f"the script's batch changes from step to step ({min(rows)} to {max(rows)} rows a rank): no step's time can be "
            "compared with another's; give it a constant batch"
        )


def check_beside(rows: Sequence[int], number: str, candidate: Candidate, profile: dict[str, Any]) -> None:
    """Check the steps of an auxiliary engine: unchanged, or scaled like those of the first engine.

    Raises:
        Unusable: they are neither, or the engine made no step in the probe run.
    """
    if "beside" not in profile:  # no auxiliary engine was seen, or an earlier version's probe run did not count
        return
    own = profile["beside"].get(number)
    if own == 0:  # its batch does not depend on the candidate
        return
    known = own or 0
    times = candidate.micro_batch * candidate.accumulation / (profile["micro_batch"] * profile["accumulation"])
    other = [one for one in rows if abs(one - known) > 0.5 and abs(one - known * times) > 0.5]
    if other and (max(other) > known * max(1, times) or len(other) > max(1, MOST_SHORT * len(rows))):
        raise Unusable(
            f"an engine beside the first trained on {other[-1]} rows a step, and in the script's own steps on {known}",
            Cause.BATCH,
        )
