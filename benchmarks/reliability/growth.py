"""Memory and descriptors of the tuner:
`python benchmarks/reliability/growth.py [--replayed 1000 106] [--live 100] [--json FILE]`.

`autotune run` measures on two CPU ranks, and replays a table, once for each count. Between trials its anonymous memory is read,
after a collection and `malloc_trim`, with its open descriptors, and the blocks of all objects that the search keeps: its history.
Bytes that are allocated in the heaps of Python and of the C library are read as well: memory that grows without them is free
pieces of the heap, which a later trial takes. Pages of files do not count: they are private while no other process maps the same
library. The fork server's memory and descriptors are read too. A line is fitted to each over the second half of the trials, when
windows and caches are full, with the 95 % interval of its slope. Memory beyond the history is a leak. The residuals are not
independent (an allocator grows in steps of 1 MiB), so the interval is a lower bound of the uncertainty. A late import is one
step: the largest step is shown, and the slopes without it.

NumPy keeps seven freed blocks of each size below 1 KiB (3.6 MiB, numpy/_core/src/multiarray/alloc.cpp), which fill as arrays grow
with the trials: they are taken before the first trial.
The windows hold 128 and 512 outcomes, more than a quarter of an hour of live trials: theirs hold WINDOW. As many are replayed
with such windows: the difference is what measuring adds. A short replay with the usual windows shows the growth before they are
full.
`--replayed` without a count, or `--live 0`, leaves those rows of `--json` as they are.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np
import psutil

from autotune.cli.app import main as autotune_main
from autotune.predict import predictor
from autotune.problem.outcome import Outcome
from autotune.search import belief
from autotune.search.tuner import SearchSummary, TrialRecorder, Tuner
from autotune.util.entry_points import FORK_SERVER
from autotune.util.units import KIB, MIB
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from benchmarks.reliability.large_study import NAME, write_table
from benchmarks.reliability.planting import SPACE
from benchmarks.reliability.study_calls import RUN
from benchmarks.search.replay import replayed

WINDOW = 12  # outcomes
LIVE, REPLAYED = f"live, two CPU ranks, windows of {WINDOW}", f"as many replayed, windows of {WINDOW}"
WARM_UP = 0.5  # share of the trials that are left out of the fit
SAMPLES = 40
PYMALLOC_BYTES = 512  # largest request that Python's own allocator serves; the C library serves the rest
VALUES_PREFIX = 16  # bytes, about: the order of attributes before their values, Objects/dictobject.c
SURE = statistics.NormalDist().inv_cdf(0.975)


@dataclass
class Samples:
    """The tuner's figures between trials."""

    trials: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # bytes, anonymous
    allocated: list[float] = field(default_factory=list)  # bytes that the process uses of them, and of its heaps
    descriptors: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # bytes of the history, by part
    server_memory: list[float] = field(default_factory=list)  # bytes, anonymous; empty without a fork server
    server_descriptors: list[float] = field(default_factory=list)

    @property
    def history(self) -> list[float]:
        return [sum(bytes_) for bytes_ in zip(*self.parts.values(), strict=True)]

    def take(self, process: psutil.Process, trials: int, tuner: Tuner) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.trials.append(trials)
        self.memory.append(anonymous_bytes(process))
        self.allocated.append(allocated_bytes())
        self.descriptors.append(process.num_fds())
        for name, kept_bytes in history_bytes(tuner, self).items():
            self.parts[name].append(kept_bytes)
        for child in process.children():
            if FORK_SERVER in child.cmdline():
                self.server_memory.append(anonymous_bytes(child))
                self.server_descriptors.append(child.num_fds())


def anonymous_bytes(process: psutil.Process) -> int:
    return int(sum(one.anonymous for one in process.memory_maps(grouped=False)))


class HeapFigures(ctypes.Structure):
    """Bytes of the C library's heap: mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated_bytes() -> int:
    """Bytes that are in use in the heaps of Python and of the C library."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = HeapFigures
    with tempfile.TemporaryFile() as told:
        standard_error = os.dup(2)
        os.dup2(told.fileno(), 2)
        sys._debugmallocstats()  # writes to descriptor 2
        os.dup2(standard_error, 2)
        os.close(standard_error)
        told.seek(0)
        found = re.search(rb"# bytes in allocated blocks += +([\d,]+)", told.read())
    heap: HeapFigures = libc.mallinfo2()
    in_use: int = heap.uordblks + heap.hblkhd
    return in_use + (int(found[1].replace(b",", b"")) if found else 0)


