"""Nodes of a cluster: connect, compare and reconnect."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune._version import __version__
from autotune.errors import MachineError, Stopped, UserError
from autotune.executors.cluster.rpc import GREETING_SECONDS, NodeDown, RemoteAgent, RemoteWorkers
from autotune.executors.cluster.transports import Host, Transport
from autotune.executors.machine import Ops, RankRequirements
from autotune.problem.hardware import Hardware
from autotune.util.interpreter import OWN, Interpreter, other_python
from autotune.workers.host_workers import MultiHostLaunch
from autotune.workers.protocol import Message

# -- cluster -----------------------------------------------------------------------------------------------------------

_SURVEY_SECONDS = 120.0  # seconds; without persistence mode each of eight GPUs takes seconds to wake
_OPEN_SECONDS = 1900.0  # seconds; imports from a slow disk, ended earlier by the agent's own limit
_OPS_SECONDS = 3600.0
_BACK_SECONDS = 120.0  # seconds to reconnect to a lost node
_RETRY_SECONDS = 2.0
COMPARED = ("torch", "deepspeed", "transformers")  # packages whose versions must match this machine's

# Environment variables that are sent to the nodes: settings of libraries that compute, communicate, allocate, load
# models and build ops. A node knows its devices itself.
SENT = (
    *("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "CUDA_HOME", "CUDA_DEVICE_ORDER"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)
SENT_PREFIXES = (
    *("NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "UCX_", "FI_", "DS_", "DEEPSPEED_", "TRITON_", "HF_", "TRANSFORMERS_"),
    *("TOKENIZERS_", "CUDA_DEVICE_MAX_", "CUDA_LAUNCH_", "CUDA_MODULE_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("ONEDNN_", "MALLOC_"),
)


def sent_variables(environment: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that are sent to the nodes.

    Raises:
        UserError: one of `also`, which the user has named, is not set.
    """
    for name in also:
        if name not in environment:
            raise UserError(f"--export {name}: no such variable is set here")
    return {
        name: value
        for name, value in environment.items()
        if name in SENT or name.startswith(SENT_PREFIXES) or name in also
    }


@dataclass(frozen=True)
class NodeRequirements:
    """Requirements of a job for its nodes."""

    device: str = "auto"  # `auto`, `cuda` or `cpu`
    headroom: float = 0.05  # share of capacity left free
    memory_cap_bytes: int | None = None  # limit per rank
    path: str = ""  # the script's folder, which must exist on each node; empty without a script
    interface: str | None = None  # network interface between the nodes; None: detected
    variables: tuple[str, ...] = ()  # the user's variables that are sent in addition to `SENT`
    interpreter: Interpreter = OWN  # ranks' Python here; the nodes must have its path and versions


@dataclass
class Node:
    """Node and its agent."""

    host: Host
    agent: RemoteAgent
    hardware: Hardware | None = None
    survey: Message = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the node's host name."""
        return self.host.name


