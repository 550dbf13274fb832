"""Write a study of many trials, and the table that replays it: `large_study.py FOLDER [--trials 5000]`.

The trials are stored by `StudyStore`, as a tuner stores them. The table (`FOLDER/large.csv.gz`) has a row for each candidate, so
that `benchmarks/search/replay.py FOLDER/large.csv.gz run --study large` resumes the study without a GPU. Speeds and peaks are
the predictor's, with noise: two of three trials fit, as in a recorded study.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from autotune.executors.base import SEARCH as SEARCH_SPEC
from autotune.executors.base import VERIFY as VERIFY_SPEC
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.outcome import OutcomeKind
from autotune.problem.space import load_space
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH, VERIFY
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayExecutor, ReplayTable, Row, load_replay_table, write_replay_table

NAME = "large"
NOISE = 0.03  # standard deviation of a logarithm
STARTUP_SECONDS = 9.0


def write_table(folder: Path, rows: int, seed: int = 0) -> ReplayTable:
    """Write `large.csv.gz` and `large.json`: a table of `rows` candidates of the default space, with the predictor's figures."""
    job, hardware = Job(resolve_model("llama-3.2-1b"), 4, 2048), named_hardware("rtx4090", 4)
    chosen = random.Random(seed)
    candidates = chosen.sample(load_space("default").candidates(job), rows)
    predictor = traced_predictor(job, hardware)
    table = predictor.prepared_table(predictor.prepare(candidates))
    found = {}
    for at, candidate in enumerate(candidates):
        peak = float(table.peak[at]) / GIB * math.exp(chosen.gauss(0.0, NOISE / 3))
        step = float(table.step[at]) * math.exp(chosen.gauss(0.0, NOISE))
        fits = peak * GIB <= hardware.memory_bytes
        found[candidate] = Row(
            peak, step if fits else None, STARTUP_SECONDS, OutcomeKind.OK if fits else OutcomeKind.OOM_DEVICE
        )
    facts = {
        "model": "llama-3.2-1b",
        "seq_len": job.seq_len,
        "precision": job.precision,
        "gpu": hardware.name,
        "gpu_memory_gib": hardware.memory_bytes / GIB,
        "host_memory_gib": hardware.host_memory_bytes / GIB,
        "n_gpus": 4,
    }
    write_replay_table(folder / f"{NAME}.csv.gz", facts, found)
    return load_replay_table(folder / f"{NAME}.csv.gz")


def write_study(table: ReplayTable, folder: Path, trials: int, seed: int = 0, headroom: float = 0.05) -> StudyStore:
    """Write the study `large` into `folder/runs/large`: `trials` trials, the last of them the verification of the winner."""
    runs = folder / "runs" / NAME
    runs.mkdir(parents=True)
    job, hardware, space = table.job(), table.hardware(headroom), table.space()
    store, _ = StudyStore.create_or_resume(NAME, default_storage(runs), runs, job, hardware, space)
    store.begin_call(86_400.0)
    executor = ReplayExecutor(table, seed)
    best: tuple[float, Candidate | None] = (0.0, None)
    order = random.Random(seed).sample(sorted(table.rows, key=str), trials - 1)
    for candidate in order:
        number = store.start(candidate, space, SEARCH, "predicted gain 3.1 %")
        outcome = executor.session(candidate, "").measure(candidate, SEARCH_SPEC, 1e9)
        store.finish(number, outcome)
        if outcome.measurement and outcome.measurement.peak_bytes < hardware.ceiling_bytes:
            best = max(best, (outcome.measurement.samples_per_second, candidate), key=lambda pair: pair[0])
        store.update_call(executor.now())
    winner = best[1]
    assert winner is not None
    number = store.start(winner, space, VERIFY, "verification in a fresh process")
    store.finish(number, executor.session(winner, "").measure(winner, VERIFY_SPEC, 1e9))
    store.set_winner(number, "verified")
    store.note_skips({"needs more memory than a candidate that ran out": 120})
    store.update_call(executor.now(), "every candidate is tried or ruled out")
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=8000, help="candidates of the table")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    table = write_table(arguments.folder, max(arguments.rows, arguments.trials))
    write_study(table, arguments.folder, arguments.trials)
    print(f"wrote {arguments.folder / 'runs' / NAME} and {arguments.folder / NAME}.csv.gz")


if __name__ == "__main__":
    main()
