"""For benchmarks/search/search.py: predictors that are wrong on purpose, and proposers without one of their parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor, Table
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.problem.outcome import Outcome
from autotune.search.proposer import Proposer
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayExecutor, ReplaySession


class Biased(Predictor):
    """A predictor that is wrong on purpose: by 30 % in memory and 50 % in time, one way or the other by stage and batch."""

    memory_salt: tuple[int, ...] = ()
    time_salt: tuple[int, ...] = (7,)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._context_bytes = self._memory.mean[0] * GIB  # as expected before any calibration

    def prepare(self, candidates: Sequence[Candidate]) -> Any:
        """Wrong before any calibration, which may find out; a step's seconds are proportional to its work."""
        prepared = super().prepare(candidates)
        memory = 1 + 0.3 * signs(candidates, self.memory_salt)
        seconds = 1.5 ** signs(candidates, self.time_salt)
        terms = {name: size * memory for name, size in prepared.memory.terms.items()}
        terms["weights"] += (memory - 1) * self._context_bytes
        work = {name: value * seconds for name, value in vars(prepared.work).items() if name not in SHARES}
        return dataclasses.replace(
            prepared,
            memory=dataclasses.replace(prepared.memory, terms=terms),
            work=dataclasses.replace(prepared.work, **work),
            loss=prepared.loss * memory,
        )


SHARES = ("forward_share", "recompute_share")  # fields of StepWork that are no seconds


def signs(candidates: Sequence[Candidate], salt: tuple[int, ...]) -> Any:
    """1.0 or -1.0 for each candidate, as the hash of its stage and micro-batch has it."""
    return np.array([1.0 if hash((c.stage, c.micro_batch, *salt)) % 2 else -1.0 for c in candidates])


def misled(number: int) -> type[Biased]:
    """Another way of being as wrong."""
    return type(f"Misled{number}", (Biased,), {"memory_salt": (number,), "time_salt": (100 + number,)})


class Wrong(Predictor):
    """A predictor that no measurement calibrates, because what it says is bent on its way out."""

    bends_memory = bends_time = True

    def bend(self, logs: Any) -> Any:
        """The logarithms of a predicted quantity, bent."""
        raise NotImplementedError

    def prepared_table(self, prepared: Any) -> Table:
        table = super().prepared_table(prepared)
        if self.bends_time:
            samples = np.exp(self.bend(np.log(table.samples)))
            table = dataclasses.replace(table, samples=samples, step=table.step * table.samples / samples)
        if self.bends_memory:
            factor = np.exp(self.bend(np.log(table.peak))) / table.peak
            names = ("peak", "peak_sigma", "allocated", "allocated_sigma", "needed")
            table = dataclasses.replace(table, **{name: getattr(table, name) * factor for name in names})
        return table


class Inverted(Wrong):
    """What is fast it holds for slow, and what is large for small."""

    def bend(self, logs: Any) -> Any:
        return 2 * np.median(logs) - logs


class WrongTime(Inverted):
    """Right in memory, inverted in time."""

    bends_memory = False


class WrongMemory(Inverted):
    """Right in time, inverted in memory."""

    bends_time = False


class Constant(Wrong):
    """Every candidate is as fast and as large as any, and it is sure of it."""

    def bend(self, logs: Any) -> Any:
        return np.full(len(logs), np.median(logs))


class Drawn(Wrong):
    """At random, over the range that is right, and sure of it."""

    def bend(self, logs: Any) -> Any:
        return np.random.default_rng(len(logs)).permutation(logs)


class Ignorant(Predictor):
    """A predictor that knows nothing: every candidate may fit and is as fast as any."""

    def prepared_table(self, prepared: Any) -> Table:
        one = np.ones(len(prepared.columns.stage))
        samples = prepared.columns.micro_batch * prepared.columns.accumulation * self.job.ranks
        capacity = float(self.hardware.capacity_bytes)
        half, width, nothing = 0.5 * capacity * one, capacity * one, 0.0 * one
        return Table(
            peak=half,
            peak_sigma=width,
            allocated=half,
            allocated_sigma=width,
            needed=half,
            host_bytes=nothing,
            step=samples,
            samples=one,
        )


class WithoutLadder(Proposer):
    """Every rung in an engine of its own."""

    def next_rung(self, current: Candidate) -> None:
        return None


class WithoutEarlyEnd(ReplayExecutor):
    """Every trial takes its full steps, also where it cannot win."""

    def session(
        self, candidate: Candidate, name: str, patience: float = 1.0, *, job: Job | None = None
    ) -> ReplaySession:
        return _FullSession(self, candidate)


class _FullSession(ReplaySession):
    def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
        return super().measure(
            candidate, dataclasses.replace(measure_spec, beaten_step_seconds=math.inf), deadline_seconds
        )


WRONG: dict[str, type[Predictor]] = {
    "inverted": Inverted,
    "constant": Constant,
    "drawn": Drawn,
    "wrong-time": WrongTime,
    "wrong-memory": WrongMemory,
}
MISLED = {f"misled-{number}": misled(number) for number in range(1, 6)}
# One part taken away each, or made wrong.
ABLATIONS: dict[str, tuple[type[Predictor], type[Proposer]]] = {
    "autotune": (Predictor, Proposer),
    "adversarial": (Biased, Proposer),
    "no-predictor": (Ignorant, Proposer),
    "no-ladder": (Predictor, WithoutLadder),
    "no-early-end": (Predictor, Proposer),
    **{name: (predictor, Proposer) for name, predictor in (MISLED | WRONG).items()},
}
EXECUTORS: dict[str, type[ReplayExecutor]] = {"no-early-end": WithoutEarlyEnd}
