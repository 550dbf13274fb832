"""What several machines cost: `python benchmarks/cluster/nodes.py [--count 20] [--only rank,link-60=3] [--json FILE]`.

Two nodes of this machine (node_grounds.py), one CPU rank on each, over ssh, Slurm and Ray. Two questions: how soon after a
failure in a trial the ranks of the next one are ready, with nothing left and no outcome lost; and what a trial over each
transport takes more than the same ranks here. "Beyond" counts from when a failure was noticed, and what was killed or cut was
back. What this machine does not allow is named.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil

from autotune.executors.base import MeasureSpec
from autotune.problem.hardware import detect
from autotune.problem.outcome import Outcome
from benchmarks.cluster.node_grounds import FAILURES, GROUNDS, JOB, ONE, SPACE, Ground, Unavailable
from benchmarks.common import CANNOT_RUN, command_line, parse, print_table, tree, write_json
from benchmarks.trials.ranks import opened

QUICK = MeasureSpec(min_steps=2, max_steps=3, min_seconds=0.0)
DEADLINE_SECONDS = 240.0
GOING_SECONDS = 5.0  # until what was killed is gone
OVERHEAD = "overhead"  # a trial over a transport and here, where `--only` asks for it
Rows = list[dict[str, Any]]


# -- a failure -----------------------------------------------------------------------------------------------------------


def fail(ground: Ground, name: str, number: int) -> dict[str, Any]:
    """One failure in a trial, and the trial after it: seconds, what is left of the first, and outcomes that the study lacks."""
    blow, struck, back, lost = ground.blows[name], list[float](), list[float](), list[float]()
    before, wire, over = ground.processes(), ground.wire(), threading.Event()

    def mend() -> None:
        blow.mend()
        back.append(time.monotonic())

    def await_loss() -> None:
        while not over.wait(0.01):
            if wire is not None and wire.failure:
                lost.append(time.monotonic())
                return

    mender, watcher = (threading.Thread(target=work, daemon=True) for work in (mend, await_loss))
    watcher.start()

    def strike(phase: str) -> None:
        if phase == "forward" and not struck:
            before.update(ground.processes())
            struck.append(time.monotonic())
            blow.strike(session)
            mender.start()

    session = ground.executor.session(ONE, f"{name}-{number}")
    told = dict([trial(ground, session, strike)])
    (outcome,), ended, ready = told.values(), time.monotonic(), list[float]()
    assert struck, outcome
    assert session._group is not None
    ranks = set(session._group._rank_pids.values())
    following = ground.executor.session(ONE, f"{name}-{number}-next")
    told |= [trial(ground, following, lambda phase: ready.append(time.monotonic()) if phase == "forward" else None)]
    mender.join()
    over.set()
    watcher.join()
    assert ready, told
    # a rank may notice a lost node long before its transport does, which the next trial waits for
    noticed = [at for at in (session.failed_at, *lost) if at]
    stored = {record.number: record.outcome for record in ground.store.records()}
    return {
        "failure": name,
        "outcome": outcome.kind.value,
        "noticed": max(noticed) - struck[0] if noticed else None,
        "next": ready[0] - struck[0],
        "beyond": ready[0] - max(at for at in (*(noticed or [ended]), *back) if at <= ready[0]),
        "left": left(ground, before, ranks),
        "lost": sum(stored.get(at) != one for at, one in told.items()),
    }


def trial(ground: Ground, session: Any, on_phase: Callable[[str], None]) -> tuple[int, Outcome]:
    """Measured and stored, as a tuner does; the trial's number and its outcome."""
    ground.executor.on_phase = on_phase
    number = ground.store.start(ONE, SPACE)
    with closing(session):
        outcome = session.measure(ONE, QUICK, DEADLINE_SECONDS)
    ground.executor.on_phase = lambda phase: None
    ground.store.finish(number, outcome)
    return number, outcome


