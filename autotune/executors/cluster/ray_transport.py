"""Ray transport: Ray reserves nodes, and an actor on each carries an agent's stream. Ranks do not use Ray.

Ray runs in a separate process (`ray_driver.py`), which ends with this one and ends the job.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune._version import install_command
from autotune.errors import UserError
from autotune.executors.cluster.rpc import SILENT_SECONDS, NoGreeting
from autotune.executors.cluster.transports import Host, agent_words, agents_complaint
from autotune.util.entry_points import RAY_DRIVER
from autotune.util.files import SocketFolder
from autotune.util.interpreter import OWN, module_command
from autotune.workers.failure_classifier import log_tail
from autotune.workers.protocol import Message, Stream

_RELAY = Path(__file__).with_name("ray_relay.py")
_PLACE_SECONDS = 180.0  # seconds for imports, joining the cluster, and the placement
_LEAVE_SECONDS = 15.0
_CLIENT = "ray://"


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


@dataclass
class RayNodes:
    """Transport whose nodes Ray reserves."""

    address: str  # see `ray_address`
    folder: Path  # for the driver's log
    print_line: Callable[[str], None] = lambda text: None  # receives lines for the user
    place_seconds: float | None = None  # wait for resources that other jobs hold; None: the driver's default
    _ask: Message = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _bundles: list[int] = field(default_factory=list)
    _driver: subprocess.Popen[bytes] | None = None
    _home: SocketFolder | None = None

    def place(self, nodes: int | None, per_node: int | None, device: str) -> list[Host]:
        """Reserve nodes until `close`.

        Args:
            nodes: number of nodes; None: one.
            per_node: devices per node; None: all GPUs that each of these nodes has.
            device: `auto`, `cuda` or `cpu`.

        Raises:
            UserError: Ray lacks such nodes or cannot be reached; in one line.
        """
        for option, asked in (("--nodes", nodes), ("--gpus", per_node)):
            if asked is not None and asked < 1:
                raise UserError(f"{option} {asked}: expected at least 1")
        self._ask = {"nodes": nodes, "per_node": per_node, "device": device}
        placed = self._place()
        self._names = [str(node["name"]) for node in placed]
        count = per_node or placed[0]["gpus"]
        if not count:
            raise UserError("Ray's nodes have no GPUs: --device cpu --gpus N says how many CPU ranks each node has")
        return [Host(name, tuple(range(count))) for name in self._names]

    def _place(self) -> list[dict[str, Any]]:
        self.close()
        self._home = SocketFolder("autotune-ray-")
        log = self.folder / "ray.log"
        with log.open("ab") as errors:
            self._driver = subprocess.Popen(
                module_command(OWN.path, RAY_DRIVER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches the whole terminal; the tuner decides
                env=OWN.environment(),
            )
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        stream = Stream(self._driver.stdout.fileno(), self._driver.stdin.fileno(), SILENT_SECONDS)
        seconds = {} if self.place_seconds is None else {"seconds": self.place_seconds}
        where = {"address": self.address, "socket": str(self._socket), "command": agent_words()}
        stream.send("place", **self._ask, **where, **seconds)
        answer = stream.receive(_PLACE_SECONDS + (self.place_seconds or 0.0))
        if answer is None or answer["type"] != "placed":
            last = log_tail(log, 500).strip().splitlines()[-1:]
            why = answer["text"] if answer else f"its driver does not answer ({last[0][:200] if last else 'no word'})"
            self.close()
            raise UserError(f"--executor ray: {why}")
        placed: list[dict[str, Any]] = sorted(answer["nodes"], key=lambda node: str(node["name"]))
        self._bundles = [int(node["bundle"]) for node in placed]
        return placed

    @property
    def _socket(self) -> Path:
        assert self._home is not None
        return self._home.path / "driver.sock"

    def command(self, node: str) -> list[str]:
        """Return the command of a relay to a node's agent.

        If the driver has died, a new one places the job first, possibly on other nodes.

        Raises:
            UserError: Ray no longer has such nodes.
        """
        if self._driver is None or self._driver.poll() is not None:
            self.print_line("the driver at Ray is gone: placing the nodes anew")
            self._place()
        bundle = self._bundles[self._names.index(node)]
        return [OWN.path, "-S", "-E", str(_RELAY), str(self._socket), str(bundle)]

    def complaint(self, node: str, failure: NoGreeting) -> str:
        """Return the reason why a node's agent did not start."""
        said = [line for line in failure.log.splitlines() if line.startswith("ray: ")]
        if said and not failure.received:
            return f"node {node}: Ray carries no agent there ({said[-1].removeprefix('ray: ')[:300]})"
        return agents_complaint(node, failure)

    def close(self) -> None:
        """Return the nodes to Ray and end all that still runs there."""
        driver, self._driver = self._driver, None
        if driver is not None:
            assert driver.stdin is not None
            assert driver.stdout is not None
            with suppress(OSError):
                driver.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                driver.wait(timeout=_LEAVE_SECONDS)
            if driver.poll() is None:
                driver.kill()
                driver.wait()
            driver.stdout.close()
        if self._home is not None:
            self._home.close()
            self._home = None
