"""The tables of docs/stages.md: ZeRO stages side by side, in a recorded study of ours and in figures that others published."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.common import HERE
from benchmarks.predict.published.rows import Row as Printed
from benchmarks.predict.published.sources import source_of

DATA = HERE / "data"
OWN = DATA / "landscapes_own" / "tiny-llama_2xcpu"
STAGES = ("ddp", "zero1", "zero2", "zero3")  # as the table writes them; plain data parallel is what stage 0 is
SAME = (  # what has to be equal for two rows to be the same job under two stages
    *("source_repo_or_url", "model", "gpu", "n_gpus", "seq_len", "micro_batch", "grad_accum", "precision", "optimizer"),
    *("offload_optimizer", "offload_param", "checkpointing", "lora", "attention", "figure_kind", "unit"),
)
KINDS = {
    "step_s": "seconds a step",
    "samples_per_s": "samples/s",
    "tokens_per_s_total_or_per_gpu": "tokens/s",
}  # else it is memory

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


def published_rows() -> list[list[str]]:
    """A row for each published job whose figures differ by the stage alone; sources held out of every fit are not looked at."""
    groups: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    trust: dict[tuple[str, ...], tuple[str, str]] = {}
    for row, source, level in _open_rows():
        stage, _, beside = row["parallel"].partition(" + ")
        if stage in STAGES and row["gpu"] != "unknown" and _is_number(row["value"]):
            key = (*(row[name] for name in SAME), beside)
            groups[key][stage] = row["value"]
            trust[key] = source, level
    rows = []
    for key, values in groups.items():
        if len(values) > 1:
            row = dict(zip((*SAME, "beside"), key, strict=True))
            of = KINDS.get(row["figure_kind"], f"memory, {row['unit'].split()[0]} a GPU")
            cells = [values.get(stage, "—") for stage in STAGES]
            source, level = trust[key]
            rows.append([_job(row), of, *cells, f"{source} ({level})"])
    return rows


def _open_rows() -> Iterator[tuple[Row, str, str]]:
    """Rows with their source's name and trust, but for those of sources that are held out."""
    with (DATA / "published" / "gpu_published.csv").open(newline="") as file:
        for at, row in enumerate(csv.DictReader(file), start=2):
            printed = Printed(at, row)
            source = source_of(printed)
            if not source.held_out:  # a thread by its number, what has no address by its name
                yield row, source.name if " " in source.name else printed.source, source.trust


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _job(row: Row) -> str:
    adapters = f", LoRA {row['lora'].split()[0]}" if row["lora"].startswith("r=") else ""
    words = [f"{row['model'].split(' (')[0]}{adapters}", f"{row['n_gpus']} x {row['gpu'].split(' (')[0]}"]
    if row["gpu"].startswith("unknown ("):
        words[1] = f"{row['n_gpus']} x {row['gpu'].removeprefix('unknown (').rstrip(')')}"
    if row["seq_len"] != "unknown":
        words.append(f"{row['seq_len'].split(' ')[0]} tokens x {row['micro_batch']}")
    if row["checkpointing"] == "yes":
        words.append("checkpointing")
    if row["beside"]:
        words.append(row["beside"])
    return ", ".join(words)
