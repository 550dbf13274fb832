"""A Trainer script under `autotune launch` whose later batches are 128 times longer than the others: the GPU's memory runs
out for real, and the training goes on with a smaller micro-batch, each sample trained on as without the failure.

At micro-batch 8 the logits of a long batch are 8 x 4096 x 8192 x 4 bytes = 1 GiB, and their gradient another: above the cap
of 2 GiB with the context. At 1 they are 128 MiB.

An attempt took 13 to 26 s on an H100: 2 s until CUDA is up, 10 s of imports (Trainer, accelerate, DeepSpeed) and of making
the engine, since ranks of a training start cold. Its steps took 2 to 10 s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.recovery.ladder import Rung
from autotune.util.units import GIB
from benchmarks.gpu.ground import EXPECTED, Ground, Row, end_child, start_child
from benchmarks.reliability.recovery import AUTO, SCRIPT, seen_samples
from benchmarks.trials.ranks import launch

BATCH = 8  # samples of a step
CAP_BYTES = 2 * GIB
STEPS, LONG_STEPS, TOKENS = 30, "7,19", 4096
_OPTIONS = {"output_dir": "out", "save_steps": "5", "save_total_limit": "3", "report_to": "none", "seen": "seen"}


def run(ground: Ground) -> Iterator[Row]:
    folder = ground.folder
    arguments = {**vars(ground), "folder": str(folder), "beside": str(ground.beside)}
    process = start_child("launch", arguments)
    log, shown = folder / "launch.log", 0
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end_child, process, ground.seconds)
        while shown < len(said := lines_of(log)) or not ended.done():
            for line in said[shown:]:
                at, text = line.split(" ", 1)
                yield {"attempt": "log", "at": at, "said": text[:300]}
            shown = len(said)
            time.sleep(0.5)
    child = ended.result()
    if child.result is None:
        yield {"attempt": "all", "why": child.stderr[-1500:], EXPECTED: False}
        return
    yield from child.result["attempts"]
    yield {"attempt": "all", **child.result["whole"]}


def lines_of(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the launch in this process, whose log is read meanwhile; return its attempts and the whole."""
    before = os.dup(1), os.dup(2)
    with open(os.path.join(arguments["folder"], "training.log"), "wb") as log:  # a pipe would fill
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        return trained(
            Ground(**{**arguments, "folder": Path(arguments["folder"]), "beside": Path(arguments["beside"])})
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(before[0], 1)
        os.dup2(before[1], 2)


def trained(ground: Ground) -> dict[str, Any]:
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
    ladder = [rung(size) for size in (8, 1)]
    hardware = dataclasses.replace(ground.hardware(), memory_cap_bytes=CAP_BYTES)  # of a CPU rank, too
    summary = launch(job, hardware, ladder, folder, max_restarts=6)

    whole = seen_samples(folder) == {step: set(range(BATCH * step, BATCH * (step + 1))) for step in range(steps)}
    attempts = [
        {
            "attempt": number,
            "candidate": attempt.candidate,
            "steps": attempt.steps,
            "s": attempt.seconds,
            "ended": attempt.ended,
            "resumed from": attempt.resumed_from or None,
        }
        for number, attempt in enumerate(summary.attempts)
    ]
    restarts = len(summary.attempts) - 1
    row: Row = {"exit": summary.code, "every sample as without failures": whole, "restarts": restarts}
    row |= {"s": time.monotonic() - began, EXPECTED: summary.code == 0 and whole and restarts > 0}
    return {"attempts": attempts, "whole": row}


def rung(micro_batch: int) -> Rung:
    knobs = {"zero_stage": 1, MICRO_BATCH: micro_batch, ACCUMULATION: BATCH // micro_batch, "overlap_comm": False}
    sizes = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    return Rung(Candidate.of({**knobs, **sizes}), 1e9, 1.0, True)
