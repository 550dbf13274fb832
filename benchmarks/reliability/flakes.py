"""Whether the tests can be trusted: the command of `make test` many times in a row, each time in another order.

    python benchmarks/reliability/flakes.py --runs 20 --beside --json benchmarks/results/flakes.json

`--beside` has two runs beside each other, each of which is the other's load; without it the machine's other work is the load.
Each run has the mean load average beside it, its own workers included. A run that fails is written down with its seed and its
output, and the next one starts: nothing is tried again. Twenty runs take hours.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.common import print_table, tree, write_json

ROOT = Path(__file__).parents[2]
FAST = ["tests/util/test_units.py", "tests/problem/test_outcome.py", "tests/workers/test_protocol.py"]
RUN_SECONDS = 3600  # a run that takes longer hangs


def test_command() -> list[str]:
    """What `make test` runs, under this interpreter."""
    asked = ["make", "-n", "--no-print-directory", "-o", "setup", "test"]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }  # of a make above
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    _, *words = shlex.split(said.stdout.strip().splitlines()[-1])
    return [sys.executable, *words]


def run_once(command: list[str], seed: int, log: Path) -> dict[str, Any]:
    """One run's seconds, load average, counts, seed and names of failures."""
    report = log.with_suffix(".xml")
    began, averages = time.monotonic(), []
    with log.open("w", encoding="utf-8") as output:
        words = [*command, f"--randomly-seed={seed}", f"--junitxml={report}"]
        tests = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        while (code := tests.poll()) is None and time.monotonic() - began < RUN_SECONDS:
            averages.append(os.getloadavg()[0])
            with contextlib.suppress(subprocess.TimeoutExpired):
                tests.wait(timeout=5)
        if code is None:
            tests.kill()
            tests.wait()
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failures, skipped = [], 0
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        skipped += case.find("skipped") is not None
    if code != 0 and not failures:
        failures = [f"the run itself: exit code {code}"]  # None: no end
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "load_average": round(statistics.fmean(averages), 1),
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
        **({"log": str(log)} if failures else {}),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    return {
        "runs": len(runs),
        "runs_without_a_failure": sum(not run["failures"] for run in runs),
        "seconds_median": statistics.median(seconds),
        "seconds_max": max(seconds),
        "load_average_min": min(run["load_average"] for run in runs),
        "failures": dict(Counter(name for run in runs for name in run["failures"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--beside", action="store_true", help="two runs at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="one run of a few fast tests")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs: at least 1")
    command = test_command() + (FAST if arguments.small else [])
    folder = Path(tempfile.mkdtemp(prefix="flakes-"))
    same = {"cores": os.cpu_count(), "tree": tree("autotune", "tests", "search_spaces")}
    runs: list[dict[str, Any]] = []

    def one(number: int) -> dict[str, Any]:
        return run_once(command, secrets.randbelow(2**31), folder / f"run-{number + 1:02d}.log")

    with ThreadPoolExecutor(2 if arguments.beside else 1) as pool:
        numbers = range(1 if arguments.small else arguments.runs)
        for number, run in enumerate(pool.map(one, numbers)):
            runs.append(run)
            write_json(arguments.json, {**same, **summary(runs), "each": runs})
            print(
                f"run {number + 1}: {run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped in "
                f"{run['seconds']:.0f} s (seed {run['seed']})",
                *(f"  {name}" for name in run["failures"]),
                sep="\n",
                flush=True,
            )
    whole = summary(runs)
    print_table("make test, again and again", [{k: v for k, v in whole.items() if k != "failures"}])
    for name, times in whole["failures"].items():
        print(f"{times} x {name}")
    if whole["failures"]:
        raise SystemExit(f"the output of runs that failed: {folder}")


if __name__ == "__main__":
    main()
