"""What a study is kept in, side by side: `python benchmarks/search/storage.py [--trials 1000] [--json FILE]`.

The same study is written trial by trial into SQLite (`study.db`) and into a journal (`study.journal`, for file systems of a
network; here both lie on this machine's disk). Then each is resumed in turn: opened, and every Outcome read.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search.storage import DATABASES, url_of
from autotune.search.study import StudyStore
from autotune.util.units import GIB, MIB
from benchmarks.common import command_line, parse, print_table, write_json

RESUMED = 5  # times, each of both in turn


def trials(job: Job, count: int) -> Iterator[tuple[Candidate, Outcome]]:
    """Candidates of the default space, and an Outcome of usual length for each: two of three run."""
    candidates = load_space("default").candidates(job)
    random.Random(0).shuffle(candidates)
    measured = Measurement(1.0, 0.02, 5, 32.0, 65536.0, 20 * GIB, mfu=0.4, model_tflops_per_gpu=60.0)
    ran = Outcome(OutcomeKind.OK, measurement=measured, log="runs/s/trials/0000", seconds=12.5, outside_seconds=9.25)
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    failed = Outcome(OutcomeKind.OOM_DEVICE, reason=text, evidence=f"exception {text}", missing_bytes=GIB, rank=0)
    for number, candidate in enumerate(candidates[:count]):
        yield candidate, failed if number % 3 == 2 else ran


def compare(count: int, folder: Path) -> list[dict[str, Any]]:
    job, hardware, space = (
        Job(resolve_model("llama-3.2-1b"), 4, 2048),
        named_hardware("rtx4090", 4),
        load_space("default"),
    )
    urls = {file: url_of(folder / file) for file in DATABASES}
    rows: list[dict[str, Any]] = []
    for file, url in urls.items():
        began = time.perf_counter()
        store, _ = StudyStore.create_or_resume("s", url, folder, job, hardware, space)
        for candidate, outcome in trials(job, count):
            store.finish(store.start(candidate, space), outcome)
        written = (time.perf_counter() - began) / count
        rows.append({"kept in": file, "trials": count, "written, ms a trial": 1000 * written})
    seconds: dict[str, list[float]] = {file: [] for file in urls}
    for _ in range(RESUMED):
        for file, url in urls.items():
            began = time.perf_counter()
            store, resumed = StudyStore.create_or_resume("s", url, folder, job, hardware, space)
            found = len(store.records())
            seconds[file].append(time.perf_counter() - began)
            assert resumed
            assert found == count
    first = statistics.median(seconds["study.db"])
    for row in rows:
        file = row["kept in"]
        row["resumed, s, median"] = statistics.median(seconds[file])
        row["x of study.db"] = statistics.median(seconds[file]) / first
        row["MiB"] = (folder / file).stat().st_size / MIB
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    arguments = parse(parser, trials=20)
    with tempfile.TemporaryDirectory() as name:
        rows = compare(arguments.trials, Path(name))
    print_table("what a study is kept in", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
