"""How trials behave on this machine: `python benchmarks/trials.py [--faults 100] [--json FILE]`.

Five questions, each answered side by side in this one run: what the fork server saves against a cold start, what a
configuration costs in a ladder, how soon the next trial starts after one was killed, hung or ran out, whether anything
is left behind, and whether memory repeats.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import print_table, train_plainly, write_json

from autotune.executors.base import Effort
from autotune.executors.local import Deadlines, LocalExecutor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.results.export import deepspeed_config
from autotune.units import MIB

QUICK = Effort(min_steps=2, max_steps=3, min_seconds=0.0)


def candidate(stage: int, micro_batch: int = 1, **knobs: Any) -> Candidate:
    batch = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1}
    return Candidate.of({"zero_stage": stage, "reduce_bucket_size": 500_000, "sub_group_size": 10**6, **batch, **knobs})


def run(executor: LocalExecutor, one: Candidate, name: str, effort: Effort = QUICK) -> Any:
    session = executor.session(one, name)
    try:
        return session.measure(one, effort, 120.0), session
    finally:
        session.close()


def start_up(job: Job, hardware: Any, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a trial outside its measured steps, fork and cold start in turn."""
    executors = {}
    for isolation in ("fork", "spawn"):
        executors[isolation] = LocalExecutor(job, hardware, folder / isolation, [candidate(2)], isolation=isolation)
        executors[isolation].open(print)
    seconds: dict[str, list[float]] = {"fork": [], "spawn": []}
    for at in range(rounds):
        for isolation, executor in executors.items():
            outcome, _ = run(executor, candidate(2), f"{at}")
            seconds[isolation].append(outcome.outside_seconds)
    for executor in executors.values():
        executor.close()
    medians = {isolation: statistics.median(values) for isolation, values in seconds.items()}
    return [
        {
            "measure": "seconds of a trial outside measured steps",
            "fork": medians["fork"],
            "cold": medians["spawn"],
            "ratio": medians["spawn"] / medians["fork"],
            "target": ">= 3",
        }
    ]


def a_configuration(job: Job, hardware: Any, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds outside measured steps for each configuration of a ladder of four, against a cold torchrun of one."""
    rungs = [candidate(2, size) for size in (1, 2, 4, 8)]
    executor = LocalExecutor(job, hardware, folder, rungs)
    executor.open(print)
    ours, cold = [], []
    for at in range(rounds):
        session = executor.session(rungs[0], str(at))
        outside = [session.measure(one, QUICK, 120.0).outside_seconds for one in rungs]
        session.close()
        ours.append(sum(outside) / len(rungs))
        began = time.monotonic()
        trained = train_plainly(job, deepspeed_config(rungs[0], job), False, 10, hardware.device)
        cold.append(time.monotonic() - began - 10 * trained["step_seconds"])
    executor.close()
    ratio = statistics.median(a / b for a, b in zip(ours, cold, strict=True))
    return [
        {
            "measure": "seconds outside measured steps",
            "a configuration of a ladder of four": statistics.median(ours),
            "cold torchrun": statistics.median(cold),
            "median ratio": ratio,
            "target": "<= 0.125",
        }
    ]


def faults(job: Job, hardware: Any, folder: Path, count: int) -> list[dict[str, Any]]:
    """Seconds from noticing a planted failure to the next trial's ranks running, and what is left behind."""
    planted: dict[str, Any] = {}
    executor = LocalExecutor(
        job, hardware, folder, [candidate(2)], deadlines=Deadlines(step=3.0), fault=lambda name: planted or None
    )
    executor.open(print)
    seconds: dict[str, list[float]] = {"hang": [], "oom": [], "SIGKILL": []}
    kinds: dict[str, set[str]] = {what: set() for what in seconds}
    before = len(psutil.Process().children(recursive=True))
    orphans = 0
    for at in range(count):
        what = list(seconds)[at % 3]
        planted.update(rank=1, where="forward", what=what)
        outcome, session = run(executor, candidate(2), f"fault{at}")
        kinds[what].add(outcome.kind.value)
        planted.clear()
        following = executor.session(candidate(2), f"next{at}")
        following.launch(math.inf)  # the next trial has started when its ranks answered
        assert session.failed_at is not None
        seconds[what].append(time.monotonic() - session.failed_at)
        following.close()
        orphans += max(
            0, len([p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]) - before
        )
    executor.close()
    return [
        {
            "failure of one rank of two": what,
            "trials": len(values),
            "classified as": ", ".join(sorted(kinds[what])),
            "median s to the next trial": statistics.median(values),
            "worst": max(values),
            "target": "< 5",
            "orphans": orphans,
        }
        for what, values in seconds.items()
    ]


def memory(job: Job, hardware: Any, folder: Path) -> list[dict[str, Any]]:
    """The same candidate's peak when measured first and after 20 others."""
    executor = LocalExecutor(job, hardware, folder, [candidate(2)])
    executor.open(print)
    first = run(executor, candidate(2, 4), "first")[0].measurement
    idle = []
    for at in range(20):
        run(executor, candidate(at % 4, 1 + at % 5), f"other{at}")
        idle.append(executor.meter.is_idle())
    last = run(executor, candidate(2, 4), "last")[0].measurement
    executor.close()
    assert first is not None
    assert last is not None
    change = 100 * abs(last.peak_bytes / first.peak_bytes - 1)
    return [
        {
            "memory": "same candidate first and after 20 others",
            "first MiB": first.peak_bytes / MIB,
            "after MiB": last.peak_bytes / MIB,
            "change %": change,
            "target": "< 3",
            "idle between": all(idle),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    hardware = detect(arguments.device, 2 if arguments.device == "cpu" else 1)
    job = Job(resolve_model("tiny-llama"), hardware.count, 32, "fp32" if arguments.device == "cpu" else "bf16")
    results: dict[str, Any] = {"hardware": str(hardware)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["start_up"] = start_up(job, hardware, folder, arguments.rounds)
        print_table("fork server against cold start, alternating", results["start_up"])
        results["ladder"] = a_configuration(job, hardware, folder / "ladder", arguments.rounds)
        print_table("a configuration measured, ladder and cold start alternating", results["ladder"])
        results["memory"] = memory(job, hardware, folder / "memory")
        print_table("memory repeats", results["memory"])
        if job.ranks > 1:
            results["faults"] = faults(job, hardware, folder / "faults", arguments.faults)
            print_table("after a failure", results["faults"])
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
