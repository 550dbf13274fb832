"""A thousand faults: `python benchmarks/reliability/faults.py [--faults 1000] [--json FILE]`, on two CPU ranks.

Faults are drawn at random (of a seed) and planted into real studies, into processes of `autotune run` and into trainings under
`autotune launch`. After each: nothing that was finished is lost; no process, socket, lock or shared memory is left; the next
call goes on; no candidate is tried for ever. What does not hold is a violation, with its seed: `--only SEED` does it again.

A later call with the same `--json` goes on with what is written there, if it is of the same code; `--anew` begins again. What
this machine does not allow (a cgroup, a file that root cannot write) is left out, and the result says so.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.errors import MachineError, UserError
from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.space import parse_space
from autotune.search import storage
from autotune.search.proposer import Proposer
from autotune.search.storage import failures_in_one_line, lock_study, url_of
from autotune.search.study import StudyStore
from autotune.search.tuner import Tuner
from autotune.util.units import MIB
from benchmarks.common import command_line, parse, print_table, tree, write_json
from benchmarks.reliability.fault_ground import Found, Ground
from benchmarks.reliability.planting import SPACE, WEIGHTS, Planter, lost
from benchmarks.reliability.stricken import CALLS, TRAININGS, stricken_calls, stricken_training
from benchmarks.trials.ranks import LocalExecutor

QUICK = MeasureSpec(min_steps=1, max_steps=2, min_seconds=0.0, max_seconds=5.0)
VERIFY = MeasureSpec(full=True, certify=True, min_steps=1, max_steps=1, min_seconds=0.0, max_seconds=5.0)
EPISODES = ("study", "calls", "study", "training", "study", "training", "study", "calls")  # in turn, by seed
EPISODE_SECONDS = 400.0  # one that takes longer hangs
SHARE = 0.8  # of the trials of a study that are struck
CALLS_OF_A_STUDY, TRIALS_OF_A_CALL = 2, 5  # struck; one more call is left in peace


@dataclass(frozen=True)
class Bench:
    """What episodes share: one fork server for all."""

    ground: Ground
    executor: LocalExecutor
    job: Job
    trials: int  # of a struck call


class Hangs(Exception):
    """An episode has no end."""


@contextlib.contextmanager
def opened(trials: int) -> Iterator[Bench]:
    ground = Ground()
    storage.AWAY_SECONDS = 5.0  # a database that is held longer ends the call
    job = Job(resolve_model("tiny-llama"), 2, 32, "fp32")
    hardware = detect("cpu", 2, memory_cap_bytes=900 * MIB)
    executor = LocalExecutor(job, hardware, ground.root / "executor", parse_space(SPACE).candidates(job))
    try:
        executor.open(print)
        yield Bench(ground, executor, job, trials)
    finally:
        executor.close()
        ground.close()


# -- one episode ---------------------------------------------------------------------------------------------------------


def episode(bench: Bench, seed: int) -> dict[str, Any]:
    """One study, a few calls, or a training, under the faults that its seed draws."""
    what = EPISODES[seed % len(EPISODES)]
    chosen, folder = random.Random(seed), bench.ground.root / f"{seed}"
    folder.mkdir()
    found = Found()
    began = time.monotonic()

    def hangs(number: int, frame: object) -> None:
        raise Hangs(f"no end within {EPISODE_SECONDS:.0f} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, EPISODE_SECONDS)
    try:
        if what == "study":
            stricken_study(bench, seed, folder, chosen, found)
        else:
            stricken = stricken_calls if what == "calls" else stricken_training
            stricken(bench.ground, bench.executor, folder, chosen, found)
    except Exception as error:
        found.violations.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        shutil.rmtree(folder, ignore_errors=True)
    again = f"python benchmarks/reliability/faults.py --only {seed}"
    seconds = round(time.monotonic() - began, 1)
    violations = [{"text": text, "again": again} for text in found.violations]
    return {"seed": seed, "episode": what, "seconds": seconds, "faults": found.faults, "violations": violations}


def stricken_study(bench: Bench, seed: int, folder: Path, chosen: random.Random, found: Found) -> None:
    """Calls of a tuner on one study, whose trials are struck; the last call is left in peace, and must go on."""
    file = "study.journal" if chosen.random() < 0.3 else "study.db"
    url = url_of(folder / file)
    bench.executor.folder = folder
    planter = Planter(bench.ground, bench.executor, folder / file, chosen, SHARE, found)
    try:
        for call in range(CALLS_OF_A_STUDY + 1):
            planter.armed = call < CALLS_OF_A_STUDY
            before = set(planter.told)
            planter.ended(one_call(bench, seed, url, folder, planter, bench.trials if planter.armed else 1))
            gc.collect()  # the study of a call that ended in an error lets go of its lock
            lock_study(folder, "s").release()
            found.violations += lost(planter.told, StudyStore.load("s", url))
        went_on = any(outcome.ok for number, outcome in planter.told.items() if number not in before)
        if not went_on:
            found.violations.append(f"the call after {planter.last} measured nothing")
    finally:
        planter.settle()


def one_call(bench: Bench, seed: int, url: str, folder: Path, planter: Planter, trials: int) -> str | None:
    """One call as `autotune run` makes it; the line with which it failed, None where it did not."""
    executor, space = bench.executor, parse_space(SPACE)
    try:
        with failures_in_one_line():
            store, _ = StudyStore.create_or_resume("s", url, folder, bench.job, executor.hardware, space)
            store.lock()
            store.close_interrupted()
            candidates = space.candidates(bench.job)
            predictor = Predictor(bench.job, executor.hardware, trace_job(bench.job))
            proposer = Proposer(candidates, space, predictor, exhaustive=True)
            options: dict[str, Any] = {"search_spec": QUICK, "verify_spec": VERIFY, "observer": planter}
            Tuner(store, executor, proposer, budget_seconds=900, max_trials=trials, **options).run()
    except (UserError, MachineError) as error:
        return str(error)
    return None


# -- all of them -----------------------------------------------------------------------------------------------------------


def summary(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and seconds by kind, and every violation."""
    planted = [(row, fault) for row in each for fault in row["faults"]]
    rows = []
    for kind in (*WEIGHTS, *CALLS, *TRAININGS):
        of_kind = [fault for _, fault in planted if fault["kind"] == kind]
        seconds = [fault["seconds"] for fault in of_kind if fault["seconds"] is not None]
        phases = sorted({fault["phase"] for fault in of_kind})
        goes_on = statistics.median(seconds) if seconds else None
        rows.append(
            {"kind": kind, "planted": len(of_kind), "until work goes on, s, median": goes_on, "in": ", ".join(phases)}
        )
    violations = [found for row in each for found in row["violations"]]
    return {"faults": len(planted), "violations": len(violations), "kinds": rows, "violated": violations}


