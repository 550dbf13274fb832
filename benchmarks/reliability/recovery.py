"""`autotune launch` under fire: `python benchmarks/reliability/recovery.py [--kills 20] [--turns 300] [--json FILE]`, on two
CPU ranks.

1. A Trainer script of 60 steps whose 7th, 19th and 40th batches are too long for the memory cap.
2. The same without long batches, a rank killed at random moments.
3. The same undisturbed, against torchrun alone, in turn (`benchmarks/trials/inturn.py`): seconds of a step.

Every step's samples are compared with those of an undisturbed training.
"""

from __future__ import annotations

import json
import random
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.recovery.ladder import Rung
from autotune.util.units import MIB
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.trials.inturn import ratio, take_turns, torchrun, under_autotune
from benchmarks.trials.ranks import LaunchSummary, training_ranks
from benchmarks.trials.ranks import launch as launch_training
from benchmarks.trials.scripts import AUTO, OWN

SCRIPT = OWN / "long_batches.py"
BATCH = 8
FLAGS = [
    "--deepspeed",
    "ds.json",
    "--output_dir",
    "out",
    "--save_steps",
    "5",
    "--save_total_limit",
    "3",
    "--report_to",
    "none",
    "--seen",
    "seen",
    "--use_cpu",
]


@dataclass(frozen=True)
class Size:
    """Of the trainings under fire."""

    steps: int = 60
    long_steps: tuple[int, ...] = (7, 19, 40)
    ranks: int = 2

    @property
    def ladder(self) -> list[Rung]:
        return [rung(size, self.ranks) for size in (4, 2, 1)]


SMALL = Size(12, (7,), ranks=1)  # half of the starts, which are most of its time

seen_samples = runpy.run_path(str(SCRIPT), run_name="read")["seen_samples"]


def rung(micro_batch: int, ranks: int = 2) -> Rung:
    knobs = {
        "zero_stage": 1,
        MICRO_BATCH: micro_batch,
        ACCUMULATION: BATCH // ranks // micro_batch,
        "reduce_bucket_size": 500_000,
        "allgather_bucket_size": 500_000,
        "overlap_comm": False,
    }
    return Rung(Candidate.of(knobs), 1e9, 1.0, True)


def argv(steps: int, long_steps: tuple[int, ...] = (), tokens: int = 512) -> list[str]:
    long = ",".join(map(str, long_steps))
    return [str(SCRIPT), *FLAGS, "--max_steps", str(steps), "--long_steps", long, "--long", str(tokens)]


def training(words: list[str], folder: Path, ranks: int) -> Job:
    return Job(ModelSpec("long", {}, str(SCRIPT)), ranks, 32, "fp32", script=Script(tuple(words), str(folder)))


def launch(folder: Path, words: list[str], size: Size, cap: int | None, restarts: int) -> LaunchSummary:
    folder.mkdir(exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(AUTO))
    job, hardware = training(words, folder, size.ranks), detect("cpu", size.ranks, memory_cap_bytes=cap)
    return launch_training(job, hardware, size.ladder, folder, max_restarts=restarts)


def trained(folder: Path) -> tuple[int, int]:
    """Attempts that have come as far as their script, and the steps that the last of them has begun."""
    try:
        entries = [json.loads(line) for line in (folder / "seen.rank0.jsonl").read_text().splitlines()]
    except (OSError, ValueError):  # not yet there, or being written
        return 0, 0
    starts = [at for at, entry in enumerate(entries) if "started" in entry]
    return len(starts), len({entry["step"] for entry in entries[starts[-1] + 1 :]}) if starts else 0


def recoveries(folder: Path) -> list[tuple[float, int]]:
    """(seconds, steps) of each restart: from the last forward before the failure to the first optimizer step after it, and the
    steps that were begun twice. A step is taken as done when the next one begins."""
    entries = [json.loads(line) for line in (folder / "seen.rank0.jsonl").read_text().splitlines()]
    found, starts = [], [at for at, entry in enumerate(entries) if "started" in entry]
    for at in starts[1:]:
        before, after = entries[at - 1], entries[at + 1 :]
        stepped = [entry["at"] for entry in after if "step" in entry and entry["step"] > after[0].get("step", 0)]
        if "step" in before and stepped:
            found.append((stepped[0] - before["at"], before["step"] - after[0]["step"] + 1))
    return found


