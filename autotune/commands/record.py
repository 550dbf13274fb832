"""`autotune record`: export of a study as a table that can be searched again without the machine."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.executors.replay import Row, write_landscape
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind
from autotune.problem.tasks import CAUSAL
from autotune.search.records import RESUME, SEARCH
from autotune.search.storage import output_file
from autotune.search.study import StudyStore
from autotune.units import GIB


def record_study(study: str, storage: str | None, out: Path | None) -> tuple[Path, Path, int]:
    """Write a study's measured candidates as a table that `--executor replay:TABLE` searches: to `out`, or into the study's
    folder.

    The peak of a candidate with an OOM is unknown. The table has its lower bound: the capacity plus the missing bytes.

    Returns:
        The table, its file of facts, and the number of its rows.

    Raises:
        UserError: there is no such study, it has measured nothing, or part of its figures is predicted.
    """
    store = StudyStore.load(study, storage)
    if store.hardware.sliced:
        raise UserError(
            f"study {store.name} is of a slice: a table holds what was measured, and the other nodes' communication is "
            "predicted; record a study of all nodes, or of one alone"
        )
    out = out or output_file(store.folder, f"{store.name}.table.csv.gz")  # NAME.json is the winner's
    rows = _rows(store)
    if not any(row.kind is Kind.OK for row in rows.values()):
        raise UserError(f"study {store.name} has measured nothing that could be replayed: run it first")
    return (*write_landscape(out, _facts(store), rows), len(rows))


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
            rows[record.candidate] = Row(measured.peak_bytes / GIB, measured.step_seconds, startup, Kind.OK)
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
