"""Driver of a Ray job that reserves the nodes and carries the agents' streams.

Run as `python -m autotune.executors.cluster.ray_driver`. Ray kills a driver process, including all threads, if the head
node is lost, so the driver is separate from the tuner. The tuner sends the placement request over standard input, and
the driver answers over standard output (`ray_transport.py`).

Each `ray_relay.py` that connects to the driver's socket gets an actor in a bundle. The actor starts an agent process
and carries its pipes. When standard input ends, the job ends with all its actors; an agent ends with its pipes.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from autotune.util.units import counted

# Environment variables of a Ray worker that ranks must not inherit: Ray's own, and Ray's choice of threads.
_RAYS = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
_CONNECT_SECONDS = 10.0
_PLACE_SECONDS = 60.0  # seconds to wait for resources that other jobs hold
_POLL_SECONDS = 5.0
_LEAVE_SECONDS = 8.0  # seconds for an agent to end what it has started
Frames = list[tuple[bytes, bytes]]


class Refused(Exception):
    """Refused placement, with the reason in one line."""


class AgentActor:
    """Actor with an agent's process and its pipes.

    Ray sends this class to the nodes by value, so it uses only the standard library and Ray.
    """

    def __init__(self, command: list[str], not_passed: tuple[str, ...]) -> None:
        import ray

        env = {name: value for name, value in os.environ.items() if not name.startswith(not_passed)}
        env["AUTOTUNE_REACHED_AT"] = ray.util.get_node_ip_address()
        self._frames: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        pipe = subprocess.PIPE
        self._process: Any = None
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, env=env
            )
        except OSError as error:
            self._frames.put((b"e", f"{command[0]}: {error.strerror}\n".encode()))
            self._frames.put((b"x", b"127"))
            return
        readers = [
            threading.Thread(target=self._pump, args=pair, daemon=True)
            for pair in ((b"o", self._process.stdout), (b"e", self._process.stderr))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(readers[0],), daemon=True).start()

    def _pump(self, frame: bytes, pipe: Any) -> None:
        while data := pipe.read(65536):
            self._frames.put((frame, data))

    def _wait(self, reader: threading.Thread) -> None:
        status = self._process.wait()
        reader.join()
        # wait for the last text on standard error; surviving ranks may hold that pipe open for a moment
        time.sleep(0.1)
        self._frames.put((b"x", str(status).encode()))

    def read(self, seconds: float) -> Frames:
        """Wait for output of the agent and return it. The last frame is `x` with the exit status."""
        found = []
        with suppress(queue.Empty):
            found.append(self._frames.get(timeout=seconds))
            while True:
                found.append(self._frames.get_nowait())
        return found

    def write(self, data: bytes) -> None:
        """Write to the agent's input. A dead agent is no error here, because `read` reports it."""
        with suppress(OSError, ValueError, AttributeError):
            while data:
                data = data[self._process.stdin.write(data) :]

    def hang_up(self) -> None:
        """Close the agent's input, which ends the agent."""
        with suppress(OSError, AttributeError):
            self._process.stdin.close()