def earlier_runs(path: Path | None, same: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs written in a file, where they are of the same."""
    if path is None or not path.exists():
        return []
    known = json.loads(path.read_text())
    return list(known["each"]) if {name: known.get(name) for name in same} == same else []


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="how many are planted at least")
    parser.add_argument("--only", type=int, metavar="SEED", help="one episode, as a violation names it")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first episode")
    parser.add_argument("--anew", action="store_true", help="do not go on with the faults of the file")
    arguments = parse(parser, faults=3)
    same = {
        "what": "faults",
        "cores": os.cpu_count(),
        "tree": tree("autotune", "tests", "search_spaces"),
        "first": arguments.first,
    }
    each = [] if arguments.anew or arguments.small else earlier_runs(arguments.json, same)
    with opened(2 if arguments.small else TRIALS_OF_A_CALL) as bench:
        left_out = sorted(bench.ground.forbidden)
        seed = arguments.first + len(each) if arguments.only is None else arguments.only
        while arguments.only is not None or sum(len(row["faults"]) for row in each) < arguments.faults:
            row = episode(bench, seed)
            each.append(row)
            write_json(arguments.json, {**same, "left out": left_out, **summary(each), "each": each})
            shown = [found["text"] for found in row["violations"]]
            print(
                f"seed {seed}: {row['episode']}, {len(row['faults'])} faults in {row['seconds']:.0f} s",
                *shown,
                sep="\n  ",
            )
            if arguments.only is not None:
                print(json.dumps(row["faults"], indent=1))
                break
            seed += 1
    whole = summary(each)
    print_table(f"{whole['faults']} faults", whole["kinds"])
    print("left out, since this machine does not allow it:", ", ".join(left_out) or "nothing")
    for found in whole["violated"]:
        print(f"{found['text']}\n  again: {found['again']}")
    if whole["violated"]:
        raise SystemExit(f"{whole['violations']} violations")


if __name__ == "__main__":
    main()
