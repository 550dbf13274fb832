"""Does training run at the speed that was exported? `python benchmarks/fidelity.py STUDY [--steps 35] [--rounds 3]`.

Takes a study's winner, measures it again as verification does and trains with the exported config under plain
DeepSpeed, in turn, and prints both beside what `meta.json` says. On CPU ranks both run with the same allocator
settings and threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import print_table, train_plainly, write_json

from autotune.executors.base import VERIFY
from autotune.executors.local import LocalExecutor
from autotune.results.export import deepspeed_config
from autotune.search.study import StudyStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    store = StudyStore.load(arguments.study)
    winner, job, hardware = store.winner, store.job, store.hardware
    if winner is None or winner.outcome is None or winner.outcome.measurement is None:
        raise SystemExit(f"study {arguments.study} has no winner")
    config = deepspeed_config(winner.candidate, job)
    again: list[float] = []
    trained: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        executor = LocalExecutor(job, hardware, Path(folder), [winner.candidate])
        executor.open(print)
        for at in range(arguments.rounds):
            session = executor.session(winner.candidate, str(at))
            measured = session.measure(winner.candidate, VERIFY, 300.0).measurement
            session.close()
            assert measured is not None
            again.append(measured.samples_per_second)
            found = train_plainly(job, config, winner.candidate.checkpointing, arguments.steps, hardware.device)
            trained.append(found["samples_per_second"])
        executor.close()
    meta = winner.outcome.measurement.samples_per_second
    row: dict[str, Any] = {
        "winner": str(winner.candidate),
        "meta.json samples/s": meta,
        "verified again": statistics.median(again),
        "trained": statistics.median(trained),
        "trained / meta": statistics.median(trained) / meta,
        "trained / verified again": statistics.median(trained) / statistics.median(again),
        "median of paired ratios": statistics.median(t / a for t, a in zip(trained, again, strict=True)),
    }
    print_table(f"{arguments.steps - 5} steps under plain DeepSpeed, {arguments.rounds} rounds in turn", [row])
    write_json(arguments.json, {"hardware": str(hardware), **row, "trained_all": trained, "again_all": again})


if __name__ == "__main__":
    main()
