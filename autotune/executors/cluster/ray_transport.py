"""Ray transport: Ray reserves the nodes, and the agent of each is an actor. Ranks do not use Ray.

This process is the driver of the Ray job, so that Ray ends the agents with it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune._version import install_command
from autotune.errors import UserError, one_line
from autotune.executors.cluster.rpc import ASIDE, RemoteAgent
from autotune.executors.cluster.transports import PACKAGE, Host
from autotune.util.units import counted
from autotune.workers.protocol import Message

# Environment variables of a Ray worker that ranks must not inherit: Ray's own, and Ray's choice of threads.
_RAYS = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
_CONNECT_SECONDS = 10.0
_PLACE_SECONDS = 60.0  # seconds to wait for resources that other jobs hold
_CLIENT = "ray://"
_ASIDE = "aside"  # concurrency group of the methods that may run at any time


def ray_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the cluster's address for `ray.init`: $RAY_ADDRESS, or this machine's cluster.

    Raises:
        UserError: the address is invalid, or ray is not installed here.
    """
    address = environment.get("RAY_ADDRESS") or "auto"
    if address.startswith(_CLIENT):
        raise UserError(
            f"RAY_ADDRESS {address}: Ray's client has no nodes of its own: call autotune on a machine of the cluster, and "
            "give HOST:PORT as `ray status` says it there, or auto"
        )
    port = address.rpartition(":")[2]
    if address != "auto" and not (":" in address and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"RAY_ADDRESS {address}: expected HOST:PORT, like 10.0.0.1:6379, or auto")
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"--executor ray: no package ray in {sys.executable}. Install the cluster's version of it there "
            f"({install_command('ray')})"
        )
    return address


class RayAgent(RemoteAgent):
    """Agent that is an actor. Ray notices if its node is lost."""

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name)
        self._actor = actor

    def begin(self, method: str, **fields: Any) -> Future[Message]:
        """Call a method of the actor; see `RemoteAgent`."""
        call = self._actor.call
        if method in ASIDE:
            call = call.options(concurrency_group=_ASIDE)
        future: Future[Message] = call.remote(method, fields).future()
        return future

    def _end(self) -> None:
        import ray

        ray.kill(self._actor)


def _actor_class() -> Any:
    """Return the class of the actors. Ray sends this class to the nodes by value, and they import the agent's from `PACKAGE`."""
    import ray

    package, not_passed, aside = str(PACKAGE), _RAYS, _ASIDE

    class AgentActor:
        def __init__(self) -> None:
            import os
            import sys

            for name in list(os.environ):
                if name.startswith(not_passed):
                    del os.environ[name]
            os.environ["AUTOTUNE_REACHED_AT"] = ray.util.get_node_ip_address()
            sys.path.append(os.path.dirname(package))
            from autotune.executors.cluster.agent import NodeAgent
            from autotune.util.linux import adopt_orphans

            adopt_orphans()
            self._agent = NodeAgent()

        def call(self, method: str, fields: dict[str, Any]) -> dict[str, Any]:
            return self._agent.call(method, fields)

    return ray.remote(concurrency_groups={aside: 2})(AgentActor)


