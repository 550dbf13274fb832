"""Hostfile, and the start of an agent by ssh or srun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NoReturn, Protocol

from autotune.errors import UserError, did_you_mean
from autotune.executors.cluster.rpc import CommandAgent, RemoteAgent, StreamAgent
from autotune.problem.hardware import detect
from autotune.util.bounds import display_value, read_text, whole_number
from autotune.util.units import format_duration

# -- transports --------------------------------------------------------------------------------------------------------
#
# All data goes over the stream, so host names, folders and variables never become shell text. ssh passes to a login
# shell only the words that start an agent, each quoted.

PACKAGE = Path(__file__).parents[2]
CONNECT_SECONDS = 10


class Transport(Protocol):
    """Way to reach nodes."""

    def connect(self, node: str, log: Path) -> RemoteAgent:
        """Start a node's agent.

        Args:
            log: for messages of the program that starts it.

        Raises:
            UserError: the program cannot be run.
        """


class CommandTransport(ABC):
    """Transport by a command whose standard input and output are those of the agent."""

    @abstractmethod
    def command(self, node: str) -> list[str]:
        """Return the command that starts a node's agent."""

    def connect(self, node: str, log: Path) -> RemoteAgent:
        """Run the command."""
        command = self.command(node)
        try:
            return CommandAgent(node, command, log)
        except OSError as error:
            raise UserError(f"node {node}: {command[0]} cannot be run ({error.strerror})") from None


def agent_words() -> list[str]:
    """Return the command that starts an agent on its machine."""
    return [sys.executable, str(PACKAGE), "agent"]


class Ssh(CommandTransport):
    """OpenSSH with the user's configuration: keys, agents, jump hosts and names from ~/.ssh/config."""

    def command(self, node: str) -> list[str]:
        """Return the ssh command that starts a node's agent."""
        options = {
            "BatchMode": "yes",  # no prompts
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "LogLevel": "ERROR",  # keep server banners out of the log
            "ForwardX11": "no",
            "ControlMaster": "no",  # use the user's master connection, but do not create one
            "ClearAllForwardings": "yes",
            "EscapeChar": "none",
            "RequestTTY": "no",
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", *given, "--", node, f"exec {shlex.join(agent_words())}"]


# -- Slurm -------------------------------------------------------------------------------------------------------------

_ANSWER_SECONDS = 60.0  # seconds; a controller under load answers slowly
# Variables that an agent inherits before it receives more. A Python from `module load` may need the library path.
_KEPT = "PATH,HOME,USER,LANG,LC_ALL,TMPDIR,LD_LIBRARY_PATH"
JOB, NODES, GPUS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE"  # set for a job's processes: sbatch(1)


@dataclass(frozen=True)
class Srun(CommandTransport):
    """Job step on one node of this process's allocation, parallel to other steps."""

    job: str

    def command(self, node: str) -> list[str]:
        """Return the srun command that starts a node's agent inside the Slurm job."""
        where = ["--jobid", self.job, "--nodelist", node, "--nodes=1", "--ntasks=1"]
        how = ["--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none", "--unbuffered", f"--export={_KEPT}"]
        return ["srun", *where, *how, "--", *agent_words()]


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process belongs to a Slurm job."""
    return bool(environment.get(JOB) and environment.get(NODES))


def allocated_hosts(gpus: int | None, environment: Mapping[str, str] = os.environ) -> list[Host]:
    """Return the nodes of the allocation, with `gpus` slots each, or with the number of allocated GPUs.

    Raises:
        UserError: Slurm does not list the nodes, or the number of devices is unknown.
    """
    names = slurm_output("scontrol", "show", "hostnames", environment[NODES]).split()
    each = environment.get(GPUS, "")
    count = gpus or (int(each) if each.isdigit() else 0)
    if not count:
        raise UserError("this allocation has no GPUs: --device cpu --gpus N says how many CPU ranks each node has")
    return [Host(name, tuple(range(count))) for name in names]


def check_time_left(budget_seconds: float, environment: Mapping[str, str] = os.environ) -> None:
    """Check that the allocation lasts as long as the budget.

    Raises:
        UserError: the allocation ends earlier.
    """
    try:
        end = datetime.fromisoformat(slurm_output("squeue", "-h", "-j", environment[JOB], "-o", "%e").strip())
    except (UserError, ValueError):  # `N/A` without a time limit
        return
    left = end.timestamp() - time.time()
    if left < budget_seconds:
        raise UserError(
            f"the allocation ends in {format_duration(max(0.0, left))}, before a budget of {format_duration(budget_seconds)}: "
            "give a smaller --budget, or ask Slurm for a longer time"
        )


def slurm_output(*words: str) -> str:
    """Return the output of a Slurm command.

    Raises:
        UserError: Slurm is missing, or the command fails; with its error message.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"--executor slurm: no {words[0]} on this machine; call autotune where Slurm's commands are")
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_ANSWER_SECONDS, stdin=subprocess.DEVNULL, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"--executor slurm: {words[0]} does not answer within {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        raise UserError(
            f"--executor slurm: {words[0]} has exit status {done.returncode} ({' '.join(done.stderr.split())[:200]})"
        )
    return done.stdout


