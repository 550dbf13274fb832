"""The gallery's entry nearest to a job, and the candidate of a study that its winner comes to.

Distances are in doublings: two jobs whose models differ by a factor of two, all else equal, are 2 apart. What decides which
configs fit and which of them is fast counts most: the card, the weights a rank holds, and whether these are trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.gallery.entry import Entry, Machine, Trained
from autotune.predict.flops import matmul_parameters
from autotune.problem.candidate import CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind
from autotune.search.distances import Distances

NEAR_ENOUGH = 3.0  # beyond it an entry says nothing of the job
PARAMETERS, MEMORY, SPEED, RANKS, LENGTH = 2.0, 3.0, 1.0, 1.0, 1.0  # of a doubling of each
OTHER_LORA, OTHER_PRECISION, OTHER_OPTIMIZER, OTHER_TASK, OTHER_ARCHITECTURE = 4.0, 3.0, 0.5, 1.5, 0.25
# Knobs in which a start must be what the entry's winner is: with another of these it is another config.
DECIDING = ("zero_stage", "offload_optimizer", "offload_param", CHECKPOINTING)
MOST_BATCH_TIMES = 2.0  # between the micro-batch of the winner and that of the start


@dataclass(frozen=True)
class Near:
    """A candidate to begin with, and whose it was."""

    candidate: Candidate
    entry: str  # its name
    why: str  # for people: whose winner, on what, from where


def nearest(entries: Mapping[str, Entry], job: Job, hardware: Hardware) -> list[tuple[float, str]]:
    """(distance, name) of the entries with a winner that are near enough, the nearest first."""
    found = []
    for name, entry in entries.items():
        away = distance(entry, job, hardware) if entry.winner is not None else math.inf
        if away <= NEAR_ENOUGH:
            found.append((away, name))
    return sorted(found)


def distance(entry: Entry, job: Job, hardware: Hardware) -> float:
    """How unlike what the entry is of and a job on its machine are; infinite where nothing can be said."""
    if entry.machine.device != hardware.device:
        return math.inf
    return _between_machines(entry.machine, hardware) + _between_jobs(entry.job, job)


def _between_machines(machine: Machine, hardware: Hardware) -> float:
    away = RANKS * _doublings(machine.count, hardware.count)
    away += MEMORY * _doublings(machine.capacity_gib, hardware.capacity_bytes / 2**30)
    if machine.gpu is None or machine.gpu != hardware.facts:
        ours, theirs = hardware.gpu_facts, machine.facts
        if ours is not None and theirs is not None:
            away += SPEED * _doublings(theirs.tflops, ours.tflops) + SPEED * _doublings(
                theirs.link_gb_per_s, ours.link_gb_per_s
            )
        elif hardware.device == "cuda":
            return math.inf
    return away


def _between_jobs(trained: Trained, job: Job) -> float:
    sizes = _sizes(trained, job)
    if sizes is None:
        return math.inf
    away = PARAMETERS * _doublings(*sizes) + LENGTH * _doublings(trained.seq_len, job.seq_len)
    away += OTHER_LORA * ((trained.lora is None) != (job.lora is None))
    away += OTHER_PRECISION * ((trained.precision == "fp32") != (job.precision == "fp32"))
    away += OTHER_OPTIMIZER * (trained.optimizer != job.optimizer)
    away += OTHER_TASK * (trained.task != job.task)
    return away + OTHER_ARCHITECTURE * (trained.architecture != job.model.config.get("model_type"))


def _sizes(trained: Trained, job: Job) -> tuple[float, float] | None:
    """Of the entry's model and of the job's, the same of both: what their shapes multiply by, else all their weights."""
    multiplied = matmul_parameters(trained.config(), trained.task), matmul_parameters(job.model.config, job.task)
    for theirs, ours in (multiplied, (trained.parameters, job.model.parameters)):
        if theirs and ours:
            return theirs, ours
    return None


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))


def start_from(
    entries: Mapping[str, Entry], job: Job, hardware: Hardware, candidates: Sequence[Candidate]
) -> Near | None:
    """The candidate that the winner of the nearest entry comes to; None where no entry is near, or no candidate is like it."""
    for _, name in nearest(entries, job, hardware):
        entry = entries[name]
        assert entry.best is not None
        winner = entry.best.candidate
        if like := [candidate for candidate in candidates if _alike(winner, candidate)]:
            told = "the best" if sum(one.outcome == Kind.OK for one in entry.candidates) > 1 else "the one config"
            like_it = like[int(Distances(like).to(winner).argmin())]
            return Near(like_it, name, f"{told} known for {whose(entry)}")
    return None


def _alike(winner: Candidate, candidate: Candidate) -> bool:
    times = candidate.micro_batch / winner.micro_batch
    return all(
        _plainly(winner.get(knob)) == _plainly(candidate.get(knob))
        for knob in DECIDING
        if candidate.get(knob) is not None
    ) and (MICRO_BATCH not in candidate.as_dict or 1 / MOST_BATCH_TIMES <= times <= MOST_BATCH_TIMES)


def _plainly(value: object) -> object:
    """A knob that is not said is off."""
    return value if value not in (None, False, "none", 0) else None


def whose(entry: Entry) -> str:
    """For people: of what, on what, from where."""
    model = entry.job.model or entry.job.architecture or "a model of its size"
    where = f"published at {entry.origin.source}" if entry.origin.source else _KINDS[entry.origin.kind]
    return f"{model} on {entry.machine.count} x {entry.machine.gpu or entry.machine.name} ({where})"


_KINDS = {"study": "a study that was shared", "recorded": "recorded by this project"}
