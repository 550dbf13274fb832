"""Time to recover under `autotune launch`, on two CPU ranks:
`python benchmarks/reliability/recovery.py [--only oom,rank,node,overhead] [--kills 20] [--turns 300] [--json FILE]`.

- `oom`: a Trainer script of 60 steps whose 7th, 19th and 40th batches are too long for the memory cap.
- `rank`: the same without long batches. A rank is killed at random moments.
- `node`: the same on two nodes over ssh. The second node loses its power and returns after 10 s.
- `overhead`: the same undisturbed, against torchrun alone, in turn (`benchmarks/trials/inturn.py`): seconds of a step.

Seconds count from the last forward before a failure to the end of the next optimizer step. The samples of every step are
compared with those of an undisturbed training. Rows of other parts in FILE are kept.
"""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.transports import Ssh, read_hostfile
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.recovery.ladder import Rung
from autotune.util.units import MIB
from benchmarks.cluster.node_grounds import Unavailable, made_here, variables
from benchmarks.common import CANNOT_RUN, HERE, command_line, kept_rows, parse, print_table, write_json
from benchmarks.trials.inturn import ratio, take_turns, torchrun, under_launch
from benchmarks.trials.ranks import LaunchSummary, training_ranks
from benchmarks.trials.ranks import launch as launch_training
from tests.executors.cluster import hosts

SCRIPT = HERE.parent / "tests" / "scripts" / "long_batches.py"
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
BATCH = 8
PARTS = ["oom", "rank", "node", "overhead"]
AWAY_SECONDS = 10.0  # of a node without power
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


def seen_samples(folder: Path) -> dict[int, set[int]]:
    """Return the samples of each step, as the attempt that kept the step saw them."""
    steps: dict[int, set[int]] = {}
    for seen in sorted(folder.glob("seen.rank*.jsonl")):
        mine: dict[int, list[int]] = {}
        started = False
        for line in seen.read_text().splitlines():
            entry = json.loads(line)
            if "started" in entry:
                started = True
                continue
            if started:  # what an earlier attempt trained from here on is trained again
                mine = {step: found for step, found in mine.items() if step < entry["step"]}
                started = False
            mine.setdefault(entry["step"], []).extend(entry["samples"])
        for step, found in mine.items():
            assert len(found) == len(set(found)), f"{seen.name} has a sample of step {step} twice"
            steps.setdefault(step, set()).update(found)
    return steps


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
        before, after = entries[at - 1], [entry for entry in entries[at + 1 :] if "step" in entry]
        stepped = [entry["at"] for entry in after if entry["step"] > after[0]["step"]]
        if "step" in before and stepped:
            found.append((stepped[0] - before["at"], before["step"] - after[0]["step"] + 1))
    return found


def judged(part: str, what: str, folder: Path, steps: int, summary: LaunchSummary, seconds: float) -> dict[str, Any]:
    expected = {step: set(range(BATCH * step, BATCH * (step + 1))) for step in range(steps)}
    again = recoveries(folder)
    row = {
        "part": part,
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
    ours = under_launch(training(words, folder, ranks), rung(micro_batch, ranks).candidate, folder)
    theirs = torchrun("torchrun", [*words, "--per_device_train_batch_size", str(micro_batch)], folder, ranks)
    take_turns([ours, theirs], turns)
    slower, spread = ratio(theirs, ours)
    return {"part": "overhead", "case": f"overhead, {turns} turns each", "launch / torchrun, step": slower, "±": spread}


def node_killed(folder: Path, size: Size, kills: int, seed: int) -> LaunchSummary:
    """Cut the second node's link and kill all that runs there, so many times, each after one to nine steps of an attempt.

    Raises:
        Unavailable: this machine cannot have such nodes.
    """
    if hosts.WHY_NOT:
        raise Unavailable(hosts.WHY_NOT)
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(AUTO))
    (made_folder := folder.parent / f"{folder.name}-hosts").mkdir()
    (logs := folder.parent / f"{folder.name}-logs").mkdir()
    chosen, done = random.Random(seed), threading.Event()
    with made_here(hosts.made_hosts, made_folder) as made, variables(PATH=made.path):
        if not made.own_links:
            raise Unavailable("no network namespaces here")

        def kill() -> None:
            for number in range(kills):
                steps = chosen.randint(1, 9)
                while trained(folder) < (number + 1, steps) and not done.wait(0.02):
                    pass
                if done.wait(chosen.uniform(0.0, 0.3)):
                    return
                made[1].cut()
                made[1].stop()
                done.wait(AWAY_SECONDS)
                made[1].mend()
                made[1].start(made_folder / "authorized")

        needs = NodeRequirements("cpu", path=str(folder))
        with closing(Cluster(read_hostfile(made.hostfile()), Ssh(), needs, logs, print_line=print)) as cluster:
            hardware = cluster.reach()
            thread = threading.Thread(target=kill, daemon=True)
            thread.start()
            job = training(argv(size.steps), folder, 2)
            summary = launch_training(job, hardware, size.ladder, folder, max_restarts=kills + 5, ground=cluster)
            done.set()
            thread.join()
    return summary