class Driver:
    """The Ray job."""

    def __init__(self, ask: dict[str, Any]) -> None:
        self._ask = ask
        self._group: Any = None
        self._bundle: dict[str, float] = {}
        self._carried: list[threading.Thread] = []

    # -- placing -----------------------------------------------------------------------------------------------------

    def place(self) -> list[dict[str, Any]]:
        """Reserve whole nodes and return their names by bundle.

        Raises:
            Refused: the cluster cannot be reached, has another version, or lacks such nodes.
        """
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        connect(self._ask["address"])
        alive = [node for node in ray.nodes() if node["Alive"]]
        bundle, count = bundle_of(alive, self._ask["nodes"], self._ask["per_node"], self._ask["device"])
        self._bundle = bundle
        strategy = "STRICT_SPREAD" if count > 1 else "STRICT_PACK"
        self._group = placement_group([bundle] * count, strategy=strategy)
        seconds = float(self._ask.get("seconds", _PLACE_SECONDS))
        if not self._group.wait(seconds):
            free = ray.available_resources()
            left = ", ".join(f"{free.get(what, 0):g} {what}" for what in ("GPU", "CPU") if what in bundle)
            wanted = ", ".join(f"{value:g} {what}" for what, value in bundle.items())
            raise Refused(
                f"{count} x {{{wanted}}} cannot be had within {seconds:.0f} s: others hold them; the cluster has "
                f"{described(alive)}, of which {left} in all are free now: wait for them, or ask for less (--nodes, --gpus)"
            )
        at = placement_group_table(self._group)["bundles_to_node_id"]
        names = names_of(alive)
        gpus = int(bundle.get("GPU", 0))
        return [{"bundle": int(index), "name": names[node], "gpus": gpus} for index, node in sorted(at.items())]

    # -- carrying ----------------------------------------------------------------------------------------------------

    def listen(self, path: str) -> None:
        """Accept relays from now on."""
        door = socket.socket(socket.AF_UNIX)
        door.bind(path)
        door.listen(64)
        threading.Thread(target=self._accept, args=(door,), daemon=True).start()

    def _accept(self, door: socket.socket) -> None:
        while True:
            link = door.accept()[0]
            one = threading.Thread(target=self._carry, args=(link,), daemon=True)
            self._carried.append(one)
            one.start()

    def _carry(self, link: socket.socket) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        over = threading.Event()
        first = b""
        while not first.endswith(b"\n"):
            if not (data := link.recv(1)):
                return
            first += data
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=int(first))
        how = {"num_cpus": self._bundle.get("CPU", 0), "num_gpus": self._bundle.get("GPU", 0)}
        once = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
        carrier = ray.remote(AgentActor).options(scheduling_strategy=where, **how, **once)
        actor = carrier.remote(self._ask["command"], _RAYS)
        threading.Thread(target=self._feed, args=(link, actor, over), daemon=True).start()
        try:
            while not over.is_set():
                for letter, data in ray.get(actor.read.remote(_POLL_SECONDS)):
                    send(link, letter, data)
                    if letter == b"x":
                        over.set()
        except OSError:  # the relay is gone, and `_feed` ends the agent
            over.wait(_LEAVE_SECONDS)
        except Exception as error:
            with suppress(OSError):
                send(link, b"e", f"ray: {ray_error_line(error)}\n".encode())
                send(link, b"x", b"1")
        finally:
            over.set()
            with suppress(Exception):
                ray.kill(actor)
            link.close()

    def _feed(self, link: socket.socket, actor: Any, over: threading.Event) -> None:
        import ray

        with suppress(OSError, ray.exceptions.RayError):
            while data := link.recv(2**20):
                # wait for each call, because calls of one actor may overtake each other
                ray.get(actor.write.remote(data))
        with suppress(Exception):
            actor.hang_up.remote()
        if not over.wait(_LEAVE_SECONDS):
            with suppress(Exception):
                ray.kill(actor)

    def end(self) -> None:
        """Give agents time to end after their relays have gone, then leave the cluster."""
        import ray

        until = time.monotonic() + _LEAVE_SECONDS + 1
        for one in self._carried:
            one.join(max(0.0, until - time.monotonic()))
        with suppress(Exception):
            ray.shutdown()


def send(link: socket.socket, letter: bytes, data: bytes) -> None:
    """Send a frame, see `ray_relay.py`."""
    link.sendall(letter + len(data).to_bytes(4, "big") + data)


def connect(address: str) -> None:
    """Join the cluster.

    Raises:
        Refused: no cluster is at the address, or it has another version.
    """
    import ray

    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise Refused(
                f"no Ray at {address} ({why}): give HOST:PORT as `ray status` says it, or start Ray there"
            ) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=False)
    except Exception as error:
        text = " ".join(str(error).split())
        if "Version mismatch" in text:
            raise Refused(
                f"the cluster has another version than this machine: {text.partition('Version mismatch: ')[2]}"
            ) from None
        if isinstance(error, ConnectionError) or "Could not find" in text:
            raise Refused(
                f"no Ray at {address} ({text[:200]}): start it on this machine (`ray start`), or set RAY_ADDRESS"
            ) from None
        raise Refused(f"Ray at {address} cannot be joined ({text[:300]})") from None


