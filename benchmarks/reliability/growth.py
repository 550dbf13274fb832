"""Memory and descriptors of the tuner: `python benchmarks/reliability/growth.py [--replayed 1000] [--live 100] [--json FILE]`.

`autotune run` replays a table, and then measures on two CPU ranks. After each trial its unique memory (USS) and its open
descriptors are read. A line is fitted to each over the trials after the warm-up, with the 95 % interval of its slope. The
residuals of memory are not independent (an allocator grows in steps), so the interval is a lower bound of the uncertainty.
`--replayed 0` or `--live 0` leaves that row of `--json` as it is.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.util.units import KIB, MIB
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from benchmarks.reliability.large_study import NAME, write_table
from benchmarks.reliability.planting import SPACE
from benchmarks.reliability.study_calls import COMMAND, RUN

REPLAYED, LIVE = "replayed", "live, two CPU ranks"
WARM_UP = 0.2  # share of the trials that are left out of the fit
SURE = statistics.NormalDist().inv_cdf(0.975)


@dataclass
class Samples:
    """The tuner's figures after each trial."""

    trials: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # bytes, unique to the process
    descriptors: list[float] = field(default_factory=list)

    def take(self, process: psutil.Process) -> None:
        try:
            memory, descriptors = process.memory_full_info().uss, process.num_fds()
        except psutil.Error:  # it has just ended
            return
        self.trials.append(len(self.trials))
        self.memory.append(memory)
        self.descriptors.append(descriptors)


def slope(x: list[float], y: list[float]) -> tuple[float, float]:
    """Return the least-squares slope of y over x and half of the width of its 95 % interval."""
    fitted = statistics.linear_regression(x, y)
    middle = statistics.fmean(x)
    residuals = sum((b - fitted.slope * a - fitted.intercept) ** 2 for a, b in zip(x, y, strict=True))
    spread = residuals / (len(x) - 2) / sum((a - middle) ** 2 for a in x)
    return fitted.slope, SURE * spread**0.5


def sampled(words: list[str], folder: Path, seconds: float) -> Samples:
    """Run `autotune run` with these words, and sample it at each of its trials; it is ended after so many seconds."""
    samples, until = Samples(), time.monotonic() + seconds
    command = [*COMMAND, "run", *words]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (folder / "stderr").open("w") as errors:
        call = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
    process, ended = psutil.Process(call.pid), False
    assert call.stdout is not None
    for line in call.stdout:
        if line.startswith("trial "):
            samples.take(process)
        if time.monotonic() > until and not ended:
            ended = True
            call.terminate()
    if call.wait() not in ((130, 0) if ended else (0,)):
        raise RuntimeError((folder / "stderr").read_text()[-2000:])
    return samples


def row(what: str, samples: Samples) -> dict[str, Any]:
    first = int(WARM_UP * len(samples.trials))
    trials = samples.trials[first:]
    memory, memory_sure = slope(trials, samples.memory[first:])
    half = len(samples.trials) // 2
    late, late_sure = slope(samples.trials[half:], samples.memory[half:])
    descriptors, descriptors_sure = slope(trials, samples.descriptors[first:])
    return {
        "trials": what,
        "count": len(samples.trials),
        "memory, MiB": samples.memory[-1] / MIB,
        "slope, KiB a trial": memory / KIB,
        "± (95 %)": memory_sure / KIB,
        "in the last half": late / KIB,
        "± in the last half": late_sure / KIB,
        "descriptors": samples.descriptors[-1],
        "descriptors a trial": descriptors,
        "± descriptors (95 %)": descriptors_sure,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replayed", type=int, default=1000)
    parser.add_argument("--live", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=220.0, help="after which the live trials end")
    arguments = parse(parser, replayed=30, live=8)
    rows = []
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        if arguments.replayed:
            write_table(folder, max(4 * arguments.replayed, 200))  # dominance rules two of three out
            words = [
                "--executor",
                f"replay:{NAME}.csv.gz",
                "--study",
                "replayed",
                "--budget",
                "100h",
                "--exhaustive",
                "--yes",
            ]
            rows.append(row(REPLAYED, sampled([*words, "--max-trials", str(arguments.replayed)], folder, 3600.0)))
        if arguments.live:
            (folder / "faults.yaml").write_text(SPACE)
            words = [*RUN, "--budget", "1h", "--max-trials", str(arguments.live)]
            rows.append(row(LIVE, sampled(words, folder, arguments.seconds)))
    rows = [*kept_rows(arguments.json, "trials", [one["trials"] for one in rows]), *rows]
    print_table("growth of the tuner", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
