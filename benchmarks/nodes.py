"""What several machines cost: `python benchmarks/nodes.py [--rounds 20] [--json FILE]`. Needs root, sshd and iproute2.

Two hosts with sshd in network namespaces of this machine, one CPU rank on each. Two questions: how soon after a failure on one
host the next trial's ranks are up, and whether anything is left; and what a trial over ssh takes more than the same ranks here.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from common import command_line, parse, print_table, write_json
from ranks import LocalExecutor, opened

sys.path.insert(0, str(Path(__file__).parents[1]))

from autotune.executors.base import Effort
from autotune.executors.nodes.cluster import Cluster, Wishes
from autotune.executors.nodes.hostfile import read_hostfile
from autotune.executors.nodes.transports import Ssh
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from tests.executors.nodes.hosts import WHY_NOT, Hosts, made_hosts

QUICK = Effort(min_steps=2, max_steps=3, min_seconds=0.0)
ONE = Candidate.of(
    {
        "zero_stage": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "reduce_bucket_size": 500_000,
    }
)
KILLED = ("a rank", "the agent", "sshd")


def victim(what: str, cluster: Cluster, session: Any, hosts: Hosts) -> int:
    """The process on the second host that is killed."""
    agent = int(cluster.nodes[1].wire.greeting["pid"])
    if what == "a rank":
        return int(session._group._workers[1])
    if what == "the agent":
        return agent
    assert hosts[1].process is not None
    below = psutil.Process(hosts[1].process.pid).children(recursive=True)
    return next(one.pid for one in below if one.name().startswith("sshd") and one.children())


def failures(executor: LocalExecutor, cluster: Cluster, hosts: Hosts, rounds: int) -> list[dict[str, Any]]:
    """Seconds from a SIGKILL in a trial until the ranks of the next one are ready, and what is left of the first."""
    rows = []
    for what in KILLED:
        seconds, left, kinds = [], 0, set()
        for at in range(rounds):
            session = executor.session(ONE, f"{what}-{at}".replace(" ", "-"))
            killed: list[float] = []

            def kill(phase: str, session: Any = session, what: str = what, killed: list[float] = killed) -> None:
                if phase == "forward" and not killed:
                    killed.append(time.monotonic())
                    os.kill(victim(what, cluster, session, hosts), signal.SIGKILL)

            executor.on_phase = kill
            with closing(session):
                kinds.add(session.measure(ONE, QUICK, 240.0).kind.value)
            before = list(session._group._workers.values())
            ready: list[float] = []
            executor.on_phase = lambda phase, ready=ready: (
                ready.append(time.monotonic()) if phase == "forward" else None
            )
            with closing(executor.session(ONE, f"next-{at}")) as following:
                outcome = following.measure(ONE, QUICK, 240.0)
            assert outcome.ok, outcome
            seconds.append(ready[0] - killed[0])
            left += sum(psutil.pid_exists(pid) for pid in before)
        rows.append(
            {
                "killed": what,
                "outcome": ", ".join(sorted(kinds)),
                "rounds": rounds,
                "median seconds": statistics.median(seconds),
                "worst": max(seconds),
                "left running": left,
                "target": "< 15",
            }
        )
    return rows


def overhead(executor: LocalExecutor, folder: Path, job: Job, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a trial outside its measured steps, over ssh and here in turn."""
    executor.on_phase = lambda phase: None
    seconds: dict[str, list[float]] = {"ssh": [], "here": []}
    with opened(job, detect("cpu", 2), folder / "here", [ONE]) as here:
        for at in range(rounds):
            for name, one in (("ssh", executor), ("here", here)):
                with closing(one.session(ONE, f"overhead{at}")) as session:
                    seconds[name].append(session.measure(ONE, QUICK, 240.0).outside_seconds)
    more = [a - b for a, b in zip(seconds["ssh"], seconds["here"], strict=True)]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "measure": "seconds of a trial outside measured steps",
            **medians,
            "more": statistics.median(more),
            "target": "< 1 more",
        }
    ]


def main(report: Callable[..., None] = print_table) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parse(parser, rounds=1)
    if WHY_NOT:
        parser.error(WHY_NOT)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-nodes-"))
    job = Job(resolve_model("tiny-llama"), 2, 32, "fp32")
    with made_hosts(folder) as hosts:
        os.environ["PATH"] = hosts.path
        cluster = Cluster(read_hostfile(hosts.hostfile()), Ssh(), Wishes("cpu"), folder / "nodes")
        with closing(cluster):
            executor = LocalExecutor(job, cluster.reach(), folder, [ONE], ground=cluster)
            executor.open(print)
            rows = {"failures": failures(executor, cluster, hosts, arguments.rounds)}
            rows["overhead"] = overhead(executor, folder, job, arguments.rounds)
    report("a failure on one of two hosts, until the next trial's ranks are ready", rows["failures"])
    report("a trial over ssh and here", rows["overhead"])
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
