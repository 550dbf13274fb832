"""Batch check: run a user's script with another batch before the search, to see that it honours a batch size."""

from __future__ import annotations

from contextlib import closing

from autotune.errors import Stopped, UserError
from autotune.executors.base import Effort
from autotune.executors.local import LocalExecutor
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.job import Script
from autotune.problem.outcome import Kind, Outcome, Source
from autotune.problem.script_job import UNCOUNTED, UNCOUNTED_BESIDE, Counted, job_of, own_candidate

_TWO_STEPS = Effort(min_steps=2, max_steps=2, min_seconds=0.0)
_MOST_TRIES = 2  # batches that the script may refuse before its own is kept
_MOST_TIMES = 4  # multiple of its own micro-batch that is assumed to fit in memory


def batch_note(executor: LocalExecutor, script: Script, seconds: float) -> str:
    """Return why the script's batch cannot be changed; empty if it honoured another batch.

    Raises:
        UserError: it does not take its own global batch from its known flag.
        Stopped: the user stopped the tuner.
    """
    if not Counted.of(script.profile).unit:
        return str(script.profile.get("uncounted", UNCOUNTED))
    if not all(script.profile.get("beside", {}).values()):
        return UNCOUNTED_BESIDE
    own = own_candidate(script)
    refused: list[tuple[Candidate, Outcome]] = []
    for number, other in enumerate(others(own)[:_MOST_TRIES], 1):
        outcome = _told(executor, script, other, f"probe-batch-{number}", seconds)
        unknown = outcome.kind.is_oom or not outcome.kind.says_something_of_the_candidate
        if outcome.ok or (unknown and not refused):
            return ""
        if not unknown:
            refused.append((other, outcome))
    other, first = refused[0]
    if first.source is not Source.BATCH:
        return f"told another batch ({other}), {script.target} fails: {first.reason}"
    disobeys = all(one.source is Source.BATCH and _samples(told) == _samples(own) for told, one in refused)
    if disobeys and {MICRO_BATCH, ACCUMULATION} & dict(script.flags).keys():
        raise UserError(first.reason)
    return first.reason


def others(own: Candidate) -> list[Candidate]:
    """Return other batches to pass to a script, those nearest to half or twice its micro-batch first.

    They keep the script's global batch, which a script may enforce by a check or its own accumulation. If no other split exists,
    the global batch is changed.
    """
    total = _samples(own)
    most = min(total, _MOST_TIMES * own.micro_batch)
    micros = [size for size in range(1, most + 1) if total % size == 0 and size != own.micro_batch]
    if not micros:
        return [own.but(**{MICRO_BATCH: 2 * own.micro_batch, ACCUMULATION: own.accumulation + 1})]

    def distance(size: int) -> tuple[float, int]:
        times = max(size, own.micro_batch) / min(size, own.micro_batch)
        return abs(times - 2), size

    return [own.but(**{MICRO_BATCH: size, ACCUMULATION: total // size}) for size in sorted(micros, key=distance)]


def _samples(candidate: Candidate) -> int:
    """Return the samples of one rank's step."""
    return candidate.micro_batch * candidate.accumulation


def _told(executor: LocalExecutor, script: Script, other: Candidate, name: str, seconds: float) -> Outcome:
    """Return the outcome of two steps of the script with this batch."""
    before, executor.job = executor.job, job_of(script, executor.hardware, None)
    try:
        with closing(executor.session(other, name)) as session:
            outcome = session.measure(other, _TWO_STEPS, seconds)
    finally:
        executor.job = before
    if outcome.kind is Kind.INTERRUPTED and outcome.source is Source.STOP:
        raise Stopped("stopped before it was known whether the script takes another batch")
    return outcome