@dataclass
class RayNodes:
    """Transport whose nodes Ray reserves.

    Args:
        address: see `ray_address`.
        echo: copy the ranks' output to this process's standard error, for a training.
        place_seconds: wait for resources that other jobs hold.
    """

    address: str
    echo: bool = False
    place_seconds: float = _PLACE_SECONDS
    _group: Any = None
    _bundle: dict[str, float] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)  # node names by bundle

    def place(self, nodes: int | None, per_node: int | None, device: str) -> list[Host]:
        """Reserve nodes until `close`.

        Args:
            nodes: number of nodes; None: one.
            per_node: devices per node; None: all GPUs that each of these nodes has.
            device: `auto`, `cuda` or `cpu`.

        Raises:
            UserError: Ray lacks such nodes or cannot be reached; in one line.
        """
        ray = joined_ray(self.address, self.echo)
        from ray.util.placement_group import placement_group, placement_group_table

        alive = [node for node in ray.nodes() if node["Alive"]]
        count = nodes or 1
        self._bundle = bundle_of(alive, count, per_node, device)
        devices = per_node or int(self._bundle.get("GPU", 0))
        if not devices:
            raise UserError("Ray's nodes have no GPUs: --device cpu --gpus N says how many CPU ranks each node has")
        strategy = "STRICT_SPREAD" if count > 1 else "STRICT_PACK"
        self._group = placement_group([self._bundle] * count, strategy=strategy)
        if not self._group.wait(self.place_seconds):
            left = _counted(ray.available_resources())
            self.close()
            raise UserError(
                f"--executor ray: {count} x ({_counted(self._bundle)}) cannot be had within {self.place_seconds:.0f} s: "
                f"others hold them; the cluster has {described(alive)}, of which {left} in all are free now: wait for "
                "them, or ask for less (--nodes, --gpus)"
            )
        names, at = names_of(alive), placement_group_table(self._group)["bundles_to_node_id"]
        self._names = [names[at[bundle]] for bundle in range(count)]
        return [Host(name, tuple(range(devices))) for name in sorted(self._names)]

    def connect(self, node: str, log: Path) -> RemoteAgent:
        """Create an actor in the node's bundle. Ray may have moved the bundle to another node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._names.index(node))
        how = {"num_cpus": self._bundle.get("CPU", 0), "num_gpus": self._bundle.get("GPU", 0)}
        actor = _actor_class().options(scheduling_strategy=where, **how, max_restarts=0, max_task_retries=0)
        return RayAgent(node, actor.remote())

    def close(self) -> None:
        """Return the nodes to Ray and end all that still runs there."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with suppress(Exception):  # the cluster is gone
                remove_placement_group(self._group)
            self._group = None


def joined_ray(address: str, echo: bool) -> Any:
    """Return the module `ray` after joining the cluster.

    Raises:
        UserError: no cluster is at the address, or it has another version.
    """
    import ray

    ends = signal.getsignal(signal.SIGTERM)
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"--executor ray: no Ray at {address} ({why}): give HOST:PORT as `ray status` says it, or start Ray there"
            ) from None
    try:
        ray.init(address=address, log_to_driver=echo, logging_level="ERROR", ignore_reinit_error=True)
    except Exception as error:
        raise UserError(
            f"--executor ray: Ray at {address} cannot be joined ({one_line(error)}): start it on this machine (`ray start`), or "
            "set RAY_ADDRESS"
        ) from None
    signal.signal(signal.SIGTERM, ends)  # Ray has replaced the handler
    return ray


def bundle_of(nodes: list[dict[str, Any]], count: int, per_node: int | None, device: str) -> dict[str, float]:
    """Return the resources to reserve on each of `count` nodes.

    Args:
        per_node: devices per node; None: as many as each of the `count` largest nodes has.
        device: `auto`, `cuda` or `cpu`.

    Raises:
        UserError: the cluster has no such nodes, even if all were free.
    """
    has = [node["Resources"] for node in nodes]
    on_cpus = device == "cpu" or (device == "auto" and not any(one.get("GPU") for one in has))
    kind, least = ("CPU", 1) if on_cpus else ("GPU", per_node or 1)
    amounts = sorted((int(one.get(kind, 0)) for one in has), reverse=True)
    if count > len(amounts) or amounts[count - 1] < least:
        raise UserError(
            f"--executor ray: {count} nodes with {least} {kind} cannot be had: the cluster has {described(nodes)}: give a "
            "smaller --nodes or --gpus"
        )
    if on_cpus:
        return {"CPU": float(amounts[count - 1])}
    each = per_node or amounts[count - 1]
    # CPUs in proportion to GPUs, limited to the smallest share among the required nodes
    shares = sorted((one.get("CPU", 0) * each / one["GPU"] for one in has if one.get("GPU", 0) >= each), reverse=True)
    cpus = float(int(shares[count - 1]))
    return {"GPU": float(each)} | ({"CPU": cpus} if cpus else {})


def described(nodes: list[dict[str, Any]]) -> str:
    """Describe a cluster: the number of nodes by their resources."""
    kinds = Counter(_counted(node["Resources"]) for node in nodes)
    return ", ".join(f"{counted(count, 'node')} with {what}" for what, count in kinds.items()) or "no node"


def _counted(resources: Mapping[str, float]) -> str:
    counts = [f"{resources[what]:g} {what}" for what in ("GPU", "CPU") if resources.get(what)]
    return " and ".join(counts) or "neither GPU nor CPU"


def names_of(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Return node names by Ray's ids. A name is an address, unless `ray start` was given another; a duplicate becomes an id."""
    names = Counter(node["NodeName"] for node in nodes)
    return {node["NodeID"]: node["NodeName"] if names[node["NodeName"]] == 1 else node["NodeID"][:12] for node in nodes}
