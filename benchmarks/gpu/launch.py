"""A Trainer script under `autotune launch` whose later batches are 128 times longer than the others: the GPU's memory runs
out for real, and the training goes on with a smaller micro-batch, each sample trained on as without the failure.

At micro-batch 8 the logits of a long batch are 8 x 4096 x 8192 x 4 bytes = 1 GiB, and their gradient another: above the cap
of 2 GiB with the context. At 1 they are 128 MiB.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.recovery.ladder import Rung
from autotune.util.units import GIB
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.reliability.recovery import BATCH, SCRIPT, seen_samples
from benchmarks.trials.ranks import launch
from benchmarks.trials.scripts import AUTO

CAP_BYTES = 2 * GIB
STEPS, LONG_STEPS, TOKENS = 30, "7,19", 4096
_OPTIONS = {"output_dir": "out", "save_steps": "5", "save_total_limit": "3", "report_to": "none", "seen": "seen"}


def run(ground: Ground) -> Iterator[Row]:
    folder, steps = ground.folder, ground.choose(STEPS, 4)
    os.chdir(folder)
    (folder / "ds.json").write_text(json.dumps(AUTO))
    options = {
        **_OPTIONS,
        "deepspeed": "ds.json",
        "max_steps": str(steps),
        "long": str(ground.choose(TOKENS, TOKENS // 2)),
    }
    options["long_steps"] = ground.choose(LONG_STEPS, "2")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    script = Script((str(SCRIPT), *words, *ground.choose((), ("--use_cpu",))), str(folder))
    job = Job(ModelSpec("long", {}, str(SCRIPT)), 1, 32, "fp32", script=script)
    began = time.monotonic()
    ladder = [rung(size) for size in ground.choose((8, 4, 2, 1), (8, 1))]
    hardware = dataclasses.replace(ground.hardware(), memory_cap_bytes=CAP_BYTES)  # of a CPU rank, too
    summary = launch(job, hardware, ladder, folder, max_restarts=6)
    whole = seen_samples(folder) == {step: set(range(BATCH * step, BATCH * (step + 1))) for step in range(steps)}
    for number, attempt in enumerate(summary.attempts):
        yield {
            "attempt": number,
            "candidate": attempt.candidate,
            "steps": attempt.steps,
            "s": attempt.seconds,
            "ended": attempt.ended,
            "resumed from": attempt.resumed_from or None,
        }
    restarts = len(summary.attempts) - 1
    row: Row = {"attempt": "all", "exit": summary.code, "every sample as without failures": whole}
    row |= {"restarts": restarts, "s": time.monotonic() - began}
    yield {**row, EXPECTED: summary.code == 0 and whole and restarts > 0}


def rung(micro_batch: int) -> Rung:
    knobs = {"zero_stage": 1, MICRO_BATCH: micro_batch, ACCUMULATION: BATCH // micro_batch, "overlap_comm": False}
    sizes = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    return Rung(Candidate.of({**knobs, **sizes}), 1e9, 1.0, True)
