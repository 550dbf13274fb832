"""How long a study's page takes: `python benchmarks/search/report.py [--trials 50 200 500] [--json FILE]`.

Studies of the first rows of a recorded table are written as a page (`autotune report`), beside reading the same study from its
database and dumping it as JSON, which any reader of it has to do. In turn, five times each; medians of seconds, and the
page's size.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.commands.study_output import write_study
from autotune.executors.base import SEARCH
from autotune.search.study import StudyStore
from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.search.replay import ReplayExecutor, ReplayTable, load_replay_table

TABLE = HERE / "data" / "landscapes" / "qwen2.5-0.5b_2xrtx4090.json"


def study(table: ReplayTable, trials: int, folder: Path) -> StudyStore:
    """A study in a database, of so many rows drawn from the table, and its winner."""
    job, hardware, space = table.job(), table.hardware(0.05), table.space()
    name = f"s{trials}"
    (folder / name).mkdir()
    url = f"journal:{folder / name / 'study.journal'}"
    store, _ = StudyStore.create_or_resume(name, url, folder / name, job, hardware, space)
    executor, best = ReplayExecutor(table), (0.0, 0)
    for candidate in random.Random(0).sample(sorted(table.rows, key=str), trials):
        number = store.start(candidate, space)
        outcome = executor.session(candidate, "").measure(candidate, SEARCH, 1e9)
        store.finish(number, outcome)
        if outcome.measurement and outcome.measurement.peak_bytes < hardware.ceiling_bytes:
            best = max(best, (outcome.measurement.samples_per_second, number))
    store.set_winner(best[1], "measured, not verified")
    return StudyStore.load(name, url)


def seconds(does: Callable[[], object]) -> tuple[float, float]:
    """(wall, of the processor): beside other processes the first says little."""
    began = time.perf_counter(), time.process_time()
    does()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def row(table: ReplayTable, trials: int, repeats: int, folder: Path) -> dict[str, Any]:
    store = study(table, trials, folder)
    url = f"journal:{folder / store.name / 'study.journal'}"
    out = folder / f"{trials}.html"

    def read() -> None:
        again = StudyStore.load(store.name, url)
        json.dumps([record.outcome.to_json() for record in again.records() if record.outcome])

    def page() -> None:
        write_study(StudyStore.load(store.name, url), out)

    pairs = [(seconds(read), seconds(page)) for _ in range(repeats)]
    reading, writing = (
        [statistics.median(times) for times in zip(*one, strict=True)] for one in zip(*pairs, strict=True)
    )
    return {
        "trials": trials,
        "candidates": len(table.rows),
        "page_seconds": round(writing[0], 3),
        "page_cpu_seconds": round(writing[1], 3),
        "read_seconds": round(reading[0], 3),
        "read_cpu_seconds": round(reading[1], 3),
        "ratio": round(writing[1] / reading[1], 2),
        "kib": out.stat().st_size // 1024,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--trials", type=int, nargs="+", default=[50, 200, 500])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parse(parser, trials=[20], repeats=1)
    table = load_replay_table(TABLE)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(table, trials, arguments.repeats, Path(folder)) for trials in arguments.trials]
    print_table("the page of a study, beside reading it", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