@dataclass
class Cluster:
    """Nodes that start groups of ranks, like `LocalMachine` on this machine."""

    hosts: Sequence[Host]
    transport: Transport
    requirements: NodeRequirements
    folder: Path  # for the standard error of transports and agents
    who: str = "a study"  # holder of the nodes' devices in messages to other users
    print_line: Callable[[str], None] = lambda text: None  # receives lines for the user
    cancelled: Callable[[], bool] = lambda: False
    echo: bool = False  # copy the ranks' output to this process's standard error, for a training
    ops: Ops = field(default_factory=lambda: Ops(lambda text: None))
    nodes: list[Node] = field(default_factory=list)
    _needs: RankRequirements | None = None
    _op_names: list[str] = field(default_factory=list)  # builders of the ops that the nodes have loaded
    _rendezvous: RendezvousNetwork | None = None

    # -- reaching them -----------------------------------------------------------------------------------------------

    def reach(self) -> Hardware:
        """Start an agent on every node, compare the nodes, and return their combined hardware.

        Raises:
            UserError: a node cannot be reached, or the nodes differ.
            Stopped: the user cancelled.
        """
        try:
            self.nodes = [Node(host, self._start(host)) for host in self.hosts]
            self._greet(self.nodes)
            self._survey(self.nodes)
            return self._compare()
        except BaseException:
            self.close()
            raise

    def _start(self, host: Host) -> RemoteAgent:
        log = self.folder / f"{host.name.replace('/', '_')}.log"
        log.unlink(missing_ok=True)
        return self.transport.connect(host.name, log)

    def _greet(self, nodes: list[Node]) -> None:
        for node in nodes:
            try:
                node.agent.greet(GREETING_SECONDS, self.cancelled)
            except NodeDown as failure:
                raise UserError(greeting_complaint(node.name, failure)) from None
            if (version := node.agent.greeting["version"]) != __version__:
                raise UserError(
                    f"node {node.name} has autotune {version}, and this machine {__version__}: install the same on every node"
                )

    def _survey(self, nodes: list[Node]) -> None:
        requirements = self.requirements
        common = {
            "device": requirements.device,
            "headroom": requirements.headroom,
            "memory_cap_bytes": requirements.memory_cap_bytes,
            "path": requirements.path,
            "python": other_python(requirements.interpreter),
            "cwd": str(Path.cwd()),
        }
        variables = sent_variables(os.environ, requirements.variables)

        def asked(node: Node) -> Message:
            ours = node.host.slots
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ours))} if node.host.hides_devices else {}
            return {**common, "env": variables | devices, "count": len(ours)}

        for node, survey in zip(nodes, self._on_nodes(nodes, _SURVEY_SECONDS, "survey", asked), strict=True):
            (clock,) = self._on_nodes([node], _SURVEY_SECONDS, "clock")
            node.survey = {**survey, "ahead_seconds": clock - time.time()}
            node.hardware = Hardware.from_json(survey["hardware"])

    def _compare(self) -> Hardware:
        names, surveys = [node.name for node in self.nodes], [node.survey for node in self.nodes]
        ours = {package: self.requirements.interpreter.version(package) for package in COMPARED}
        check_versions_and_clocks(names, surveys, ours)
        self._rendezvous = rendezvous_network(names, surveys, self.requirements.interface)
        threads = min(int(survey["threads"]) for survey in surveys)
        return combined([node.hardware for node in self.nodes if node.hardware is not None], threads)

    def _on_nodes(
        self, nodes: list[Node], seconds: float, method: str, fields: Callable[[Node], Message] = lambda node: {}
    ) -> list[Any]:
        """Call a method of several agents at once and return its values.

        Raises:
            UserError: a call failed, which the user has to fix.
            Stopped: the user cancelled.
        """
        calls = [node.agent.begin(method, **fields(node)) for node in nodes]
        try:
            return [
                node.agent.finish(call, seconds, self.cancelled, self.print_line)
                for node, call in zip(nodes, calls, strict=True)
            ]
        except (NodeDown, OSError) as error:
            raise UserError(f"node {error}") from None

    # -- a ground for groups -----------------------------------------------------------------------------------------

    @property
    def launcher(self) -> MultiHostLaunch:
        """Return the launcher that starts ranks on all nodes."""
        assert self._rendezvous is not None
        places = [(node.agent, (at, len(self.nodes))) for at, node in enumerate(self.nodes)]
        return MultiHostLaunch(
            lambda gauged, print_line: [RemoteWorkers(agent, gauged, print_line, place) for agent, place in places],
            self._rendezvous.host,
        )

    def begin(self, needs: RankRequirements) -> None:
        """Do nothing, because a ready agent already holds the node's devices."""

    def open(self, needs: RankRequirements) -> None:
        """Prepare every agent for starting ranks.

        Raises:
            UserError: an agent cannot.
            Stopped: the user cancelled.
        """
        self._needs = needs
        self._open(self.nodes)

    def _open(self, nodes: list[Node]) -> None:
        assert self._needs is not None
        # each agent has its node's interpreter
        needs = {key: value for key, value in dataclasses.asdict(self._needs).items() if key != "interpreter"}

        def asked(node: Node) -> Message:
            assert node.hardware is not None
            env = self._interface_variables(self.nodes.index(node))
            return {"needs": needs, "hardware": node.hardware.to_json(), "env": env, "who": self.who}

        if self.echo:
            for node in nodes:
                node.agent.start_echo()
        self._on_nodes(nodes, _OPEN_SECONDS, "open", asked)

    def _interface_variables(self, at: int) -> dict[str, str]:
        assert self._rendezvous is not None
        interface = self._rendezvous.interfaces[at]
        if not interface or len(self.nodes) == 1:
            return {}
        return {name: interface for name in INTERFACE_VARIABLES if name not in os.environ}

    def load_ops(self, names: Sequence[str]) -> bool:
        """Build and load ops on every node, see `LocalMachine.load_ops`."""
        self._op_names = list(dict.fromkeys([*self._op_names, *names]))
        return self._load(self.nodes, list(names))

    def _load(self, nodes: list[Node], names: list[str]) -> bool:
        answers = []
        # The first node builds alone. The other nodes find its result in a shared home, where locks may not work across
        # machines.
        for some in (nodes[:1], nodes[1:]) if names else ():
            answers += self._on_nodes(some, _OPS_SECONDS, "load_ops", lambda node: {"names": names})
        for answer in answers:
            self.ops.failed.update(answer["failed"])
            self.ops.folder = answer["folder"]
            self.ops.build_seconds = max(self.ops.build_seconds, answer["seconds"])
        return all(answer["fork_safe"] for answer in answers)

    @property
    def broken(self) -> bool:
        """True if a node is disconnected."""
        return any(node.agent.failure for node in self.nodes)

    def reconnect(self) -> None:
        """Reconnect to disconnected nodes and prepare them.

        Raises:
            MachineError: a node cannot be reached within minutes.
            Stopped: the user cancelled.
        """
        until = time.monotonic() + _BACK_SECONDS
        for node in self.nodes:
            if not node.agent.failure:
                continue
            self.print_line(f"node {node.agent.failure}: reaching it again")
            while True:
                try:
                    self._restart_agent(node)
                    break
                except UserError as error:
                    node.agent.close()
                    if self.cancelled():
                        raise Stopped("stopped while a node was reached again") from None
                    if time.monotonic() > until:
                        raise MachineError(f"{error}; the study goes on with the same command") from None
                    time.sleep(_RETRY_SECONDS)
            self.print_line(f"node {node.name} is back")

    def _restart_agent(self, node: Node) -> None:
        before, met = node.survey["hostname"], self._rendezvous
        node.agent.close()
        node.agent = self._start(node.host)
        self._greet([node])
        self._survey([node])
        if all(one.agent is node.agent or not one.agent.failure for one in self.nodes):
            self._compare()  # a scheduler may have replaced the machine
        if node.survey["hostname"] != before:
            self.print_line(f"in place of node {node.name} ({before}) there is {node.survey['hostname']} now")
        changed = [node]
        if self._rendezvous != met:  # the other nodes need the new rendezvous too
            changed = [one for one in self.nodes if not one.agent.failure]
        self._open(changed)
        self._load(changed, self._op_names)

    def is_shared_path(self, path: Path) -> bool:
        """Return True if every node has this path, as on a shared file system."""
        if self.broken:
            return False
        try:
            return all(self._on_nodes(self.nodes, _SURVEY_SECONDS, "exists", lambda node: {"path": str(path)}))
        except UserError:
            return False

    def close(self) -> None:
        """End every agent and all that it has started."""
        for node in self.nodes:
            node.agent.hang_up()
        for node in self.nodes:
            node.agent.close()


