"""Where benchmarks/cluster/nodes.py lets something fail: two nodes over ssh, of a Slurm or of a Ray, and a study in a PostgreSQL.

The nodes are this machine's (tests/executors/cluster): hosts with sshd in network namespaces, slurmd's, raylets. Each has one
CPU rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.ray_transport import RayNodes
from autotune.executors.cluster.transports import Host, Srun, Ssh, Transport, allocated_hosts, read_hostfile
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.space import parse_space
from autotune.search.study import StudyStore
from benchmarks.trials.ranks import LocalExecutor, opened
from tests import postgres
from tests.executors.cluster import hosts, ray_cluster, slurm_cluster

JOB = Job(resolve_model("tiny-llama"), 2, 32, "fp32")
SPACE = parse_space("""\
name: one
about: one candidate
knobs:
  zero_stage: [2]
  train_micro_batch_size_per_gpu: [1]
  gradient_accumulation_steps: [1]
  reduce_bucket_size: [500000]
""")
(ONE,) = SPACE.candidates(JOB)
LAST_SECONDS = 30.0  # for what ran on nodes to be gone once they are let go of
SLURM_MINUTES = 60  # of the allocation: the most that its partition gives


class Unavailable(Exception):
    """This machine has not what it takes; the text says what."""


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Blow:
    """A failure: what is done to the second node in the middle of a trial, and what brings back what is gone then."""

    strike: Callable[[Any], None]  # takes the trial's session
    mend: Callable[[], None] = nothing  # returns once it is back


@dataclass
class Ground:
    """An executor, a study that its outcomes go to, and what can be made to fail."""

    executor: LocalExecutor
    store: StudyStore
    blows: dict[str, Blow]
    cluster: Cluster | None = None
    forbidden: Mapping[str, str] = field(default_factory=dict)  # failure -> why this machine does not allow it

    def wire(self) -> Any:
        """The one to the second node; None where there are no nodes."""
        return self.cluster.nodes[1].agent if self.cluster else None

    def processes(self) -> set[psutil.Process]:
        """The nodes' agents that the tuner knows, with all that they have started."""
        found: set[psutil.Process] = set()
        for node in self.cluster.nodes if self.cluster else ():
            with suppress(psutil.Error):
                agent = psutil.Process(agent_of(node))
                found |= {agent, *agent.children(recursive=True)}
        return found


# -- what is killed ------------------------------------------------------------------------------------------------------


def agent_of(node: Any) -> int:
    return int(node.agent.greeting["pid"])


def kill_rank(session: Any) -> None:
    os.kill(session._group._rank_pids[1], signal.SIGKILL)


def agents_blow(cluster: Cluster) -> Blow:
    return Blow(lambda session: os.kill(agent_of(cluster.nodes[1]), signal.SIGKILL))


def ancestor(pid: int, name: str) -> psutil.Process:
    """The nearest process above that has such a name."""
    return next(one for one in psutil.Process(pid).parents() if one.name().startswith(name))


# -- the grounds ---------------------------------------------------------------------------------------------------------


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Variables of this process, until the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def on_nodes(nodes: Sequence[Host], transport: Transport, folder: Path, running: Callable[[], Any]) -> Iterator[Ground]:
    """A ground of two nodes. Once it is closed nothing may run there.

    Raises:
        SystemExit: something does.
    """
    cluster = Cluster(nodes, transport, NodeRequirements("cpu"), folder / "nodes", print_line=said)
    with closing(cluster):
        executor = LocalExecutor(JOB, cluster.reach(), folder, [ONE], target=cluster)
        executor.open(said)
        store, _ = StudyStore.create_or_resume(
            "s", f"sqlite:///{folder}/study.db", folder, JOB, executor.hardware, SPACE
        )
        yield Ground(executor, store, {"rank": Blow(kill_rank), "agent": agents_blow(cluster)}, cluster)
    until = time.monotonic() + LAST_SECONDS
    while left := running():
        if time.monotonic() > until:
            raise SystemExit(f"left running on the nodes: {left}")
        time.sleep(0.2)