# -- processes of a launcher -------------------------------------------------------------------------------------------


@dataclass
class Peers:
    """Processes that a launcher started, one per node: rank 0 tunes, and the others become its agents."""

    rank: int
    size: int
    address: tuple[str, int]  # of rank 0
    wait_seconds: float = 600.0  # for all to connect; torchrun waits as long
    _links: dict[str, socket.socket] = field(default_factory=dict)  # connected peers by node; that of rank 0 listens

    def join(self) -> NoReturn:
        """Become an agent of rank 0."""
        until = time.monotonic() + self.wait_seconds
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(self.address, CONNECT_SECONDS) as link:
                link.settimeout(self.wait_seconds)
                link.sendall(f"{self.rank}\n".encode())
                if link.recv(1):
                    link.settimeout(None)
                    os.dup2(os.dup2(link.fileno(), 0), 1)  # standard input and output
                    os.execv(sys.executable, agent_words())
            time.sleep(1.0)
        raise UserError(f"rank {self.rank}: rank 0 does not answer at {self.address[0]}:{self.address[1]}")

    def place(self, nodes: int | None, per_node: int | None, device: str) -> list[Host]:
        """Wait until all have connected. Each node has as many devices as this one, or `per_node`."""
        if nodes not in (None, self.size):
            raise UserError(f"--nodes {nodes}: a launcher started {self.size} processes. Remove --nodes.")
        slots = tuple(range(detect(device, per_node).count))
        names = [f"rank{rank}" for rank in range(self.size)]
        try:
            listener = self._links["rank0"] = socket.create_server(("", self.address[1]))
        except OSError as error:
            raise UserError(f"MASTER_PORT {self.address[1]}: {error.strerror}; start one process per node") from None
        listener.settimeout(1.0)
        self._accept(set(names), self.wait_seconds)
        return [Host(name, slots) for name in names]

    def _accept(self, nodes: set[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        while missing := nodes.difference(self._links):
            try:
                link, _ = self._links["rank0"].accept()
                link.settimeout(CONNECT_SECONDS)
                self._links[f"rank{int(link.makefile('rb', 0).readline(9))}"] = link
            except (OSError, ValueError):  # none yet, or a stranger
                if time.monotonic() > until:
                    raise UserError(
                        f"node {min(missing)} did not connect to port {self.address[1]} in time; unset MASTER_ADDR to tune alone"
                    ) from None

    def connect(self, node: str, log: Path) -> RemoteAgent:
        """Start the agent of rank 0, or let a connected peer become one."""
        if node == "rank0":
            return CommandAgent(node, agent_words(), log)
        self._accept({node}, 0.0)
        self._links[node].sendall(b"\n")
        return StreamAgent(node, self._links.pop(node))

    def close(self) -> None:
        """Let the remaining peers go."""
        for link in self._links.values():
            link.close()


# -- hostfile ----------------------------------------------------------------------------------------------------------
#
# DeepSpeed's hostfile, with lines such as `worker-1 slots=8`, and its launcher's `--include` and `--exclude`.

# A host may contain ssh's user name, and an IPv6 address in brackets. ssh would treat one that begins with `-` as an option.
_LINE = re.compile(r"(?P<host>[\w.\[:][\w.:@%\[\]+-]{0,255})\s+slots=(?P<slots>\d+)")
MOST_SLOTS = 4096
_FILTER = "expected HOST@HOST, or HOST:SLOT,SLOT@HOST as DeepSpeed's launcher takes it"


@dataclass(frozen=True)
class Host:
    """Line of a hostfile."""

    name: str
    slots: tuple[int, ...]  # its devices, by number

    @property
    def hides_devices(self) -> bool:
        """True if a filter left slots that are not the first ones."""
        return self.slots != tuple(range(len(self.slots)))


def read_hostfile(path: Path, include: str | None = None, exclude: str | None = None) -> list[Host]:
    """Return the hosts of a hostfile in order, after the filters.

    Raises:
        UserError: the file cannot be read or parsed, or names a host twice. A filter names an unknown host or slot, or
            leaves no host.
    """
    if include and exclude:
        raise UserError("--include and --exclude together: give one of them")
    hosts = _hosts(path)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    if text:
        named = _filter(option, text, hosts, path)
        kept = [[slot for slot in host.slots if ((host.name, slot) in named) == bool(include)] for host in hosts]
        hosts = [Host(host.name, tuple(slots)) for host, slots in zip(hosts, kept, strict=True) if slots]
        if not hosts:
            raise UserError(f"{option} {text}: no host of {path} is left")
    return hosts


def _hosts(path: Path) -> list[Host]:
    lines = read_text(path, f"--hostfile {path}", "expected lines like `worker-1 slots=8`").splitlines()
    found: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(
                f"{path}:{number}: {display_value(text)!r} does not parse: expected a line like `worker-1 slots=8`"
            )
        name = match["host"]
        slots = whole_number(match["slots"], f"{path}:{number}: slots", 0, MOST_SLOTS)
        if _bare(name) in map(_bare, found):
            raise UserError(f"{path}:{number}: {name} a second time: give each host one line, with all its slots")
        if not slots:
            raise UserError(f"{path}:{number}: {name} has no slots: expected at least 1, or leave the line out")
        found[name] = Host(name, tuple(range(slots)))
    if not found:
        raise UserError(f"{path} names no host: expected lines like `worker-1 slots=8`")
    return list(found.values())


def _filter(option: str, text: str, hosts: list[Host], path: Path) -> set[tuple[str, int]]:
    """Return the slots that a filter names, each with its host."""
    known = {_bare(host.name): host for host in hosts}
    named: set[tuple[str, int]] = set()
    for part in text.split("@"):
        called, colon, numbers = part.partition(":")
        if called not in known:
            raise UserError(f"{option} {text}: {path} has no host {called!r}{did_you_mean(called, known)}; {_FILTER}")
        host = known[called]
        slots = set(host.slots)
        if colon:
            if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", numbers):
                raise UserError(f"{option} {text}: {part!r} does not parse: {_FILTER}")
            slots = set(map(int, numbers.split(",")))
            if missing := slots.difference(host.slots):
                raise UserError(
                    f"{option} {text}: {host.name} has no slot {min(missing)}, its {len(host.slots)} count from 0"
                )
        named |= {(host.name, slot) for slot in slots}
    return named


def _bare(name: str) -> str:
    """Return a host's name without ssh's user name."""
    return name.rpartition("@")[2]


def evenly_filled_hosts(
    hosts: list[Host], named_by: str, nodes: int | None, per_node: int | None, device: str = ""
) -> list[Host]:
    """Return the first `nodes` hosts with `per_node` slots each.

    Args:
        nodes: number of hosts; None: all.
        per_node: slots per host; None: all, which must be the same number on each.

    Raises:
        UserError: there are too few hosts or slots, or the numbers of slots differ.
    """
    if nodes is not None and not 1 <= nodes <= len(hosts):
        raise UserError(f"--nodes {nodes}: {named_by} has {len(hosts)} hosts; give 1 to {len(hosts)}")
    used = hosts[:nodes]
    fewest = min(used, key=lambda host: len(host.slots))
    most = max(used, key=lambda host: len(host.slots))
    if per_node is None and len(most.slots) != len(fewest.slots):
        raise UserError(
            f"{named_by}: {fewest.name} has {len(fewest.slots)} slots and {most.name} {len(most.slots)}; autotune takes as "
            f"many of each: --gpus {len(fewest.slots)} takes so many, --exclude leaves a host out"
        )
    if per_node is not None and not 1 <= per_node <= len(fewest.slots):
        raise UserError(
            f"--gpus {per_node}: {fewest.name} has {len(fewest.slots)} slots; give 1 to {len(fewest.slots)}"
        )
    return [Host(host.name, host.slots[:per_node]) for host in used]


def hostfile_of(folder: Path) -> Path:
    """Return the path of the hostfile in a study's folder."""
    return folder / "hostfile"


def hostfile_text(hosts: Sequence[Host]) -> str:
    """Return a hostfile of these hosts. Slot numbers are lost, because only filters can express them."""
    return "".join(f"{host.name} slots={len(host.slots)}\n" for host in hosts)