# -- comparison of nodes -----------------------------------------------------------------------------------------------

_SSH_FAILED = 255  # ssh's own exit status: ssh(1)
MOST_CLOCK_SECONDS = 30.0  # seconds of clock difference; caches, leases and checkpoints depend on times


def greeting_complaint(node: str, failure: NodeDown) -> str:
    """Return why a node's agent did not start, and what to do, in one line."""
    if failure.received:
        return (
            f"node {node} prints {failure.received!r} into the stream, before its agent begins: keep shells that are not "
            "interactive silent there (~/.bashrc), and /etc/profile.d"
        )
    remedy = "autotune and the environment that you train in must be at the same paths on every node"
    if failure.code == _SSH_FAILED:
        remedy = f"`ssh -o BatchMode=yes {node} true` must work"
    return f"node {failure}; {remedy}"


def check_versions_and_clocks(
    names: Sequence[str], surveys: Sequence[Mapping[str, Any]], ours: Mapping[str, str | None]
) -> None:
    """Check that all nodes have the same driver and devices, this machine's packages, and a matching clock.

    Args:
        ours: versions on this machine, which predicts and writes configs.

    Raises:
        UserError: nodes differ; one line with all differences.
    """
    differing = []
    devices = [{**one["versions"], "device": one["hardware"]["name"]} for one in surveys]
    for what in sorted({key for one in devices for key in one}):
        found = [one.get(what) for one in devices]
        usual = ours[what] if what in ours else Counter(found).most_common(1)[0][0]
        whose = "this machine has" if what in ours else "the others have"
        others = [f"{name} has {value or 'none'}" for name, value in zip(names, found, strict=True) if value != usual]
        if others:
            differing.append(f"{what}: {', '.join(others)} where {whose} {usual or 'none'}")
    for name, one in zip(names, surveys, strict=True):
        apart = float(one["ahead_seconds"])
        if abs(apart) > MOST_CLOCK_SECONDS:
            differing.append(f"clock: {name}'s is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}")
    if differing:
        raise UserError(f"the nodes differ: {'; '.join(differing)}; make them alike, or --exclude those that are not")


