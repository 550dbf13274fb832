"""Seconds of commands on a large study: `python benchmarks/reliability/large.py [--trials 5000] [--json FILE]`.

`large_study.py` writes the study. Each command is run in turn, in a process of its own: `show`, `show --json`, `report`, and
`run` of the same command, once until its first trial and once on a table of which every candidate is tried. Medians of
wall-clock seconds and of processor seconds; on a machine that does something else the second says more.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.reliability.large_study import NAME, write_study, write_table
from benchmarks.reliability.study_calls import COMMAND

RESUME = ["run", "--study", NAME, "--yes", "--budget", "30m", "--max-trials"]
TARGETS = {"show": 3.0, "show --json": 3.0, "report": 5.0, "resume, to the first trial": 5.0}
CASES = {
    "show": ["show", NAME],
    "show --json": ["show", NAME, "--json"],
    "report": ["report", NAME],
    "resume, to the first trial": [*RESUME, "1"],
    "resume, whole call": [*RESUME, "1"],
}


def seconds(case: str, folder: Path) -> tuple[float, float]:
    """Return the wall-clock and processor seconds of one command, in a fresh copy of the study."""
    with tempfile.TemporaryDirectory() as name:
        there = Path(name) / "copy"
        shutil.copytree(folder, there)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        command = COMMAND
        if case.startswith("resume"):
            command = [sys.executable, str(HERE / "search" / "replay.py"), f"{NAME}.csv.gz"]
        call = subprocess.Popen(
            [*command, *CASES[case]], cwd=there, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert call.stdout is not None
        wall = None
        for line in call.stdout:
            if case.endswith("first trial") and line.startswith("trial ") and wall is None:
                wall = time.monotonic() - began
        if call.wait() != 0:
            raise RuntimeError(f"{case}: exit code {call.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return wall or time.monotonic() - began, used


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--study", type=Path, help="a folder that large_study.py wrote; default: written now")
    arguments = parse(parser, trials=60, repeats=1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.study or Path(name)
        if arguments.study is None:
            write_study(write_table(folder, arguments.trials * 8 // 5), folder, arguments.trials)
        found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
        for _ in range(arguments.repeats):
            for case in CASES:
                found[case].append(seconds(case, folder))
    for case, times in found.items():
        wall, used = (statistics.median(one) for one in zip(*times, strict=True))
        rows.append(
            {
                "command": case,
                "trials": arguments.trials,
                "wall, s, median": round(wall, 2),
                "processor, s": round(used, 2),
                "target, s": TARGETS.get(case),
            }
        )
    print_table(f"a study of {arguments.trials} trials, load average {os.getloadavg()[0]:.1f}", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