def fill_numpy_cache() -> None:
    for size in range(1, 1024):
        [np.empty(size, np.uint8) for _ in range(7)]  # freed together


def history_bytes(tuner: Tuner, samples: Samples) -> dict[str, int]:
    """Bytes that the search and this benchmark keep, by part; counted in a forked process, because counting needs memory too."""
    reading, writing = os.pipe()
    if not (counting := os.fork()):
        parts = {
            "trials in Optuna's cache": tuner.store,
            "leaderboard": tuner.leaderboard,
            "belief": tuner.proposer,
            "rest": tuner,
            "these samples": samples,
        }
        seen: set[int] = set()
        os.write(writing, json.dumps({name: reachable_bytes(one, seen) for name, one in parts.items()}).encode())
        os._exit(0)
    os.waitpid(counting, 0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        found: dict[str, int] = json.load(told)
    return found


def reachable_bytes(root: object, seen: set[int]) -> int:
    """Bytes of the blocks of the objects that are reached from one, without code, and without what was `seen` before."""
    total, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | CodeType):
            continue
        seen.add(id(one))
        total += object_bytes(one)
        reached = gc.get_referents(one)
        if isinstance(one, dict):
            reached += one  # keys that are all strings are not among the referents
        elif isinstance(attributes := getattr(one, "__dict__", None), dict) and not any(
            x is attributes for x in reached
        ):
            # The attributes lay in the instance; reading them has just made a dictionary, whose own block is not counted.
            seen.add(id(attributes))
            total += block_bytes(sys.getsizeof(attributes) - sys.getsizeof({}) + VALUES_PREFIX)
        waiting += reached
        if isinstance(one, np.ndarray) and one.base is not None:
            waiting.append(one.base)
    return total


def object_bytes(one: object) -> int:
    """Bytes of an object's blocks: a list, a dictionary and a set have one for themselves and one for what they hold."""
    size = sys.getsizeof(one)
    own = sys.getsizeof(type(one)()) if type(one) in (list, dict, set) else size
    return block_bytes(own) + block_bytes(size - own)


