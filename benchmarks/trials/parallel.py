"""Candidates beside each other: `python benchmarks/trials/parallel.py [--parallel 2] [--rounds 3] [--json FILE]`.

The same study of CPU ranks is made by `autotune run` one candidate at a time and with `--parallel K`, in turn, a rank and a
thread a job, every candidate of a small space. What a candidate gives beside others is compared with what it gave alone, and
how long either takes until something within 5 % of the best is measured, and until all is. Offloading is tried among the
others: those trials are alone in both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import usable_cpus
from autotune.search.concurrency import host_bound
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH
from benchmarks.common import HERE, command_line, parse, print_table, write_json

NEAR = 0.95  # of the best
_SPACE = """\
name: beside
about: what fits, on one CPU rank
knobs:
  zero_stage: {stages}
  offload_optimizer: {offload}
  train_micro_batch_size_per_gpu: {sizes}
"""


def study(folder: Path, parallel: int, arguments: Any) -> list[dict[str, Any]]:
    """The search's trials: candidate, samples a second, seconds since the first one began."""
    folder.mkdir()
    knobs = {"stages": "[0, 1, 2, 3]", "offload": "[none, cpu]", "sizes": "[1, 2, 4, 8]"}
    if arguments.small:
        knobs = {"stages": "[0, 2]", "offload": "[none]", "sizes": "[1, 2]"}
    (folder / "beside.yaml").write_text(_SPACE.format(**knobs))
    job = ["--model", "tiny-gemma-2", "--device", "cpu", "--gpus", "1", "--seq-len", "32", "--space", "beside.yaml"]
    words = ["run", *job, "--study", "s", "--budget", "15m", "--exhaustive", "--parallel", str(parallel)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    store = StudyStore.load("s", runs=folder / "runs")
    ended = {trial.number: trial for trial in store.study.get_trials(deepcopy=False)}
    began = min(trial.datetime_start for trial in ended.values() if trial.datetime_start)
    found = []
    for record in store.records():
        trial = ended[record.number]
        if record.role == SEARCH and record.outcome and record.outcome.measurement and trial.datetime_complete:
            speed = record.outcome.measurement.samples_per_second
            seconds = (trial.datetime_complete - began).total_seconds()
            found.append({"candidate": record.candidate, "speed": speed, "seconds": seconds})
    return found


def compare(folder: Path, arguments: Any) -> list[dict[str, Any]]:
    ways = [1, arguments.parallel]
    studies: dict[int, list[list[dict[str, Any]]]] = {way: [] for way in ways}
    for turn in range(arguments.rounds):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            studies[way].append(study(folder / f"{turn}-{way}", way, arguments))
            print(f"round {turn + 1}, {way} at once: {len(studies[way][-1])} trials", file=sys.stderr)
    alone = {one: statistics.median(speeds) for one, speeds in by_candidate(studies[1]).items()}
    best = max(alone.values())
    winner, rows = max(alone, key=alone.__getitem__), []
    for way in ways:
        speeds = by_candidate(studies[way])
        shares = {one: statistics.median(speeds[one]) / alone[one] for one in alone if one in speeds}
        beside = [share for one, share in shares.items() if not host_bound(one)]
        first = [min(t["seconds"] for t in trials if alone[t["candidate"]] >= NEAR * best) for trials in studies[way]]
        rows.append(
            {
                "at once": way,
                "rounds": arguments.rounds,
                "candidates": len(speeds),
                "speed of alone, median": statistics.median(beside),
                "least": min(beside),
                "most": max(beside),
                f"s until {NEAR:.0%} of the best": statistics.median(first),
                "s until all": statistics.median(max(t["seconds"] for t in trials) for trials in studies[way]),
                "fastest of alone": max(speeds, key=lambda one: statistics.median(speeds[one])) == winner,
            }
        )
    return rows


def by_candidate(studies: list[list[dict[str, Any]]]) -> dict[Candidate, list[float]]:
    found: dict[Candidate, list[float]] = {}
    for trials in studies:
        for trial in trials:
            found.setdefault(trial["candidate"], []).append(trial["speed"])
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, rounds=1)
    if usable_cpus() < arguments.parallel:
        parser.error(f"--parallel {arguments.parallel}: {usable_cpus()} CPUs are here")
    with tempfile.TemporaryDirectory() as name:
        rows = compare(Path(name), arguments)
    print_table("candidates one at a time, and beside each other", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
