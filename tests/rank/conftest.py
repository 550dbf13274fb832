"""A parent of ranks that follows the contract of `autotune.rank` and nothing else: no executor, no supervisor."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.job import Job
from autotune.rank.ds_config import needed_ops
from autotune.workers.launchers import trial_environment
from autotune.workers.protocol import Channel, Message
from tests.conftest import SHARED_PAGES, make_candidate, make_job, path_of_ranks

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0  # a rank that says nothing for so long hangs


def environment() -> dict[str, str]:
    return trial_environment("cpu", 1)


class Rank:
    """The parent's end of one rank."""

    def __init__(self, channel: Channel, hello: Message, status: Callable[[], int | None]) -> None:
        self.channel, self.hello, self._status = channel, hello, status
        self.heard: list[Message] = []

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.heard]

    def wait_for(self, kind: str, **fields: Any) -> Message:
        """The next message of this kind and these fields; those before it are in `heard`."""
        while (message := self.channel.receive(PATIENCE_SECONDS)) is not None:
            if message["type"] == "pulse":  # comes when it likes
                continue
            self.heard.append(message)
            if message["type"] == kind and fields.items() <= message.items():
                return message
            assert message["type"] != "error", message["traceback"]
        raise AssertionError(f"no {kind}, but {self.heard[-3:]}")

    def exit_status(self) -> int:
        """When the rank has ended; what it said until then is in `heard`."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (status := self._status()) is None:
            assert time.monotonic() < until, "the rank does not end"
            time.sleep(0.02)
        self.heard += self.channel.drain()
        return status


class Parent:
    """Forks ranks from one fork server."""

    def __init__(self, folder: Path) -> None:
        self._channel, theirs = Channel.pair()
        usual = environment()
        with (folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "autotune.workers.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**usual, "PYTHONPATH": path_of_ranks(usual)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        modules = ["accelerate", "transformers.training_args", SHARED_PAGES]
        self._channel.send("hello", ops=needed_ops([make_candidate()], make_job(), "cpu"), modules=modules)
        self._statuses: dict[int, int] = {}
        assert self._channel.receive(), (folder / "server.log").read_text()

    def start(self, entry: str, spec: dict[str, Any], world: int = 1, *, cold: bool = False) -> list[Rank]:
        """A group of ranks that have said hello and got their spec; `cold` ones are interpreters of their own."""
        ranks = self.greet(entry, world, cold=cold)
        for number, rank in enumerate(ranks):
            rank.channel.send("spec", **spec, rank=number, world=world)
        return ranks

    def greet(self, entry: str, world: int = 1, *, cold: bool = False) -> list[Rank]:
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = f"{folder}/home.sock"
            listener.bind(address)
            listener.listen(world)
            listener.settimeout(PATIENCE_SECONDS)
            processes = {}
            for number in range(world):
                if cold:
                    command = [sys.executable, "-m", entry, address, str(number)]
                    process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL)
                    processes[process.pid] = process
                else:
                    self._channel.send(
                        "launch", entry=entry, address=address, rank=number, ticket=f"{address}#{number}"
                    )
            found = {}
            for _ in range(world):
                channel = Channel(listener.accept()[0])
                hello = channel.receive(PATIENCE_SECONDS)
                assert hello is not None
                hello["pid"] = channel.peer_pid
                status = processes[hello["pid"]].poll if cold else self._status_of(hello["pid"])
                found[hello["rank"]] = Rank(channel, hello, status)
            return [found[number] for number in range(world)]

    def _status_of(self, pid: int) -> Callable[[], int | None]:
        def status() -> int | None:
            for message in self._channel.drain():
                if message["type"] == "exited":
                    self._statuses[message["pid"]] = message["status"]
            return self._statuses.get(pid)

        return status

    def close(self) -> None:
        self._channel.close()
        self._server.wait(timeout=30)


@pytest.fixture(scope="session")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    made = Parent(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def make_spec(folder: Path, job: Job, /, **more: Any) -> dict[str, Any]:
    """What every kind of rank is told; a log and a store of their own in `folder`."""
    common = {
        "device": "cpu",
        "cap_bytes": None,
        "threads": 1,
        "seed": 0,
        "ops": [],
        "store": str(folder / "store"),
        "port": 29500,
    }
    return {"job": job.to_json(), **common, "log": str(folder / "rank.log"), **more}


@pytest.fixture
def in_rank(parent: Parent, tmp_path: Path) -> Callable[..., Any]:
    """Runs a function of a test module in a process of its own, alone in a process group, in the test's folder; gives back
    what it returns, which must be JSON."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        spec = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
        (rank,) = parent.start("tests.rank.guest", {**spec, "folder": str(tmp_path)})
        answer = rank.channel.receive(PATIENCE_SECONDS)
        rank.exit_status()
        assert answer is not None
        assert answer["type"] == "result", answer["text"]
        return answer["value"]

    return run