def combined(parts: Sequence[Hardware], threads: int) -> Hardware:
    """Return the hardware of all nodes together. The node with the least memory determines the capacity."""
    free = min(part.memory_bytes - part.taken_bytes for part in parts)
    memory = min(part.memory_bytes for part in parts)
    return dataclasses.replace(
        parts[0],
        count=sum(part.count for part in parts),
        nodes=len(parts),
        memory_bytes=memory,
        taken_bytes=max(0, memory - free),
        host_memory_bytes=min(part.host_memory_bytes for part in parts),
        gpus=tuple(gpu for part in parts for gpu in part.gpus),
        threads=threads,
    )


# -- network -----------------------------------------------------------------------------------------------------------

_Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
# Interface variables of the libraries. Variables that the user has set are kept.
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class RendezvousNetwork:
    """Rendezvous of the ranks: the first node's address, and each node's interface to that network."""

    host: str
    interfaces: tuple[str, ...]


def rendezvous_network(
    names: Sequence[str], surveys: Sequence[Mapping[str, Any]], interface: str | None = None
) -> RendezvousNetwork:
    """Choose a network that contains all nodes.

    The network by which ssh reached the first node is preferred, then the first node's first one. IPv6 is used only
    without a common IPv4 network, because some libraries and scripts cannot read IPv6 addresses.

    Args:
        interface: required interface, with the same name on every node.

    Raises:
        UserError: a node lacks that interface, or no network contains all nodes.
    """
    found = [_addresses(one) for one in surveys]
    if interface is not None:
        for name, addresses in zip(names, found, strict=True):
            if interface not in (known := dict(addresses)):
                raise UserError(
                    f"--interface {interface}: node {name} has no such interface that is up; it has "
                    f"{', '.join(sorted(known)) or 'none'}"
                )
        found = [[one for one in addresses if one[0] == interface] for addresses in found]
    reached = surveys[0].get("reached_at") or [""]
    one_machine = len({str(one.get("hostname")) for one in surveys}) == 1
    reachable = [one for one in found[0] if one_machine or not one[1].ip.is_loopback]
    reachable.sort(key=lambda known: (known[1].version, str(known[1].ip) != reached[0]))
    for device, address in reachable:
        # Bridges of containers (docker0, cni0) and of virtual machines (virbr0) have the same address on all machines.
        alike = [
            [
                name
                for name, one in addresses
                if one.network == address.network and (one_machine or one.ip != address.ip)
            ]
            for addresses in found[1:]
        ]
        if all(alike):
            return RendezvousNetwork(str(address.ip), (device, *(devices[0] for devices in alike)))
    everywhere = {address.ip for addresses in found[1:] for _, address in addresses}
    routed = next((address.ip for _, address in reachable if address.ip not in everywhere), None)
    if routed is None:
        raise UserError(
            f"node {names[0]} has no address at which the other nodes could reach it: give --interface NAME"
        )
    # the nodes are in different networks with a router between them, so each library chooses its interface
    return RendezvousNetwork(str(routed), (interface or "",) * len(names))


def _addresses(survey: Mapping[str, Any]) -> list[tuple[str, _Address]]:
    return [(name, ipaddress.ip_interface(f"{address}/{bits}")) for name, address, bits in survey["addresses"]]
