"""A Ray of a head without CPUs and two raylets with one each, on this machine; each raylet in a network namespace with an address
of its own where this process may make such."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.conftest import free_port
from tests.executors.cluster.hosts import Networks, _runs, only_tests

# Ray's packages, where they lie in a folder of their own: only processes of tests of Ray are to find them.
PACKAGES = Path(__file__).parents[3] / ".venv-ray"
_APART = (PACKAGES / "ray").is_dir()
WHY_NOT = "" if _APART or importlib.util.find_spec("ray") else "no ray here: `make cluster-tests` installs it"


def with_ray(also: str = "") -> str:
    """A PYTHONPATH by which other processes find it."""
    return os.pathsep.join(filter(None, [str(PACKAGES) if _APART else "", also, os.environ.get("PYTHONPATH", "")]))


# In the environment of all that a raylet starts: whose it is. Its address would not tell, since Ray puts another for 127.0.0.1.
_MARK = "TESTS_CLUSTER"
_START = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--object-store-memory=80000000"]


@dataclass
class Ray:
    """The running one."""

    folder: Path
    address: str = ""
    own_addresses: bool = False
    raylets: list[subprocess.Popen[bytes]] = field(default_factory=list)  # `ray start` of the head, and of each node
    spaces: list[str] = field(default_factory=list)  # network namespaces by number; empty where there are none
    ips: list[str] = field(default_factory=list)  # by number

    def start(self, number: int) -> None:
        """Starts `ray start` of node `number`; 0 is the head."""
        where = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        words = [sys.executable, *_START, *(where if number == 0 else [f"--address={self.address}"])]
        words += [f"--num-cpus={min(number, 1)}", "--num-gpus=0", f"--node-name=ray{number}", "--min-worker-port=0"]
        words += (
            ["--max-worker-port=0", f"--temp-dir={self.folder / 'ray'}"] if number == 0 else ["--max-worker-port=0"]
        )
        ip = self.ips[number]
        words += [f"--node-ip-address={ip}"]
        if self.spaces and number:
            words = ["ip", "netns", "exec", self.spaces[number], *words]
        env = {
            **os.environ,
            "PYTHONPATH": with_ray(only_tests(self.folder)),
            "RAY_memory_monitor_refresh_ms": "0",
            "OMP_NUM_THREADS": "1",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            _MARK: str(self.folder),
        }
        with (self.folder / f"ray{number}.log").open("wb") as out:  # anew: `wait` looks for what this one says
            self.raylets[number : number + 1] = [
                subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            ]

    def kill(self, number: int) -> None:
        """Kills a raylet as a machine that dies would: with all that Ray runs there."""
        for process in self._all(number):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.raylets[number].wait()

    def _all(self, number: int) -> list[psutil.Process]:
        with suppress(psutil.Error):
            top = psutil.Process(self.raylets[number].pid)
            return [*top.children(recursive=True), top]
        return []

    def agents(self) -> list[psutil.Process]:
        """Processes that agents have started on the nodes, and all below them."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                has = process.environ()
                if has.get(_MARK) == str(self.folder) and "AUTOTUNE_REACHED_AT" in has and _runs(process):
                    found.append(process)
        return found

    def wait(self, number: int) -> None:
        """Returns once a raylet says that it has started."""
        log, until = self.folder / f"ray{number}.log", time.monotonic() + 120
        while "To terminate the Ray runtime" not in (text := log.read_text()):
            assert self.raylets[number].poll() is None, text[-2000:]
            assert time.monotonic() < until, text[-2000:]
            time.sleep(0.1)


@contextmanager
def made_ray(nodes: int = 2) -> Iterator[Ray]:
    """A Ray for as long as the `with` lasts."""
    networks = Networks()
    own = networks.make(nodes)
    home = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets' paths are short
    made = Ray(home, own_addresses=own)
    try:
        head = networks.address(254) if own else "127.0.0.1"
        made.ips = [head, *(networks.address(number) if own else "127.0.0.1" for number in range(1, nodes + 1))]
        made.spaces = ["", *(networks.namespace(number) for number in range(1, nodes + 1))] if own else []
        made.address = f"{head}:{free_port()}"
        for number in range(nodes + 1):  # one after the other: they draw names of sockets in the same folder
            made.start(number)
            made.wait(number)
        yield made
    finally:
        for number in reversed(range(len(made.raylets))):
            with suppress(Exception):
                made.kill(number)
        networks.close()
        shutil.rmtree(home, ignore_errors=True)