def block_bytes(size: int) -> int:
    """Bytes that a block of so many takes: Python's allocator gives multiples of 16, the C library's adds its header of 8.

    Sources: Objects/obmalloc.c (ALIGNMENT, SMALL_REQUEST_THRESHOLD) of Python, malloc/malloc.c (request2size) of glibc.
    """
    return -(-(size if size <= PYMALLOC_BYTES else size + 8) // 16) * 16


def child(samples_file: Path, every: int, window: int, table: Path | None, words: list[str]) -> None:
    """Run `autotune WORDS` in this process and sample it after each `every` trials; `window` 0: windows of their own size."""
    if window:
        belief.MOST_POINTS = window
        predictor._LATEST = slice(-window, None)
    samples, process, tuners = Samples(), psutil.Process(), list[Tuner]()
    run, end = Tuner.run, TrialRecorder.end

    def running(tuner: Tuner) -> SearchSummary:
        tuners.append(tuner)
        return run(tuner)

    def ending(recorder: TrialRecorder, *told: Any) -> Outcome:
        outcome = end(recorder, *told)
        if not (count := recorder.store.finished.total()) % every:
            samples.take(process, count, tuners[-1])
            samples_file.write_text(json.dumps(vars(samples)), encoding="utf-8")
        return outcome

    sys.argv = ["autotune", *words]
    fill_numpy_cache()
    searched = replayed(table) if table is not None else nullcontext()
    with patch.object(Tuner, "run", running), patch.object(TrialRecorder, "end", ending), searched:
        autotune_main()


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope of y over x and half of the width of its 95 % interval."""
    fitted = statistics.linear_regression(x, y)
    middle = statistics.fmean(x)
    residuals = sum((b - fitted.slope * a - fitted.intercept) ** 2 for a, b in zip(x, y, strict=True))
    spread = residuals / (len(x) - 2) / sum((a - middle) ** 2 for a in x)
    return fitted.slope, SURE * spread**0.5


def largest_step(y: Sequence[float]) -> int:
    """Index of the sample after the largest rise."""
    return max(range(1, len(y)), key=lambda at: y[at] - y[at - 1])


def without_step(y: Sequence[float], at: int) -> list[float]:
    """The samples without the rise before one of them."""
    return [*y[:at], *(one - (y[at] - y[at - 1]) for one in y[at:])]


def sampled(words: list[str], folder: Path, seconds: float, every: int, window: int = 0, table: str = "") -> Samples:
    """Run `autotune run` with these words as `child` does; it is ended after so many seconds."""
    samples_file = folder / "samples.json"
    command = [
        sys.executable,
        str(Path(__file__)),
        "--child",
        str(samples_file),
        "--every",
        str(every),
        "--window",
        str(window),
        *(["--table", table] if table else []),
        "--",
        "run",
        *words,
    ]
    with (folder / "stderr").open("w") as errors:
        call = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        ended = call.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        call.terminate()
        ended = call.wait() in (130, 0)
    if not ended:
        raise RuntimeError((folder / "stderr").read_text()[-2000:])
    return Samples(**json.loads(samples_file.read_text()))


def row(what: str, samples: Samples) -> dict[str, Any]:
    last = samples.trials[-1]
    first = sum(count <= WARM_UP * last for count in samples.trials)

    def grows(y: list[float]) -> tuple[float, float]:
        return slope(samples.trials[first:], y[first:])

    history = samples.history
    above = [(one - kept) / KIB for one, kept in zip(samples.memory, history, strict=True)]
    allocated = [(one - kept) / KIB for one, kept in zip(samples.allocated, history, strict=True)]
    step = first + largest_step(above[first:])
    measured: dict[str, list[float]] = {
        "memory, KiB a trial": [one / KIB for one in samples.memory],
        "history, KiB a trial": [one / KIB for one in history],
        "above the history, KiB a trial": above,
        "allocated, KiB a trial": [one / KIB for one in samples.allocated],
        "allocated above the history, KiB a trial": allocated,
        "without the largest step: above the history, KiB a trial": without_step(above, step),
        "without the largest step: allocated above the history, KiB a trial": without_step(allocated, step),
        "descriptors a trial": samples.descriptors,
    }
    if len(samples.server_memory) == len(samples.trials):
        measured["fork server: memory, KiB a trial"] = [one / KIB for one in samples.server_memory]
        measured["fork server: descriptors a trial"] = samples.server_descriptors
    found: dict[str, Any] = {
        "trials": what,
        "count": samples.trials[-1],
        "memory, MiB": samples.memory[-1] / MIB,
        "descriptors": samples.descriptors[-1],
        "largest step, KiB": above[step] - above[step - 1],
        "largest step before trial": samples.trials[step],
    }
    for name, y in measured.items():
        found[name], found[f"± {name}"] = grows(y)
    return found | {f"history: {name}, KiB a trial": grows(y)[0] / KIB for name, y in samples.parts.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replayed", type=int, nargs="*", default=[1000, 106])
    parser.add_argument("--live", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=220.0, help="after which the live trials end")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    arguments = parse(parser, replayed=[30], live=8)
    if arguments.child:
        return child(arguments.child, arguments.every, arguments.window, arguments.table, arguments.words)
    rows: list[dict[str, Any]] = []

    def add(what: str, samples: Samples) -> None:
        rows.append(row(what, samples))
        write_json(arguments.json, [*kept_rows(arguments.json, "trials", [one["trials"] for one in rows]), *rows])

    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        if arguments.live:
            (folder / "faults.yaml").write_text(SPACE)
            words = [*RUN, "--budget", "2h", "--max-trials", str(arguments.live)]
            every = max(1, arguments.live // SAMPLES)
            add(LIVE, sampled(words, folder, arguments.seconds, every, WINDOW))
        alike = [(rows[0]["count"], WINDOW)] if rows else []
        for count, window in [*alike, *((count, 0) for count in arguments.replayed)]:
            write_table(folder, max(4 * count, 200))  # dominance rules two of three out
            words = ["--study", f"replayed{count}-{window}", "--budget", "100h"]
            words += ["--exhaustive", "--yes", "--max-trials", str(count)]
            samples = sampled(words, folder, 3600.0, max(1, count // SAMPLES), window, f"{NAME}.csv.gz")
            add(REPLAYED if window else f"{count} replayed", samples)
    print_table("growth of the tuner", rows)


if __name__ == "__main__":
    main()