def said(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def ssh(folder: Path) -> Iterator[Ground]:
    if hosts.WHY_NOT:
        raise Unavailable(hosts.WHY_NOT)
    with made_here(hosts.made_hosts, folder) as made, variables(PATH=made.path):

        def kill_sshd(session: Any) -> None:
            ancestor(agent_of(ground.cluster.nodes[1]), "sshd").kill()  # type: ignore[union-attr]

        def running() -> list[psutil.Process]:
            return [process for host in made.hosts for process in host.processes()]

        def cut_for(seconds: float) -> Blow:
            def mend() -> None:
                time.sleep(seconds)
                made[1].mend()

            return Blow(lambda session: made[1].cut(), mend)

        with on_nodes(read_hostfile(made.hostfile()), Ssh(), folder, running) as ground:
            ground.blows |= {"sshd": Blow(kill_sshd), "link-5": cut_for(5.0), "link-60": cut_for(60.0)}
            if not made.own_links:
                ground.forbidden = dict.fromkeys(("link-5", "link-60"), "no network namespaces here")
            yield ground


@contextmanager
def slurm(folder: Path) -> Iterator[Ground]:
    if slurm_cluster.WHY_NOT:
        raise Unavailable(slurm_cluster.WHY_NOT)
    started: list[subprocess.Popen[bytes]] = []
    with made_here(slurm_cluster.made_slurm, folder) as made, variables(**made.environment), made.allocation() as job:
        made.call("scontrol", "update", f"jobid={job['SLURM_JOB_ID']}", f"timelimit={SLURM_MINUTES}")

        def start_slurmd() -> None:
            """As systemd would, which waits a moment."""
            time.sleep(1.0)
            with (folder / "slurmd.out").open("ab") as out:
                words = ["slurmd", "-D", "-N", "n2"]
                started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out))

        def kill_slurmd(session: Any) -> None:
            os.kill(int((folder / "slurmd.n2.pid").read_text()), signal.SIGKILL)

        def kill_with_step(session: Any) -> None:
            kill_slurmd(session)
            ancestor(agent_of(ground.cluster.nodes[1]), "slurmstepd").kill()  # type: ignore[union-attr]

        try:
            srun = Srun(job["SLURM_JOB_ID"])
            with on_nodes(allocated_hosts(1, job), srun, folder, made.processes) as ground:
                ground.blows |= {
                    "slurmd": Blow(kill_slurmd, start_slurmd),
                    "slurmd-and-step": Blow(kill_with_step, start_slurmd),
                }
                yield ground
        finally:
            for process in started:
                process.terminate()
                process.wait(30)


@contextmanager
def ray(folder: Path) -> Iterator[Ground]:
    if ray_cluster.WHY_NOT:
        raise Unavailable(ray_cluster.WHY_NOT)
    with made_here(ray_cluster.made_ray) as made, variables(PYTHONPATH=ray_cluster.with_ray()):

        def deaths() -> int:
            """How many nodes Ray holds for dead. It places anew what was there only then, after five of its checks, 3 s apart."""
            (log,) = (made.folder / "ray").glob("session_2*/logs/gcs_server.out")
            return int(log.read_text().count("Node is dead because the health check failed"))

        def start_raylet() -> None:
            number, before = made_of(), deaths()
            (made.folder / f"ray{number}.log").write_text("")  # in which `wait` looks for what it says once it is up
            made.start(number)
            made.wait(number)
            until = time.monotonic() + 60
            while deaths() == before and time.monotonic() < until:
                time.sleep(0.1)

        def made_of() -> int:
            """The number of the raylet that the second node is: Ray places them as it likes."""
            assert ground.cluster is not None
            name = ground.cluster.nodes[1].name
            return next(at for at in (1, 2) if name in (f"ray{at}", made.ips[at]))

        with (
            closing(RayNodes(made.address)) as nodes,
            on_nodes(nodes.place(2, 1, "cpu"), nodes, folder, made.agents) as ground,
        ):
            ground.blows["raylet"] = Blow(lambda session: made.kill(made_of()), start_raylet)
            yield ground


@contextmanager
def database(folder: Path) -> Iterator[Ground]:
    """Ranks on this machine, and a study in a PostgreSQL, which restarts all of itself when one of its processes is killed."""
    if why := postgres.why_not():
        raise Unavailable(why)
    with made_here(postgres.made_postgres) as server, opened(JOB, detect("cpu", 2), folder, [ONE]) as executor:
        store, _ = StudyStore.create_or_resume("s", server.url, folder, JOB, executor.hardware, SPACE)

        def kill_connection(session: Any) -> None:
            asked = "select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
            os.kill(server.ask(asked)[0][0], signal.SIGKILL)

        store.share(said)
        try:
            yield Ground(executor, store, {"connection": Blow(kill_connection)})
        finally:
            store.leave()


@contextmanager
def made_here(make: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """What tests make for themselves.

    Raises:
        Unavailable: this machine does not let it be made.
    """
    with ExitStack() as stack:
        try:
            made = stack.enter_context(make(*arguments))
        except (OSError, AssertionError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{make.__name__}: {error}") from None
        yield made


GROUNDS: dict[str, Callable[[Path], Any]] = {"ssh": ssh, "slurm": slurm, "ray": ray, "postgresql": database}
# How a failure is called on the command line -> where it is planted, and what it is.
FAILURES = {
    "rank": ("ssh", "SIGKILL of a rank"),
    "agent": ("ssh", "SIGKILL of an agent"),
    "sshd": ("ssh", "SIGKILL of sshd"),
    "link-5": ("ssh", "link cut for 5 s"),
    "link-60": ("ssh", "link cut for 60 s"),
    "slurmd": ("slurm", "SIGKILL of slurmd"),
    "slurmd-and-step": ("slurm", "SIGKILL of slurmd and its step"),
    "raylet": ("ray", "SIGKILL of a raylet"),
    "connection": ("postgresql", "SIGKILL of a PostgreSQL connection"),
}
