"""Measures live tensor bytes of real DeepSpeed on CPU ranks: `python benchmarks/live_tensors.py --json FILE`.

What the predictor's memory is held against: two models, one and two ranks, every stage, offload, checkpointing, buckets,
fp32 and bf16. Every engine measures two micro-batches; operators are slowed by counting, so speed is not recorded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import write_json

from autotune.executors.base import Effort
from autotune.executors.local import LocalExecutor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model

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


def measure(name: str, ranks: int, precision: str, rungs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    job = Job(resolve_model(name), ranks, 64, precision)
    rows = []
    candidates = [
        [
            Candidate.of({**family, "train_micro_batch_size_per_gpu": mb, "gradient_accumulation_steps": ga})
            for mb, ga in rungs
        ]
        for family in families()
    ]
    with tempfile.TemporaryDirectory() as folder:
        executor = LocalExecutor(
            job, detect("cpu", ranks), Path(folder), [c for group in candidates for c in group], count_live_tensors=True
        )
        executor.open(print)
        for at, group in enumerate(candidates):
            session = executor.session(group[0], str(at))
            for candidate in group:
                outcome = session.measure(candidate, EFFORT, 200.0)
                live = outcome.measurement.live_tensor_bytes if outcome.measurement else None
                rows.append(
                    {
                        "model": name,
                        "ranks": ranks,
                        "seq_len": 64,
                        "precision": precision,
                        "candidate": candidate.as_dict,
                        "live": live,
                        "why": outcome.reason,
                    }
                )
                print(name, ranks, precision, candidate, live or outcome.reason, flush=True)
                if not session.alive:
                    break
            session.close()
        executor.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", help="MODEL,RANKS,PRECISION of one set")
    arguments = parser.parse_args()
    sets = [
        ("tiny-llama", 2, "bf16"),
        ("tiny-gemma-2", 2, "fp32"),
        ("tiny-gemma-2", 1, "bf16"),
        ("tiny-llama", 1, "fp32"),
    ]
    if arguments.only:
        sets = [s for s in sets if ",".join(map(str, s)) == arguments.only]
    rows: list[dict[str, Any]] = []
    for name, ranks, precision in sets:
        rows += measure(name, ranks, precision, [(1, 1), (4, 1), (4, 2)])
        write_json(arguments.json, {"rows": rows})
    print(json.dumps({"measured": sum(1 for row in rows if row["live"]), "of": len(rows)}))


if __name__ == "__main__":
    main()