def bundle_of(
    nodes: list[dict[str, Any]], count: int | None, per_node: int | None, device: str
) -> tuple[dict[str, float], int]:
    """Return the resources to reserve on each node, and the number of nodes.

    Args:
        count: number of nodes; None: one.
        per_node: devices per node; None: as many as each of the `count` largest nodes has.
        device: `auto`, `cuda` or `cpu`.

    Raises:
        Refused: the cluster has no such nodes, even if all were free.
    """
    count = 1 if count is None else count
    has = described(nodes)
    gpus = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
    if device == "cpu" or (device == "auto" and not any(gpus)):
        cpus = sorted((node["Resources"].get("CPU", 0) for node in nodes), reverse=True)
        if count > len(cpus) or cpus[count - 1] < 1:
            raise Refused(f"{count} nodes with CPUs cannot be had: the cluster has {has}: give a smaller --nodes")
        return {"CPU": float(int(cpus[count - 1]))}, count
    each = per_node or (gpus[count - 1] if count <= len(gpus) else 0)
    fit = [node["Resources"] for node in nodes if each and node["Resources"].get("GPU", 0) >= each]
    if len(fit) < count:
        many = f"with {per_node} GPUs" if per_node else "with GPUs"
        raise Refused(f"{count} nodes {many} cannot be had: the cluster has {has}: give a smaller --nodes or --gpus")
    # CPUs in proportion to GPUs, limited to the smallest share among the required nodes
    shares = sorted((one.get("CPU", 0) * each / one["GPU"] for one in fit), reverse=True)
    cpus_each = int(shares[count - 1])
    return {"GPU": float(each)} | ({"CPU": float(cpus_each)} if cpus_each else {}), count


def described(nodes: list[dict[str, Any]]) -> str:
    """Describe a cluster: the number of nodes by their resources."""
    all_ = [node["Resources"] for node in nodes]
    each = [" and ".join(f"{one[what]:g} {what}" for what in ("GPU", "CPU") if one.get(what)) for one in all_]
    kinds = Counter(what or "neither GPU nor CPU" for what in each)
    return ", ".join(f"{counted(count, 'node')} with {what}" for what, count in kinds.items()) or "no node"


def names_of(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Return node names by Ray's ids: unique host names or addresses, else the start of the id."""
    ids = [node["NodeID"] for node in nodes]
    for what in ("NodeManagerHostname", "NodeManagerAddress", "NodeName"):
        names = [str(node.get(what) or "") for node in nodes]
        if len(set(names)) == len(names) and all(names):
            return dict(zip(ids, names, strict=True))
    return {one: one[:12] for one in ids}


def ray_error_line(error: Exception) -> str:
    """Return a Ray error in one line, without leading ids."""
    ids = ("class_name", "actor_id", "pid", "namespace", "ip", "name")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(line for line in lines if not line.startswith(ids))[:400]}"


def main() -> None:
    """Serve a tuner's request for nodes until its stream closes."""
    from autotune.executors.cluster.rpc import SILENT_SECONDS, own_stream

    stream = own_stream(SILENT_SECONDS)
    ask = stream.receive()
    if ask is None:
        return
    driver = Driver(ask)

    def hear_the_end() -> None:
        while not stream.closed:
            stream.receive()
        driver.end()
        os._exit(0)

    threading.Thread(target=hear_the_end, daemon=True).start()
    try:
        nodes = driver.place()
        driver.listen(ask["socket"])
        stream.send("placed", nodes=nodes)
    except Refused as why:
        stream.send("refused", text=str(why))
    except Exception as error:
        stream.send("refused", text=f"Ray does not do it: {ray_error_line(error)}")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
