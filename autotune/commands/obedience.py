"""Whether a user's script trains on the batch that it is told: it is told another one before the search."""

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
_MOST_TRIES = 2  # batches that it may refuse, before its own is left as it is
_MOST_TIMES = 4  # its own micro-batch: what memory may hold


def batch_note(executor: LocalExecutor, script: Script, seconds: float) -> str:
    """Why the script's batch cannot be changed: what it did when told others; empty where it took one.

    Raises:
        UserError: it does not take its own global batch from the flag that is known for it.
        Stopped: it was stopped.
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
    """What a script may be told instead of its own batch, the nearest to half or twice its micro-batch first: of its own global
    batch, which a script may hold by a check or an accumulation of its own; of another only where there is no such."""
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
    """Of one rank's step."""
    return candidate.micro_batch * candidate.accumulation


def _told(executor: LocalExecutor, script: Script, other: Candidate, name: str, seconds: float) -> Outcome:
    """How two steps of the script end, told this batch."""
    before, executor.job = executor.job, job_of(script, executor.hardware, None)
    try:
        with closing(executor.session(other, name)) as session:
            outcome = session.measure(other, _TWO_STEPS, seconds)
    finally:
        executor.job = before
    if outcome.kind is Kind.INTERRUPTED and outcome.source is Source.STOP:
        raise Stopped("stopped before it was known whether the script takes another batch")
    return outcome
