"""Write the measured candidates of a study as a table that `benchmarks/search` replays: `record.py STUDY [--out FILE]`."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.problem.candidate import Candidate
from autotune.problem.models import CAUSAL
from autotune.problem.outcome import OutcomeKind
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH
from autotune.util.units import GIB
from benchmarks.search.replay import Row, write_replay_table


def record(store: StudyStore, out: Path) -> int:
    """Write a study's table and return the number of its rows.

    The peak of a candidate with an OOM is unknown. The table has its lower bound: the capacity plus the missing bytes.
    """
    rows = _rows(store)
    write_replay_table(out, _facts(store), rows)
    return len(rows)


def _rows(store: StudyStore) -> dict[Candidate, Row]:
    records, hardware = store.records(), store.hardware
    rows: dict[Candidate, Row] = {}
    started = [r.outcome.outside_seconds for r in records if r.outcome and r.outcome.outside_seconds > 1.0]
    startup = statistics.median(started) if started else 1.0
    for record in records:
        outcome = record.outcome
        if outcome is None or record.role == RESUME or (record.role != SEARCH and record.candidate in rows):
            continue
        if outcome.measurement is not None:
            measured = outcome.measurement
            rows[record.candidate] = Row(measured.peak_bytes / GIB, measured.step_seconds, startup, OutcomeKind.OK)
        elif outcome.kind.is_oom and not hardware.outgrew(outcome.kind, outcome.capacity_bytes):
            peak_gib = (hardware.capacity_bytes + (outcome.missing_bytes or 0)) / GIB
            rows[record.candidate] = Row(peak_gib, None, startup, outcome.kind)
    return rows


def _facts(store: StudyStore) -> dict[str, Any]:
    job, hardware = store.job, store.hardware
    return {
        "model": job.model.name,
        "model_config": job.model.config,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "optimizer": job.optimizer,
        **({"task": job.task, "image_size": job.image_size} if job.task != CAUSAL else {}),
        "global_batch_size": job.global_batch_size,
        "job": job.to_json(),  # complete; the fields above are for readers without autotune
        "device": hardware.device,
        "gpu": hardware.name,
        "gpu_memory_gib": hardware.capacity_bytes / GIB,
        "n_gpus": job.ranks,
        "host_memory_gib": hardware.host_memory_bytes / GIB,
        "recorded_from": store.name,
        "versions": store.versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--out", type=Path, help="default: STUDY.csv.gz")
    arguments = parser.parse_args()
    store = StudyStore.load(arguments.study)
    out = arguments.out or Path(f"{store.name}.csv.gz")
    print(f"wrote {out} with {record(store, out)} candidates")


if __name__ == "__main__":
    main()
