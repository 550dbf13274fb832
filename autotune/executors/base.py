"""Executor interface. The search loop does not depend on the implementation.

To add an executor, implement `Executor` and `Session`; `benchmarks/search/replay.py` is the shortest example. `CONTRIBUTING.md`
("How to add an executor") has the steps.

A scheduler or a connection to nodes is no executor. `LocalExecutor` starts its ranks on a `LocalMachine`, or on a `Cluster` with
`--hostfile`, `--executor slurm` and `--executor ray`. `CONTRIBUTING.md` ("How to add a transport") has the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.executors.cluster.cluster import Cluster
from autotune.executors.machine import LocalMachine, Ops
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Outcome, OutcomeKind, Phase, Source
from autotune.rank.step_statistics import MAX_TIMED_MICRO_BATCHES, OVERRUN
from autotune.util.units import format_duration


@dataclass(frozen=True)
class MeasureSpec:
    """Length and scope of a measurement."""

    full: bool = False  # measure every micro-batch of a step; extrapolate none
    certify: bool = False  # also run an evaluation forward and a gathered save
    reseed: bool = False  # a script draws other random numbers from its first forward on
    resume: bool = False  # only save a checkpoint, and load and continue it in a fresh group of ranks
    min_steps: int = 3
    max_steps: int = 30
    min_seconds: float = 1.0  # measured steps
    max_seconds: float = 20.0
    beaten_step_seconds: float = math.inf  # a candidate whose interval lies above cannot win; measuring ends early
    # the trial's share of the budget, its start included; measuring is cut to it, to one step at least
    share_seconds: float = math.inf

    def measuring_seconds(self, start_seconds: float) -> float:
        """Return the part of the share that is left for steps: at least half, because no start can be cut."""
        return max(self.share_seconds - start_seconds, 0.5 * self.share_seconds)

    def most_first_seconds(self, start_seconds: float) -> float:
        """Return the seconds of the first step after which a trial of the search ends as too slow for the budget."""
        return math.inf if self.full else OVERRUN * self.measuring_seconds(start_seconds)


SEARCH = MeasureSpec()
VERIFY = MeasureSpec(full=True, certify=True, min_steps=2, max_steps=60, min_seconds=3.0, max_seconds=40.0)
# without DeepSpeed, see `Job.torch_alone`
REFERENCE = MeasureSpec(full=True, min_steps=5, max_steps=60, min_seconds=2.0)
RESUME = MeasureSpec(full=True, resume=True, min_steps=1, max_steps=1, min_seconds=0.0)


def too_slow_outcome(phase: Phase, candidate: Candidate, ran_seconds: float, *, scripted: bool = False) -> Outcome:
    """Return the outcome of a trial that ended before its first answer, after more than its share of the budget.

    Args:
        ran_seconds: seconds since the engine was ready.
        scripted: ranks of a script answer after two steps of warm-up and another one, those of a model after the first
            step, of which they run at most MAX_TIMED_MICRO_BATCHES.
    """
    steps = 3.0 if scripted else min(1.0, MAX_TIMED_MICRO_BATCHES / candidate.accumulation)
    least_step_seconds = ran_seconds / steps
    first = "its first three steps" if scripted else "its first step"
    return Outcome(
        OutcomeKind.TIMEOUT,
        phase,
        # the first step has one-time work, so its time is no step's
        reason=f"too slow for this budget: {first} took over {format_duration(ran_seconds)}",
        evidence=f"{ran_seconds:.1f} s without a result, more than a trial's share of the budget",
        source=Source.BUDGET,
        least_step_seconds=least_step_seconds,
    )


class Session(Protocol):
    """One engine. Only micro-batch and accumulation may change during its life.

    The search reads of each Outcome `seconds`, `outside_seconds` and `started` for its budget, and of an OOM
    `missing_bytes` and `capacity_bytes` for its memory model.
    """

    alive: bool  # another candidate of the same family can be measured; False after a failure
    missing_op: str = ""  # builder of an op that the probe run needs and no config predicted

    @property
    def facts(self) -> Mapping[str, Any]:
        """Report of rank 0 of a script: empty if no script runs."""
        return {}

    def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
        """Return the candidate's outcome within the deadline plus one kill grace period.

        A failed trial is an outcome and does not raise.

        Raises:
            Unusable: the user's script cannot be tuned with any candidate.
            UserError: the call cannot continue.
        """

    def close(self) -> None:
        """End the session and its processes."""


LaunchTarget = LocalMachine | Cluster  # place that starts groups of ranks


class Executor(Protocol):
    """Runs candidates. An executor without processes inherits the methods that prepare and end them, which do nothing."""

    job: Job  # a stand-in before a script's probe run
    hardware: Hardware  # the devices of the ranks

    def begin(self) -> None:
        """Start the imports that `open` waits for, and return at once."""
        return None

    def open(self, print_line: Callable[[str], None]) -> None:
        """Do all one-time work before the budget starts."""
        return None

    @property
    def resumes(self) -> bool:
        """True if the executor can test a resume from a checkpoint (`MeasureSpec.resume`)."""
        return False

    @property
    def runs_torch_alone(self) -> bool:
        """True if the executor can run a named model without DeepSpeed (`Job.torch_alone`)."""
        return False

    def check(self, print_line: Callable[[str], None]) -> None:
        """Test the machine, so that its faults are not attributed to a candidate.

        Raises:
            MachineError: groups of ranks do not work here.
        """
        return None

    def load_ops(self, candidates: list[Candidate], *names: str, job: Job | None = None) -> None:
        """Build missing DeepSpeed ops for trials of these candidates, and ops of these builders.

        Args:
            names: further builders.
            job: the job of the trials; None: the executor's.

        Raises:
            UserError: the process that builds died, or a build hangs.
            Stopped: the user cancelled.
        """
        return None

    @property
    def ops(self) -> Ops:
        """Return the DeepSpeed ops that were built or failed: none if nothing runs."""
        return Ops(lambda text: None)

    @property
    def tried_ops(self) -> Iterable[str]:
        """Builders of the ops that were loaded or failed."""
        return ()

    def for_search(self, job: Job, on_phase: Callable[[str], None]) -> Executor:
        """Return the executor of a search, which uses the same open machine.

        Args:
            job: the job, as the probe run found it.
            on_phase: receives the ranks' phase.
        """
        return self

    def session(self, candidate: Candidate, name: str, patience: float = 1.0, *, job: Job | None = None) -> Session:
        """Create an engine for the candidate's family.

        Args:
            name: name of the log folder.
            patience: factor on all limits.
            job: the job to measure; None: the executor's.
        """

    def now(self) -> float:
        """Return seconds on the executor's clock, which is the machine's or a simulated one."""

    def close(self) -> None:
        """End all processes and release the machines."""
        return None
