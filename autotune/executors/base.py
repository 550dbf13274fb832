"""What the tuner needs of an executor. The loop above does not know which one it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.executors.ops import Ops
from autotune.executors.station import Needs
from autotune.group.launchers import Launcher
from autotune.group.squad import Spread
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome


@dataclass(frozen=True)
class Effort:
    """How carefully to measure."""

    full: bool = False  # every micro-batch of a step, none extrapolated
    certify: bool = False  # also an evaluation forward and a gathered save
    resume: bool = False  # instead: a checkpoint is saved, and a fresh group of ranks loads it and goes on
    min_steps: int = 3
    max_steps: int = 30
    min_seconds: float = 1.0  # of measured steps
    max_seconds: float = 20.0


SEARCH = Effort()
VERIFY = Effort(full=True, certify=True, min_steps=5, max_steps=60, min_seconds=3.0, max_seconds=40.0)
RESUME = Effort(full=True, resume=True, min_steps=1, max_steps=1, min_seconds=0.0)


class Session(Protocol):
    """One engine. Only micro-batch and accumulation may change while it lives."""

    @property
    def alive(self) -> bool:
        """Whether another candidate of the same family can be measured."""

    def measure(self, candidate: Candidate, effort: Effort, deadline_seconds: float) -> Outcome:
        """The candidate's Outcome, after at most the deadline and one kill grace. Never raises for a failed trial."""

    def close(self) -> None: ...


class Ground(Protocol):
    """Where groups of ranks are started: this machine (`station.Station`), or several (`nodes.cluster.Cluster`)."""

    @property
    def ops(self) -> Ops: ...

    @property
    def launcher(self) -> Launcher | Spread:
        """What a Group takes its ranks from, once it is open."""

    def begin(self, needs: Needs) -> None:
        """Starts what `open` waits for, where that can be done beside something else."""

    def open(self, needs: Needs) -> None:
        """Gets ready to start ranks, anew where it was ready before.

        Raises:
            UserError: what starts them died, or hangs.
            Stopped: it was cancelled.
        """

    def load_ops(self, names: Sequence[str], needs: Needs) -> bool:
        """Has DeepSpeed's ops built and loaded; whether ranks may still be forked then."""

    @property
    def broken(self) -> bool:
        """Whether what starts ranks was killed, or cannot be reached."""

    def mend(self) -> None:
        """Gets it back.

        Raises:
            MachineTrouble: that cannot be done.
            Stopped: it was cancelled.
        """

    def all_see(self, path: Path) -> bool:
        """Whether the path is the same for all ranks."""

    def close(self) -> None: ...


class Executor(Protocol):
    """Runs candidates somewhere."""

    def begin(self) -> None:
        """Starts what `open` waits for, and does not wait: imports take seconds."""

    def open(self, say: Callable[[str], None]) -> None:
        """Everything that is done once and before the budget starts."""

    @property
    def resumes(self) -> bool:
        """Whether it can show that a candidate goes on from a checkpoint (`Effort.resume`)."""

    def check(self, say: Callable[[str], None]) -> None:
        """A test of the machine before anything is blamed on a candidate.

        Raises:
            MachineTrouble: no group of ranks would work here.
        """

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> Session:
        """A new engine for the candidate's family; `name` is where its logs go, `patience` a factor on all limits."""

    def now(self) -> float:
        """Seconds on the executor's clock: the machine's, or a simulated one."""

    def close(self) -> None: ...
