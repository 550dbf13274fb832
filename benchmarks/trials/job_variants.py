"""Seconds of a step of two variants of a job on CPU ranks, next to their prediction before any trial:
`python benchmarks/trials/job_variants.py [--rounds 5] [--only loss|compile|qlora] [--json FILE]`.

`loss`: the whole loss and the loss in chunks, of models whose head is a small and a large part of the work. `qlora`: adapters on
16-bit and on 4-bit base weights (needs bitsandbytes). `compile`: eager and compiled. Both engines are up, and measured in turn.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import CHUNKED, Job, Lora
from autotune.problem.knobs import COMPILED
from autotune.problem.models import resolve_model
from autotune.util.units import MIB
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.trials.ranks import opened

MEASURE_SPEC = MeasureSpec(min_steps=3, max_steps=12, min_seconds=1.0, max_seconds=4.0)
STAGES = (0, 2)
LORA = Lora(8)


def with_vocabulary(name: str, size: int) -> Job:
    """A job of a tiny model whose head has this many rows."""
    model = resolve_model(name)
    model = dataclasses.replace(model, name=f"{name} of {size} words", config={**model.config, "vocab_size": size})
    return Job(model, 2, 128, "fp32")


def pairs(only: str) -> list[tuple[str, Job, Job, int]]:
    """What is compared, the usual job, the other one, and the stage of both."""
    compared = []
    for size in (4096, 32768):
        job = with_vocabulary("tiny-llama", size)
        compared.append(("loss", job, dataclasses.replace(job, loss=CHUNKED)))
    usual = Job(resolve_model("tiny-llama"), 2, 128, "bf16", lora=LORA)
    compared.append(("qlora", usual, dataclasses.replace(usual, lora=dataclasses.replace(LORA, quantize="nf4"))))
    for name in ("tiny-llama", "tiny-gemma-2", "tiny-mixtral"):
        eager = Job(resolve_model(name), 2, 128, "fp32")
        compared.append((COMPILED, eager, eager))
    return [(*jobs, stage) for jobs in compared if only in ("", jobs[0]) for stage in STAGES]


def candidate(stage: int, compiled: bool = False) -> Candidate:
    small = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    return Candidate.of(
        {
            "zero_stage": stage,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            COMPILED: compiled,
            **(small if stage else {}),
        }
    )


def measured(what: str, jobs: tuple[Job, Job], stage: int, rounds: int, folder: Path) -> dict[str, Any]:
    """A row of one stage: both steps and peaks, and how many times as long the other variant's step takes."""
    candidates, hardware = (candidate(stage), candidate(stage, what == COMPILED)), detect("cpu", 2)
    row: dict[str, Any] = {"what": what, "model": jobs[0].model.name, "stage": stage}
    steps: tuple[list[float], list[float]] = ([], [])
    peaks = [0, 0]
    with opened(jobs[0], hardware, folder, list(candidates)) as executor:
        sessions = [executor.session(candidates[which], str(which), job=job) for which, job in enumerate(jobs)]
        for _ in range(rounds):
            for which, session in enumerate(sessions):
                outcome = session.measure(candidates[which], MEASURE_SPEC, 200.0)
                if outcome.measurement is None:
                    return {**row, "failed": outcome.reason}
                steps[which].append(outcome.measurement.step_seconds)
                peaks[which] = max(peaks[which], outcome.measurement.peak_bytes)
        for session in sessions:
            session.close()
    ratios = [other / usual for usual, other in zip(*steps, strict=True)]
    predicted = [step_seconds(job, hardware, one) for job, one in zip(jobs, candidates, strict=True)]
    return {
        **row,
        "usual, s": statistics.median(steps[0]),
        "other, s": statistics.median(steps[1]),
        "other / usual": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "predicted": predicted[1] / predicted[0],
        "usual, MiB": peaks[0] / MIB,
        "other, MiB": peaks[1] / MIB,
        "rounds": rounds,
    }


def step_seconds(job: Job, hardware: Hardware, one: Candidate) -> float:
    return Predictor(job, hardware, trace_job(job, device="cpu")).predict(one).step_seconds


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("", "loss", "qlora", COMPILED), default="")
    arguments = parse(parser, rounds=1, only="loss")
    rows = []
    for what, usual, other, stage in pairs(arguments.only)[: 1 if arguments.small else None]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(what, (usual, other), stage, arguments.rounds, Path(folder)))
        print(rows[-1], flush=True)
    print_table("a step of each variant on two CPU ranks", rows, keys=3)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