def left(ground: Ground, before: set[psutil.Process], ranks: set[int]) -> int:
    """How many of the processes that ran before a failure still do, but for what agents that live keep for the next trial."""
    until = time.monotonic() + GOING_SECONDS
    while True:
        kept = ground.processes()
        found = [one for one in before if one.pid in ranks or one not in kept]
        found = [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if not found or time.monotonic() > until:
            return len(found)
        time.sleep(0.1)


# -- a trial without one -------------------------------------------------------------------------------------------------


def overhead(ground: Ground, folder: Path, transport: str, count: int) -> Rows:
    """Seconds of a trial outside its measured steps, over a transport and here in turn."""
    rows = []
    with opened(JOB, detect("cpu", 2), folder / "here", [ONE]) as here:
        for at in range(count):
            seconds = {}
            for name, executor in (("over it", ground.executor), ("here", here)):
                with closing(executor.session(ONE, f"overhead-{at}")) as session:
                    seconds[name] = session.measure(ONE, QUICK, DEADLINE_SECONDS).outside_seconds
            rows.append({"failure": f"{OVERHEAD} of {transport}", **seconds})
    return rows


# -- all of them ---------------------------------------------------------------------------------------------------------


def summary(each: Rows) -> dict[str, Rows]:
    failures, trials = [], []
    for name, (transport, what) in FAILURES.items():
        if rows := [row for row in each if row["failure"] == name]:
            noticed = [row["noticed"] for row in rows if row["noticed"] is not None]
            failures.append(
                {
                    "failure": what,
                    "over": transport,
                    "count": len(rows),
                    "outcome": ", ".join(sorted({row["outcome"] for row in rows})),
                    "noticed, s": statistics.median(noticed) if noticed else None,
                    "next trial, s": statistics.median(row["next"] for row in rows),
                    "worst": max(row["next"] for row in rows),
                    "beyond, s": statistics.median(row["beyond"] for row in rows),
                    "worst beyond": max(row["beyond"] for row in rows),
                    "target beyond": "< 15",
                    "left": sum(row["left"] for row in rows),
                    "lost": sum(row["lost"] for row in rows),
                }
            )
    for transport in GROUNDS:
        if rows := [row for row in each if row["failure"] == f"{OVERHEAD} of {transport}"]:
            medians = {f"{name}, s": statistics.median(row[name] for row in rows) for name in ("over it", "here")}
            more = statistics.median(row["over it"] - row["here"] for row in rows)
            trials.append({"over": transport, "count": len(rows), **medians, "more, s": more, "target": "< 1 more"})
    return {"failures": failures, "trials": trials}


def wanted(parser: ArgumentParser, only: str, count: int) -> dict[str, int]:
    """How many of each; those of `--only` alone."""
    known = [*FAILURES, OVERHEAD]
    found = {}
    for word in only.split(",") if only else known:
        name, _, many = word.partition("=")
        if name not in known or (many and not many.isdigit()):
            parser.error(f"--only {word}: expected NAME or NAME=COUNT, NAME of {', '.join(known)}")
        found[name] = int(many or count)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=20, help="of each failure, and of trials over each transport")
    parser.add_argument("--only", default="", metavar="NAME[=COUNT],…", help=f"of {', '.join(FAILURES)}, {OVERHEAD}")
    arguments = parse(parser, count=1, only=f"rank,{OVERHEAD}")
    counts = wanted(parser, arguments.only, arguments.count)
    same = {"cores": os.cpu_count(), "tree": tree("autotune")}
    each: Rows = []
    left_out: dict[str, str] = {}

    def add(rows: Rows) -> None:
        each.extend(rows)
        write_json(arguments.json, {**same, **summary(each), "left out": left_out, "each": each})
        for row in rows:
            print(json.dumps(row), flush=True)

    transports = ["ssh"] if arguments.small else list(GROUNDS)
    for transport in transports:
        try:
            visit(transport, counts, each, left_out, add)
        except Unavailable as why:
            left_out[transport] = str(why)
    for name, lacking in left_out.items():
        print(f"left out: {name}: {lacking}", file=sys.stderr)
    if not each:
        raise SystemExit(CANNOT_RUN)
    whole = summary(each)
    print_table("a failure on one of two nodes, until the ranks of the next trial are ready", whole["failures"], keys=2)
    print_table("a trial over a transport and here: seconds outside its measured steps", whole["trials"])


def visit(
    transport: str, counts: dict[str, int], each: Rows, left_out: dict[str, str], add: Callable[[Rows], None]
) -> None:
    """All failures over one transport that are missing, and trials without one.

    Raises:
        Unavailable: this machine has it not.
    """

    def missing(name: str) -> int:
        return max(0, counts.get(name.partition(" ")[0], 0) - sum(1 for row in each if row["failure"] == name))

    own = [name for name, (over, _) in FAILURES.items() if over == transport]
    trials = f"{OVERHEAD} of {transport}"
    if not any(missing(name) for name in ([*own, trials] if transport != "postgresql" else own)):
        return
    with tempfile.TemporaryDirectory(prefix=f"nodes-{transport}-") as place:
        folder = Path(place)
        with GROUNDS[transport](folder) as ground:
            for name in own:
                if name in ground.forbidden and missing(name):
                    left_out[name] = ground.forbidden[name]
                    continue
                for number in range(missing(name)):
                    add([fail(ground, name, number)])
            if ground.cluster is not None and (many := missing(trials)):
                add(overhead(ground, folder, transport, many))


if __name__ == "__main__":
    main()
