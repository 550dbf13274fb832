"""Faults for `faults.py`: which there are, how each is planted into a running study, and what must hold after it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH, VERIFY
from autotune.workers.launchers import ForkLauncher
from benchmarks.reliability.fault_ground import Found, Ground, away, full, gone, limited_group, locked, read_only
from benchmarks.trials.ranks import Deadlines, LocalExecutor

SPACE = """
name: faults
about: many engines that start fast
knobs:
  zero_stage: [0, 1, 2, 3]
  train_micro_batch_size_per_gpu: [1, 2]
  gradient_accumulation_steps: [1]
  activation_checkpointing: [false, true]
  reduce_bucket_size: [500_000, 1_000_000, 2_000_000, 5_000_000]
  overlap_comm: [false, true]
"""
MOST_ATTEMPTS = 3  # of one candidate in the search of one study

# What a rank does to itself: the kind -> `what` of the executor's fault.
BY_ITSELF = {
    "rank: SIGKILL": "SIGKILL",
    "rank: SIGSEGV": "SIGSEGV",
    "rank: SIGSTOP": "SIGSTOP",
    "rank: hangs": "hang",
    "rank: raises": "raise",
    "rank: out of memory": "exhaust",
}
SILENT = ("rank: SIGSTOP", "rank: hangs")
# Phases of a rank, and those that the tuner sees a group enter. A verification saves as well, and a fresh group loads then.
PHASES = ("start", "init", "forward", "backward", "step")
SEEN = ("init", "forward")
WEIGHTS = {
    "rank: SIGKILL": 6.0,
    "rank: SIGSEGV": 3.0,
    "rank: SIGSTOP": 1.5,
    "rank: hangs": 1.5,
    "rank: raises": 4.0,
    "rank: out of memory": 4.0,
    "all ranks: SIGKILL": 3.0,
    "fork server: SIGKILL": 1.0,
    "host memory: cgroup": 1.5,
    "database: locked": 1.5,
    "database: held": 0.7,
    "database: gone": 1.0,
    "database: read-only": 1.0,
    "disk: full": 1.0,
    "clock: jumps": 2.5,
    "logs: deleted": 2.5,
}
ENDING = ("database: held", "database: gone", "database: read-only", "disk: full")  # the call ends, in one line
PATIENT, IMPATIENT = Deadlines(), Deadlines(hello=30.0, start=4.0, init=6.0, step=4.0)


@dataclass(frozen=True)
class Fault:
    """One fault of a study."""

    kind: str
    phase: str
    rank: int
    share: float  # from 0 to 1: what else there is to choose


def drawn(chosen: random.Random, role: str, forbidden: set[str]) -> Fault:
    """A fault for a trial of that role."""
    kinds = {kind: weight for kind, weight in WEIGHTS.items() if kind not in forbidden}
    kind = chosen.choices(list(kinds), list(kinds.values()))[0]
    phases: tuple[str, ...] = PHASES if kind in BY_ITSELF else SEEN
    if role == VERIFY and kind != "fork server: SIGKILL":
        phases = (*phases, "save", "save")
    elif role == RESUME and kind in BY_ITSELF:
        phases = ("start", "init", "load", "load")
    if kind == "rank: out of memory":
        phases = tuple(phase for phase in phases if phase != "start")  # there a rank has no cap yet
    elif kind == "host memory: cgroup":
        phases = ("init",)  # where memory is taken
    return Fault(kind, chosen.choice(phases), chosen.randrange(2), chosen.random())


# -- into a study --------------------------------------------------------------------------------------------------------


class Planter:
    """The observer of a study's tuner: plants a fault into trials, and looks at what is left after each."""

    def __init__(
        self, ground: Ground, executor: LocalExecutor, database: Path, chosen: random.Random, share: float, found: Found
    ) -> None:
        self.ground, self.executor, self.database = ground, executor, database
        self.armed, self.found = True, found
        self.told: dict[int, Outcome] = {}  # of trials that were finished
        self._chosen, self._share = chosen, share
        self._fault: Fault | None = None
        self._struck, self._noted = False, False
        self._undo = contextlib.ExitStack()
        self._noticed: float | None = None  # when the last fault was, until work goes on
        self._session: Any = None
        self._fresh = False  # whether the session has measured nothing yet: only then its ranks can be told of a fault
        executor.fault, executor.on_phase = self._of_itself, self._entered
        original = type(executor).session.__get__(executor)

        def session(candidate: Candidate, name: str, patience: float = 1.0, **how: Any) -> Any:
            self._session, self._fresh = original(candidate, name, patience, **how), True
            return self._session

        executor.session = session  # type: ignore[method-assign]

    # -- an observer -----------------------------------------------------------------------------------------------------

    def print_line(self, text: str) -> None:
        pass

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        if self._noticed is not None:
            self.found.faults[-1]["seconds"] = round(time.monotonic() - self._noticed, 3)
            self._noticed = None
        fresh, self._fresh = self._fresh, False
        self._fault, self._struck, self._noted = None, False, False
        if self.armed and fresh and self._chosen.random() < self._share:
            self._fault = drawn(self._chosen, role, self.ground.forbidden)
        silent = self._fault is not None and self._fault.kind in SILENT
        self.executor.deadlines = IMPATIENT if silent else PATIENT

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        self.told[number] = outcome
        self._note(outcome.kind.value)
        if self._fault is not None and self._struck and outcome.ok and self._fault.kind in BY_ITSELF:
            self.found.violations.append(f"{self._fault.kind} in {self._fault.phase}: measured all the same")
        self.settle()
        if not outcome.ok:
            self._look()

    # -- striking --------------------------------------------------------------------------------------------------------

    def _of_itself(self, name: str) -> dict[str, Any] | None:
        """What the executor asks before a group starts."""
        fault = self._fault
        if fault is None or fault.kind not in BY_ITSELF:
            return None
        self._struck = True
        text = f"planted {fault.share}"  # another each time: the same twice is the job's own failure
        return {"rank": fault.rank, "where": fault.phase, "what": BY_ITSELF[fault.kind], "text": text}

    def _entered(self, phase: str) -> None:
        fault = self._fault
        if fault is None or self._struck or phase != fault.phase or fault.kind in BY_ITSELF:
            return
        self._struck = True
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        ranks = sorted(psutil.Process(self.server).children(), key=lambda process: process.pid)
        if fault.kind == "all ranks: SIGKILL":
            for rank in ranks:
                os.killpg(rank.pid, signal.SIGKILL)
        elif fault.kind == "fork server: SIGKILL":
            os.kill(self.server, signal.SIGKILL)
        elif fault.kind == "host memory: cgroup":
            group = limited_group(str(len(self.found.faults)), 8 * 2**20)
            self._undo.callback(gone, group)
            (group / "cgroup.procs").write_text(str(ranks[fault.rank].pid))
        elif fault.kind == "clock: jumps":
            self._undo.callback(self.ground.shift_clock, 0.0)
            self.ground.shift_clock((fault.share - 0.5) * 2 * 3e8)  # up to ten years either way
        elif fault.kind == "logs: deleted":
            for log in self.database.parent.glob("trials/*/*.log"):
                log.unlink()
            if fault.share < 0.5:
                ranks[fault.rank].kill()
        else:
            self._undo.enter_context(self._database(fault))

    def _database(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        return {
            "database: locked": lambda: locked(self.database, 0.5 + 2 * fault.share),
            "database: held": lambda: locked(self.database, None),
            "database: gone": lambda: away(self.database),
            "database: read-only": lambda: read_only(self.database),
            "disk: full": lambda: full(self.ground, self.database),
        }[fault.kind]()

    @property
    def server(self) -> int:
        """Process id of the fork server."""
        launcher = self.executor.launcher
        assert isinstance(launcher, ForkLauncher)
        return launcher.server

    # -- after it --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Takes back what the last fault has done to the machine."""
        self._undo.close()
        self._undo = contextlib.ExitStack()

    def ended(self, error: str | None) -> None:
        """A call of the study is over, with the line that it says where it failed."""
        if error is not None:
            if self._fault is None or not self._struck or self._fault.kind not in ENDING:
                self.found.violations.append(f"the call ended: {error}")
            self._note(f"the call ended: {error[:80]}")
        self.settle()
        self._look()
        self._session = None

    def _note(self, outcome: str) -> None:
        fault = self._fault
        if fault is None or not self._struck or self._noted:
            return
        self._noted = True
        self.found.add(fault.kind, fault.phase, outcome, fault.rank, fault.share)
        failed = self._session.failed_at if self._session is not None else None
        self._noticed = failed if failed is not None else time.monotonic()

    def _look(self) -> None:
        left = self.ground.leftovers({self.server}, self.database.parent / "trials")
        said = " ".join(self.found.violations)
        self.found.violations += [f"after {self.last}: {text}" for text in left if text not in said]

    @property
    def last(self) -> str:
        """The fault that was planted last."""
        row = self.found.faults[-1] if self.found.faults else None
        return f"{row['kind']} in {row['phase']}" if row else "no fault"


def lost(told: dict[int, Outcome], store: StudyStore) -> list[str]:
    """Finished trials that the study does not have as they were, and candidates that it tries again and again."""
    records = store.records()
    kept = {record.number: record.outcome for record in records}
    words = [f"trial {number} is lost" for number, outcome in told.items() if kept.get(number) != outcome]
    tried = Counter(record.candidate for record in records if record.role == SEARCH)
    return words + [f"{one} was tried {times} times" for one, times in tried.items() if times > MOST_ATTEMPTS]