def parts_of(arguments: Namespace, root: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the parts that `--only` names."""
    size, only = SMALL if arguments.small else Size(), arguments.only
    left, number, peak = arguments.kills if "rank" in only else 0, 0, 0
    while left > 0:
        began, kills = time.monotonic(), min(5, left)
        folder = root / f"kill{number}"
        summary, reached = peak_of_ranks(partial(killed, folder, size, kills, number))
        met, peak = len(summary.attempts) - 1, max(peak, reached)
        what = f"a rank killed {met} times"
        yield judged("rank", what, folder, size.steps, summary, time.monotonic() - began)
        left, number = left - met, number + 1
    if "oom" in only:
        if not peak:
            _, peak = peak_of_ranks(partial(launch, root / "calm", argv(size.steps), size, None, 0))
        yield out_of_memory(root / "long", size, peak)
    if "node" in only:
        began, two = time.monotonic(), dataclasses.replace(size, ranks=2)
        try:
            summary = node_killed(root / "nodes", two, arguments.node_kills, 0)
            what = f"a node without power for {AWAY_SECONDS:.0f} s, {len(summary.attempts) - 1} times"
            yield judged("node", what, root / "nodes", two.steps, summary, time.monotonic() - began)
        except Unavailable as why:
            print(f"left out: node: {why}", file=sys.stderr)
    if "overhead" in only:
        yield overhead(root / "overhead", arguments.turns, size.ranks)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=PARTS, metavar="PART,…", help="default: all"
    )
    parser.add_argument("--kills", type=int, default=20, help="of a rank")
    parser.add_argument("--node-kills", type=int, default=5)
    parser.add_argument("--turns", type=int, default=300, help="of launch and torchrun, for the overhead")
    arguments = parse(parser, kills=1, node_kills=1, turns=2)
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"--only {','.join(unknown)}: expected {', '.join(PARTS)}")
    rows = kept_rows(arguments.json, "part", arguments.only)
    with tempfile.TemporaryDirectory() as name:
        measured = list(parts_of(arguments, Path(name)))
    if not measured:
        raise SystemExit(CANNOT_RUN)
    rows += measured
    rows.sort(key=lambda row: PARTS.index(row["part"]))
    print_table("training under autotune launch", rows, keys=2)
    write_json(arguments.json, rows)


def out_of_memory(folder: Path, size: Size, peak_bytes: int) -> dict[str, Any]:
    """Batches that are too long for the cap, in a training that fits otherwise."""
    began = time.monotonic()
    words = argv(size.steps, size.long_steps, tokens=1024)
    summary = launch(folder, words, size, peak_bytes + 250 * MIB, 10)
    *before, last = [f"{step}th" for step in size.long_steps]
    what = f"{', '.join(before)} and {last} batch too long" if before else f"{last} batch too long"
    return judged("oom", what, folder, size.steps, summary, time.monotonic() - began)


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
