"""Trainings compared on one machine whose speed moves from minute to minute: each runs for a second or two while the others
are stopped (SIGSTOP), round and round, and only neighbouring turns are compared. One start of a training may be several
percent faster than the next start of the very same, for as long as it runs (`vs-deepspeed-cpu.json` has the ratio of each pair
of starts): what must be closer than that is started several times.

`python benchmarks/trials/inturn.py SPEC.json` is one side of such a comparison: a job's candidate under `autotune launch`. Its
script is `timed.py`, whose log of steps says how fast it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script
from autotune.recovery.ladder import Rung
from autotune.workers.failure_classifier import log_tail
from benchmarks.trials.ranks import launch, median_spread, plain_environment, torchrun_words

HERE = Path(__file__).parent
SETTLE_STEPS = 8  # before the first turn
STEPS_A_TURN, TURN_SECONDS = 8, 0.6  # at the least
WHOLE_STEPS = 3  # fewer say nothing of a turn
ENDLESS = 10**6
# 95 % of Student's t lie within so many standard errors, by the number of values: with few, far more than two.
T95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 11: 2.228, 12: 2.201}


@dataclass
class Side:
    """One training, in a process tree of its own."""

    name: str
    argv: list[str]
    log: Path  # written by `timed.py`
    cwd: Path
    env: dict[str, str]
    turns: list[tuple[float, float]] = field(default_factory=list)

    def start(self) -> None:
        """Until it has settled.

        Raises:
            RuntimeError: it ended before.
        """
        self.log.unlink(missing_ok=True)
        output = self.log.with_suffix(".out")
        self._process = subprocess.Popen(
            self.argv,
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while len(step_ends(self.log)) < SETTLE_STEPS:
            if self._process.poll() is not None:
                raise RuntimeError(f"{shlex.join(self.argv)}\n{log_tail(output, 3000)}")
            time.sleep(0.1)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def samples_a_step(self) -> float:
        return float(json.loads(self.log.read_text().splitlines()[0])["samples"])

    def signal(self, number: int) -> None:
        """To the process and all below it, unless it was waited for: its number may be another's by then."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            tree: list[psutil.Process | subprocess.Popen[bytes]]
            tree = [*psutil.Process(self._process.pid).children(recursive=True), self._process]
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.send_signal(number)

    def run_for(self, seconds: float) -> None:
        """One turn: so many seconds, and longer where it has too few whole steps by then."""
        began, written = time.perf_counter(), self.log.stat().st_size
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        while self.alive and self._lines_since(written) < WHOLE_STEPS + 2:  # the first belongs to the turn before
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)
        self.turns.append((began, time.perf_counter()))

    def _lines_since(self, offset: int) -> int:
        with self.log.open("rb") as file:
            file.seek(offset)
            return file.read().count(b"\n")

    def turn_seconds(self) -> list[float | None]:
        """Each turn's median step; None where it had too few whole steps."""
        ends = step_ends(self.log)
        found: list[float | None] = []
        for began, ended in self.turns:
            inside = [end for end in ends if began < end < ended]
            steps = [b - a for a, b in itertools.pairwise(inside)]
            found.append(statistics.median(steps) if len(steps) >= WHOLE_STEPS else None)
        return found

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


def torchrun(name: str, argv: list[str], folder: Path, ranks: int) -> Side:
    """A training without autotune."""
    log = folder / f"{name}.log"
    env = {**plain_environment("cpu", ranks), "HF_HUB_OFFLINE": "1"}
    return Side(name, [*torchrun_words(ranks), *timed(log, argv)], log, folder, env)


def under_launch(job: Job, candidate: Candidate, folder: Path) -> Side:
    """The job's script under `autotune launch`."""
    assert job.script is not None
    log, spec = folder / "launch.log", folder / "launch.json"
    script = dataclasses.replace(job.script, argv=tuple(timed(log, job.script.argv)))
    logged = dataclasses.replace(job, script=script)
    spec.write_text(json.dumps({"job": logged.to_json(), "candidate": candidate.as_dict}))
    words = [sys.executable, str(HERE / "inturn.py"), str(spec)]
    return Side("launch", words, log, folder, {**os.environ, "HF_HUB_OFFLINE": "1"})


