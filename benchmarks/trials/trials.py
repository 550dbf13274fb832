"""How trials behave on this machine: `python benchmarks/trials/trials.py [--faults 100] [--json FILE]`.

Five questions, each answered side by side in this one run: what the fork server saves against a cold start, what a
configuration costs in a ladder, how soon the next trial starts after one was killed, hung or ran out, whether anything
is left behind, and whether memory repeats.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.util.units import MIB
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.trials.ranks import WARMUP_STEPS, Deadlines, LocalExecutor, opened, train_plainly

QUICK = MeasureSpec(min_steps=2, max_steps=3, min_seconds=0.0)


def candidate(stage: int, micro_batch: int = 1, **knobs: Any) -> Candidate:
    batch = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1}
    return Candidate.of({"zero_stage": stage, "reduce_bucket_size": 500_000, "sub_group_size": 10**6, **batch, **knobs})


def run(executor: LocalExecutor, one: Candidate, name: str, measure_spec: MeasureSpec = QUICK) -> Any:
    session = executor.session(one, name)
    try:
        return session.measure(one, measure_spec, 120.0), session
    finally:
        session.close()


def start_up(warm: LocalExecutor, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a trial outside its measured steps, fork and cold start in turn."""
    seconds: dict[str, list[float]] = {"fork": [], "spawn": []}
    with opened(warm.job, warm.hardware, warm.folder / "spawn", [candidate(2)], isolation="spawn") as cold:
        for at in range(rounds):
            for isolation, executor in (("fork", warm), ("spawn", cold)):
                outcome, _ = run(executor, candidate(2), f"start{at}")
                seconds[isolation].append(outcome.outside_seconds)
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


def a_configuration(executor: LocalExecutor, rounds: int) -> list[dict[str, Any]]:
    """Seconds outside measured steps for each configuration of a ladder of four, against a cold torchrun of one."""
    rungs = [candidate(2, size) for size in (1, 2, 4, 8)]
    job, device = executor.job, executor.hardware.device
    ours, cold = [], []
    for at in range(rounds):
        session = executor.session(rungs[0], f"ladder{at}")
        outside = [session.measure(one, QUICK, 120.0).outside_seconds for one in rungs]
        session.close()
        ours.append(sum(outside) / len(rungs))
        began = time.monotonic()
        trained = train_plainly(job, rungs[0].ds_config(job), False, 10 - WARMUP_STEPS, device)
        cold.append(time.monotonic() - began - 10 * trained["step_seconds"])
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


def faults(executor: LocalExecutor, planted: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Seconds from noticing a failure until the next trial's ranks have started, and what is left behind.

    What stands in `planted` happens in a trial's ranks.
    """
    seconds: dict[str, list[float]] = {"hang": [], "oom": [], "SIGKILL": []}
    kinds: dict[str, set[str]] = {what: set() for what in seconds}
    orphans, before = 0, living_children()
    patient, executor.deadlines = executor.deadlines, Deadlines(step=3.0)
    for at in range(count):
        what = list(seconds)[at % 3]
        planted.update(rank=1, where="forward", what=what)
        outcome, session = run(executor, candidate(2), f"fault{at}")
        kinds[what].add(outcome.kind.value)
        planted.clear()
        assert session.failed_at is not None
        waited = time.monotonic() - session.failed_at
        following, _ = run(executor, candidate(2), f"next{at}")
        seconds[what].append(waited + following.measurement.phase_seconds["start"])
        orphans += max(0, living_children() - before)
    executor.deadlines = patient
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


def living_children() -> int:
    return len([p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE])


def memory(executor: LocalExecutor, others: int) -> list[dict[str, Any]]:
    """The same candidate's peak when measured first and after others."""
    first = run(executor, candidate(2, 4), "first")[0].measurement
    idle = []
    for at in range(others):
        run(executor, candidate(at % 4, 1 + at % 5), f"other{at}")
        idle.append(not executor.meter.unreleased_memory_warnings())
    last = run(executor, candidate(2, 4), "last")[0].measurement
    assert first is not None
    assert last is not None
    change = 100 * abs(last.peak_bytes / first.peak_bytes - 1)
    return [
        {
            "memory": f"same candidate first and after {others} others",
            "first MiB": first.peak_bytes / MIB,
            "after MiB": last.peak_bytes / MIB,
            "change %": change,
            "target": "< 3",
            "idle between": all(idle),
        }
    ]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--others", type=int, default=20, help="trials between the two of one candidate")
    parser.add_argument("--device", default="cpu")
    arguments = parse(parser, faults=3, rounds=1, others=1)
    hardware = detect(arguments.device, 2 if arguments.device == "cpu" else 1)
    job = Job(resolve_model("tiny-llama"), hardware.count, 32, "fp32" if arguments.device == "cpu" else "bf16")
    results: dict[str, Any] = {"hardware": str(hardware)}
    with tempfile.TemporaryDirectory() as name:
        planted: dict[str, Any] = {}
        with opened(job, hardware, Path(name), [candidate(2)], fault=lambda name: planted or None) as executor:
            results["start_up"] = start_up(executor, arguments.rounds)
            print_table("fork server against cold start, alternating", results["start_up"])
            results["ladder"] = a_configuration(executor, arguments.rounds)
            print_table("a configuration measured, ladder and cold start alternating", results["ladder"])
            results["memory"] = memory(executor, arguments.others)
            print_table("memory repeats", results["memory"])
            if job.ranks > 1:
                results["faults"] = faults(executor, planted, arguments.faults)
                print_table("after a failure", results["faults"])
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
