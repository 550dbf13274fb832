"""Measures live tensor bytes of real DeepSpeed on CPU ranks: `python benchmarks/live_tensors.py [--json FILE]`.

What the predictor's memory is held against: two models, one and two ranks, every stage, offload, checkpointing, buckets,
fp32 and bf16. Every engine measures two micro-batches; operators are slowed by counting, so speed is not recorded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import command_line, parse, print_table, write_json
from ranks import opened

from autotune.executors.base import Effort
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.units import MIB

EFFORT = Effort(min_steps=2, max_steps=2, min_seconds=0.0, max_seconds=20.0)


def families() -> list[dict[str, Any]]:
    big, small = 5_000_000, 500_000
    found: list[dict[str, Any]] = [{"zero_stage": 0}, {"zero_stage": 0, "activation_checkpointing": True}]
    for stage in (1, 2):
        found += [
            {"zero_stage": stage, "reduce_bucket_size": small, "overlap_comm": False, "contiguous_gradients": True},
            {"zero_stage": stage, "reduce_bucket_size": big, "overlap_comm": True, "contiguous_gradients": True},
            {
                "zero_stage": stage,
                "reduce_bucket_size": big,
                "overlap_comm": False,
                "contiguous_gradients": False,
                "activation_checkpointing": True,
            },
            {"zero_stage": stage, "reduce_bucket_size": small, "overlap_comm": False, "offload_optimizer": "cpu"},
        ]
    for extra in (
        {"reduce_bucket_size": small, "sub_group_size": 10**9},
        {"reduce_bucket_size": big, "sub_group_size": 10**6, "activation_checkpointing": True},
        {"reduce_bucket_size": small, "sub_group_size": 10**6, "offload_optimizer": "cpu"},
        {"reduce_bucket_size": small, "sub_group_size": 10**9, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"reduce_bucket_size": big, "sub_group_size": 10**9, "contiguous_gradients": False},
    ):
        found.append({"zero_stage": 3, "contiguous_gradients": True, "overlap_comm": False, **extra})
    return found


Rungs = list[tuple[int, int]]  # micro-batch and accumulation


def measure(name: str, ranks: int, precision: str, rungs: Rungs, most_families: int | None) -> list[dict[str, Any]]:
    job = Job(resolve_model(name), ranks, 64, precision)
    rows = []
    candidates = [
        [
            Candidate.of({**family, "train_micro_batch_size_per_gpu": mb, "gradient_accumulation_steps": ga})
            for mb, ga in rungs
        ]
        for family in families()[:most_families]
    ]
    every = [c for group in candidates for c in group]
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(job, detect("cpu", ranks), Path(folder), every, count_live_tensors=True) as executor,
    ):
        for at, group in enumerate(candidates):
            session = executor.session(group[0], str(at))
            for candidate in group:
                outcome = session.measure(candidate, EFFORT, 200.0)
                live = outcome.measurement.live_tensor_bytes if outcome.measurement else None
                of = {"model": name, "ranks": ranks, "seq_len": 64, "precision": precision}
                rows.append({**of, "candidate": candidate.as_dict, "live": live, "why": outcome.reason})
                print(name, ranks, precision, candidate, live or outcome.reason, flush=True)
                if not session.alive:
                    break
            session.close()
    return rows


SETS = (("tiny-llama", 2, "bf16"), ("tiny-gemma-2", 2, "fp32"), ("tiny-gemma-2", 1, "bf16"), ("tiny-llama", 1, "fp32"))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", help="MODEL,RANKS,PRECISION of one set")
    arguments = parse(parser, only="tiny-llama,2,bf16")
    sets = [s for s in SETS if arguments.only in (None, ",".join(map(str, s)))]
    if not sets:
        parser.error(f"--only {arguments.only}: expected one of {' '.join(','.join(map(str, s)) for s in SETS)}")
    rungs, most = ([(1, 1)], 2) if arguments.small else ([(1, 1), (4, 1), (4, 2)], None)
    rows: list[dict[str, Any]] = []
    for name, ranks, precision in sets:
        rows += measure(name, ranks, precision, rungs, most)
        write_json(arguments.json, {"rows": rows})
    counted = [
        {
            "model": name,
            "ranks": ranks,
            "precision": precision,
            "candidates": len(mine := [row for row in rows if (row["model"], row["ranks"]) == (name, ranks)]),
            "measured": sum(1 for row in mine if row["live"]),
            "largest peak MiB": max((max(row["live"].values()) for row in mine if row["live"]), default=0) / MIB,
        }
        for name, ranks, precision in sets
    ]
    print_table("live tensors of real DeepSpeed on CPU ranks", counted)


if __name__ == "__main__":
    main()