def step_ends(log: Path) -> list[float]:
    """Clock at the end of every step that is logged so far."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [json.loads(line)["end"] for line in lines if line.endswith("}")]


def timed(log: Path, argv: Sequence[str]) -> list[str]:
    return [str(HERE / "timed.py"), str(log), *argv]


def take_turns(sides: list[Side], turns: int) -> None:
    """Starts the sides one after another and lets each run while the others are stopped, `turns` times."""
    try:
        for side in sides:
            side.start()
            side.signal(signal.SIGSTOP)
        paces = [statistics.median(b - a for a, b in itertools.pairwise(step_ends(side.log)[3:])) for side in sides]
        for _ in range(turns):
            for side, pace in zip(sides, paces, strict=True):
                side.run_for(max(TURN_SECONDS, STEPS_A_TURN * pace))
            if not all(side.alive for side in sides):
                break
    finally:
        for side in sides:
            if hasattr(side, "_process"):
                side.kill()


def ratio(one: Side, other: Side) -> tuple[float, float]:
    """Speed of `one` against `other` in samples a second: the median over their turns, and half the width of its 95 %
    interval.

    Raises:
        RuntimeError: one of them ended before its first turn was over.
    """
    weight = one.samples_a_step() / other.samples_a_step()
    found = [
        weight * b / a
        for a, b in zip(one.turn_seconds(), other.turn_seconds(), strict=True)
        if a is not None and b is not None
    ]
    if not found:
        raise RuntimeError(f"{one.name} and {other.name} have no turn in common")
    return statistics.median(found), median_spread(found)


@dataclass(frozen=True)
class Trained:
    """Two trainings over several starts of both: speed of one against the other in each pair of starts, and each side's samples a
    second, the median of its starts."""

    ratios: list[float]
    samples_per_second: list[float]

    @property
    def ratio(self) -> float:
        """The geometric mean."""
        return statistics.geometric_mean(self.ratios)

    @property
    def half_width(self) -> float:
        """Of the mean's 95 % interval, by Student's t of the logarithms."""
        logs = [math.log(ratio) for ratio in self.ratios]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        return self.ratio * T95[len(logs)] * error


def over_starts(one: Side, other: Side, turns: int, starts: int) -> Trained:
    """Speed of `one` against `other` over several starts of both, each of which begins as often as the other.

    Args:
        starts: an even number that T95 has.

    Raises:
        RuntimeError: one of them ended before its first turn was over.
    """
    ratios, speeds = [], []
    for number in range(starts):
        one.turns, other.turns = [], []
        take_turns([other, one] if number % 2 else [one, other], turns)
        ratios.append(ratio(one, other)[0])
        speeds.append([samples_per_second(one), samples_per_second(other)])
    return Trained(ratios, [statistics.median(each) for each in zip(*speeds, strict=True)])


def samples_per_second(side: Side) -> float:
    return side.samples_a_step() / statistics.median(s for s in side.turn_seconds() if s is not None)


# -- one side ------------------------------------------------------------------------------------------------------------


def main() -> None:
    spec = Path(sys.argv[1])
    data = json.loads(spec.read_text(encoding="utf-8"))
    job, candidate = Job.from_json(data["job"]), Candidate.of(data["candidate"])
    assert isinstance(job.script, Script)
    hardware, folder = detect("cpu", job.ranks), spec.with_suffix("")
    folder.mkdir(exist_ok=True)
    os.chdir(job.script.cwd)
    launch(job, hardware, [Rung(candidate, 1e9, 1.0, True)], folder, max_restarts=0, silent_seconds=ENDLESS)


if __name__ == "__main__":
    main()
