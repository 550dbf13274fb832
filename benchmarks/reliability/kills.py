"""SIGKILL of tuner, rank and fork server, alone and together: `python benchmarks/reliability/kills.py [--episodes 14]`.

One episode kills once, at a moment and of the victims that its seed draws, in a real study on two CPU ranks. After it: a tuner
that lives goes on; else no process is left. Every stored trial is in the study as it was, the next call measures and finds a
winner, and after it no process, shared memory, socket, temporary folder or checkpoint is left. What does not hold is a
violation. `--first SEED` begins elsewhere, and the rows of other seeds in `--json` are kept.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.problem.outcome import Outcome
from autotune.search.study import StudyStore
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from benchmarks.reliability.fault_ground import Ground
from benchmarks.reliability.planting import SPACE, lost
from benchmarks.reliability.study_calls import last_line, start, trial_folders, wait_for

TUNER, SERVER, RANK = "tuner", "fork server", "rank"
VICTIMS = [some for count in (3, 1, 2) for some in itertools.combinations((TUNER, SERVER, RANK), count)]
END_SECONDS = 60.0  # for a call that is asked to end


def found_of(folder: Path) -> dict[int, Outcome]:
    """The outcomes that the study has stored, by number."""
    records = StudyStore.load(str(folder / "runs/s")).records()
    return {record.number: record.outcome for record in records if record.outcome is not None}


def processes_of(ground: Ground, call: subprocess.Popen[bytes]) -> dict[str, list[psutil.Process]]:
    """The call's processes by what they are."""
    servers = [
        one
        for one in ground.processes(set())
        if "autotune.workers.fork_server" in one.cmdline() and one.pid != call.pid
    ]
    ranks = [rank for server in servers for rank in server.children() if rank not in servers]
    return {TUNER: [psutil.Process(call.pid)], SERVER: servers, RANK: ranks}


def strike(ground: Ground, call: subprocess.Popen[bytes], victims: tuple[str, ...], chosen: random.Random) -> int:
    """Kill one process of each kind in a random order; return how many there were."""
    there = processes_of(ground, call)
    killed = 0
    for kind in chosen.sample(victims, len(victims)):
        with suppress(psutil.Error, IndexError):
            chosen.choice(there[kind]).kill()
            killed += 1
    return killed


def episode(ground: Ground, seed: int) -> dict[str, Any]:
    chosen, victims = random.Random(seed), VICTIMS[seed % len(VICTIMS)]
    folder = ground.root / f"kills{seed}"
    folder.mkdir()
    (folder / "faults.yaml").write_text(SPACE)
    violations: list[str] = []
    began = time.monotonic()
    with start(folder, "--max-trials", "60") as call:
        if not wait_for(lambda: trial_folders(folder) or call.poll() is not None) or call.poll() is not None:
            raise RuntimeError(f"the call starts no trial: {last_line(folder)}")
        time.sleep(chosen.uniform(0.0, 8.0))
        killed = strike(ground, call, victims, chosen)
        if TUNER not in victims:
            at = trial_folders(folder)
            if not wait_for(lambda: trial_folders(folder) > at or call.poll() is not None):
                violations.append("the tuner did not go on")
            call.send_signal(signal.SIGINT)
        try:
            call.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            violations.append("the tuner does not end")
            call.kill()
    violations += ground.leftovers(set(), sockets=TUNER not in victims)
    told = found_of(folder)
    again = time.monotonic()
    with start(folder, "--max-trials", "1") as call:
        code = call.wait(timeout=2 * END_SECONDS)
    resumed = time.monotonic() - again
    if code:
        violations.append(f"the next call ended with {code}: {last_line(folder)}")
    store = StudyStore.load(str(folder / "runs/s"))
    violations += lost(told, store)
    if store.winner is None:
        violations.append("the next call has no winner")
    violations += ground.leftovers(set(), folder / "runs/s/trials")
    shutil.rmtree(folder)
    return {
        "seed": seed,
        "killed": " + ".join(victims),
        "processes": killed,
        "trials stored": len(told),
        "next call, s": round(resumed, 1),
        "seconds": round(time.monotonic() - began, 1),
        "violations": "; ".join(violations),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--episodes", type=int, default=2 * len(VICTIMS))
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    arguments = parse(parser, episodes=1)
    ground, seeds = Ground(), range(arguments.first, arguments.first + arguments.episodes)
    rows = kept_rows(arguments.json, "seed", seeds)
    try:
        for seed in seeds:
            rows.append(episode(ground, seed))
            print(rows[-1], flush=True)
            write_json(arguments.json, sorted(rows, key=lambda one: int(one["seed"])))
    finally:
        ground.close()
    print_table("processes killed in a study", rows)
    if bad := [row for row in rows if row["violations"]]:
        raise SystemExit(f"{len(bad)} episodes with violations")


if __name__ == "__main__":
    main()
