"""The nodes that a person has named, from a hostfile to machines that are reached and alike."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from autotune.errors import UserError
from autotune.executors.nodes.cluster import Cluster, Wishes
from autotune.executors.nodes.hostfile import Host, evenly, read_hostfile
from autotune.executors.nodes.slurm import JOB, Srun, allocated_hosts, check_time_left, in_allocation
from autotune.executors.nodes.transports import Ssh, Transport
from autotune.problem.hardware import Hardware
from autotune.units import parse_duration


@dataclasses.dataclass
class Nodes:
    """What was asked for, and from `reach` on the cluster that it is.

    Args:
        hosts: all that may be used.
        said: where they come from, for complaints.
        count: how many of them to use; None: all.
    """

    hosts: Sequence[Host]
    said: str
    transport: Transport
    folder: Path
    say: Callable[[str], None]
    count: int | None = None
    interface: str | None = None
    variables: tuple[str, ...] = ()
    cluster: Cluster | None = None

    def also_send(self, variables: Iterable[str]) -> None:
        """Has nodes be told these variables of this process, too: a typed command sets them."""
        self.variables = tuple(dict.fromkeys([*self.variables, *variables]))

    def reach(
        self, device: str, per_node: int | None, memory_cap_bytes: int | None, headroom: float, path: str
    ) -> Hardware:
        """The hardware of all nodes together, once all are reached and compared.

        Args:
            per_node: devices of each; None: all that each has.
            path: what must be there on each; empty: nothing.

        Raises:
            UserError: one cannot be reached, lacks something, or is not like the others.
        """
        hosts = evenly(list(self.hosts), self.count, per_node, self.said)
        wishes = Wishes(device, headroom, memory_cap_bytes, path, self.interface, self.variables)
        self.cluster = Cluster(hosts, self.transport, wishes, self.folder, say=self.say)
        return self.cluster.reach()


class Named(Protocol):
    """What a person typed of nodes: fields of Request."""

    executor: str
    gpus: int | None
    hostfile: Path | None
    include: str | None
    exclude: str | None
    nodes: int | None
    interface: str | None
    exports: list[str]


def _allocated(named: Named) -> tuple[list[Host], str]:
    """The hosts of Slurm's allocation, and what to call them."""
    if not in_allocation():
        raise UserError("--executor slurm: this process is in no allocation; the command `autotune run` asks for one")
    for option, given in (("--include", named.include), ("--exclude", named.exclude)):
        if given:
            raise UserError(f"{option} filters a hostfile: leave it out with --executor slurm")
    return allocated_hosts(named.gpus), f"allocation {os.environ[JOB]}"


@contextmanager
def named_nodes(named: Named, say: Callable[[str], None], budget: str | None = None) -> Iterator[Nodes | None]:
    """The nodes that are named, none of them reached yet; at the end each agent is ended. None: this machine is meant.

    Args:
        budget: as typed: so long an allocation must last.

    Raises:
        UserError: the hostfile or a filter is wrong, or an option needs a hostfile.
    """
    slurm = named.executor == "slurm"
    if slurm and named.hostfile is not None:
        raise UserError("--executor slurm takes the nodes of its allocation: leave --hostfile out")
    if named.hostfile is None and not slurm:
        options = {"--include": named.include, "--exclude": named.exclude, "--nodes": named.nodes}
        for option, given in {**options, "--interface": named.interface, "--export": named.exports}.items():
            if given is not None and given != []:
                raise UserError(
                    f"{option} is about several machines: give --hostfile FILE too (or --executor slurm), or leave {option} out"
                )
        yield None
        return
    transport: Transport = Ssh()
    if named.hostfile is not None:
        hosts, said = read_hostfile(named.hostfile, named.include, named.exclude), str(named.hostfile)
    else:
        hosts, said, transport = *_allocated(named), Srun(os.environ[JOB])
        if budget is not None:
            check_time_left(parse_duration(budget))
    folder = Path(tempfile.mkdtemp(prefix="autotune-nodes-"))
    made = Nodes(hosts, said, transport, folder, say, named.nodes, named.interface, tuple(named.exports))
    try:
        yield made
    finally:
        if made.cluster is not None:
            made.cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