def judged(what: str, folder: Path, steps: int, summary: LaunchSummary, seconds: float) -> dict[str, Any]:
    expected = {step: set(range(BATCH * step, BATCH * (step + 1))) for step in range(steps)}
    again = recoveries(folder)
    row = {
        "case": what,
        "exit": summary.code,
        "restarts": len(summary.attempts) - 1,
        "every sample as without failures": seen_samples(folder) == expected,
        "to the next step, s (median)": statistics.median(gap for gap, _ in again) if again else None,
        "to the next step, s (most)": max((gap for gap, _ in again), default=None),
        "steps trained again (most)": max((steps for _, steps in again), default=None),
        "seconds": seconds,
    }
    print(json.dumps(row), flush=True)
    return row


def killed(folder: Path, size: Size, kills: int, seed: int) -> LaunchSummary:
    """Kills a rank at random moments of its training, so many times: after one to nine steps of an attempt, one time in
    four while it still starts."""
    chosen, done = random.Random(seed), threading.Event()

    def kill() -> None:
        for _ in range(kills):
            while not training_ranks() and not done.wait(0.05):
                pass
            before, (attempts, _) = {p.pid for p in training_ranks()}, trained(folder)
            steps = chosen.randint(1, 9)
            if chosen.random() < 0.25:
                done.wait(chosen.uniform(0.0, 6.0))
            else:
                while trained(folder) < (attempts + 1, steps) and not done.wait(0.02):
                    pass
                done.wait(chosen.uniform(0.0, 0.3))
            alive = [p for p in training_ranks() if p.pid in before]
            if alive and not done.is_set():
                chosen.choice(alive).send_signal(signal.SIGKILL)
            while {p.pid for p in training_ranks()} & before and not done.wait(0.1):
                pass

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    summary = launch(folder, argv(size.steps), size, None, kills + 5)
    done.set()
    thread.join()
    return summary


def overhead(folder: Path, turns: int, ranks: int) -> dict[str, Any]:
    """Seconds of a step under launch and under torchrun, as the training's own log has them."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(AUTO))
    words = argv(100_000)
    words[words.index("--save_steps") + 1] = "100000"
    micro_batch = BATCH // ranks
    ours = under_autotune("launch", training(words, folder, ranks), rung(micro_batch, ranks).candidate, folder)
    theirs = torchrun("torchrun", [*words, "--per_device_train_batch_size", str(micro_batch)], folder, ranks)
    take_turns([ours, theirs], turns)
    slower, spread = ratio(theirs, ours)
    return {"case": f"overhead, {turns} turns each", "launch / torchrun, step": slower, "±": spread}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--turns", type=int, default=300, help="of launch and torchrun, for the overhead")
    arguments = parse(parser, kills=1, turns=2)
    size = SMALL if arguments.small else Size()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        left, part, peak = arguments.kills, 0, 0
        while left > 0:
            began, kills = time.monotonic(), min(5, left)
            folder = root / f"kill{part}"
            summary, reached = peak_of_ranks(partial(killed, folder, size, kills, part))
            met, peak = len(summary.attempts) - 1, max(peak, reached)
            what = f"a rank killed {met} times"
            rows.append(judged(what, folder, size.steps, summary, time.monotonic() - began))
            left, part = left - met, part + 1
        if not peak:
            _, peak = peak_of_ranks(partial(launch, root / "calm", argv(size.steps), size, None, 0))
        rows.insert(0, out_of_memory(root / "long", size, peak))
        rows.append(overhead(root / "overhead", arguments.turns, size.ranks))
    print_table("training under autotune launch", rows)
    write_json(arguments.json, rows)


def out_of_memory(folder: Path, size: Size, peak_bytes: int) -> dict[str, Any]:
    """Batches that are too long for the cap, in a training that fits otherwise."""
    began = time.monotonic()
    words = argv(size.steps, size.long_steps, tokens=1024)
    summary = launch(folder, words, size, peak_bytes + 250 * MIB, 10)
    *before, last = [f"{step}th" for step in size.long_steps]
    what = f"{', '.join(before)} and {last} batch too long" if before else f"{last} batch too long"
    return judged(what, folder, size.steps, summary, time.monotonic() - began)


def peak_of_ranks(work: Callable[[], LaunchSummary]) -> tuple[LaunchSummary, int]:
    """What `work` gives, and the highest private writable memory of any rank meanwhile, in bytes."""
    peak, done = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.05):
            for process in psutil.Process().children():
                try:
                    pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="utf-8").split()[5])
                except (OSError, IndexError):
                    continue
                peak = max(peak, pages * 4096)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    summary = work()
    done.set()
    thread.join()
    return summary, peak


if __name__ == "__main__":
    main()
