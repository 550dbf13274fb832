"""Seconds from Enter to the first measured step: `python benchmarks/trials/first_step.py [--rounds 5] [--json FILE]`.

Each round is a call of `autotune run` in a folder of its own, ended after one trial. The caches are warm: a call before
those that count has built DeepSpeed's ops and traced the model. Where the seconds go is what the study says: until its
first trial begins, and of this trial what is not measured steps (its ranks, its engine, its warm-up).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.search.study import StudyStore
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.trials.ranks import autotune_run

MODELS = ("tiny-llama", "tiny-gemma-2")
TARGET_SECONDS = 6.0
LIMITS = ("--seq-len", "32", "--global-batch-size", "8", "--max-trials", "1", "--budget", "5m", "--device", "cpu")


def first_step(model: str, ranks: int, folder: Path) -> tuple[float, float]:
    """(seconds from Enter until the first trial begins, seconds from there until its first measured step begins).

    Raises:
        RuntimeError: the call found nothing; with what it said.
    """
    began = time.time()  # as the study's clock: Optuna writes down the time of day
    done = autotune_run("--model", model, "--gpus", str(ranks), "--study", "first", *LIMITS, cwd=folder)
    if done.code:
        raise RuntimeError(done.stderr[-2000:])
    store = StudyStore.load(str(folder / "runs" / "first"))
    number, outcome = next((record.number, record.outcome) for record in store.records() if record.outcome)
    trial = next(trial for trial in store.study.get_trials() if trial.number == number)
    assert trial.datetime_start is not None
    return trial.datetime_start.timestamp() - began, outcome.outside_seconds


def measured(model: str, ranks: int, rounds: int, warm: bool) -> dict[str, Any]:
    seconds = []
    for at in range(rounds + warm):
        with tempfile.TemporaryDirectory() as name:
            seconds.append(first_step(model, ranks, Path(name)))
        if at < warm:
            seconds.clear()
    return {
        "model": model,
        "CPU ranks": ranks,
        "calls": len(seconds),
        "until the trial begins": statistics.median(before for before, _ in seconds),
        "Enter to first measured step, median s": statistics.median(map(sum, seconds)),
        "worst": max(map(sum, seconds)),
        "target": TARGET_SECONDS,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse(parser, rounds=1)
    cases = [("tiny-llama", 1)] if arguments.small else [(model, ranks) for model in MODELS for ranks in (1, 2)]
    rows = [measured(model, ranks, arguments.rounds, not arguments.small) for model, ranks in cases]
    print_table("from Enter to the first measured step", rows, keys=2)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
