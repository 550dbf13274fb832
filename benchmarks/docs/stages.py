"""The table of docs/stages.md: ZeRO stages side by side in a recorded study of ours."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import defaultdict

from benchmarks.common import HERE

DATA = HERE / "data"
OWN = DATA / "landscapes_own" / "tiny-llama_2xcpu"

Row = dict[str, str]


def own_rows() -> list[list[str]]:
    """A row for each stage, with the optimizer offloaded or not: how many ran, the fastest, and the least memory."""
    ranks = json.loads(OWN.with_suffix(".json").read_text())["n_gpus"]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in csv.DictReader(io.StringIO(gzip.decompress(OWN.with_suffix(".csv.gz").read_bytes()).decode())):
        groups[row["zero_stage"], row["offload_optimizer"] or "none"].append(row)
    rows = []
    for (stage, offload), tried in sorted(groups.items(), key=lambda one: (one[0][0], one[0][1] != "none")):
        ran = [row for row in tried if row["outcome"] == "ok"]
        speed, best = max((_samples(row) * ranks / float(row["step_seconds"]), _at(row)) for row in ran)
        peaks = sorted(float(row["peak_gib"]) * 1024 for row in ran)
        cells = [f"{len(ran)} of {len(tried)}", f"{speed:.0f}", f"{best}", f"{peaks[0]:.0f}"]
        rows.append([stage, "no" if offload == "none" else offload, *cells])
    return rows


def _samples(row: Row) -> int:
    return int(row["train_micro_batch_size_per_gpu"]) * int(row["gradient_accumulation_steps"])


def _at(row: Row) -> str:
    return f"{row['train_micro_batch_size_per_gpu']} x {row['gradient_accumulation_steps']}"
