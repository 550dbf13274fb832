"""Processes that a launcher started, one per node: the first one tunes, the others become its agents."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from autotune.commands.environment import launched_peers
from autotune.errors import UserError
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.transports import Peers
from autotune.executors.machine import RankRequirements
from tests.conftest import free_port, wait_until

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
JOIN = "import os; from autotune.commands.environment import launched_peers as p; p(os.environ).join()"


@pytest.mark.parametrize(
    ("variables", "rank", "port"),
    [
        ("RANK=1 WORLD_SIZE=3", 1, 23456),
        ("RANK=1 WORLD_SIZE=24 PET_NODE_RANK=2 PET_NNODES=3", 2, 23456),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3", 0, 23456),
        ("SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3", 2, 23456),
        ("GROUP_RANK=1 GROUP_WORLD_SIZE=3 TORCHELASTIC_USE_AGENT_STORE=True", 1, 23457),
    ],
)
def test_ranks_of_launchers(variables: str, rank: int, port: int) -> None:
    known = dict(word.split("=") for word in variables.split())
    found = launched_peers(MASTER | known)
    assert (found.rank, found.size, found.address) == (rank, 3, ("127.0.0.1", port))
    assert launched_peers(known) is None, "no address"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", **MASTER}
    assert launched_peers(alone) is None
    assert len(alone) == 4, "trials of one process are no ranks of torchrun either"


class Launcher(ExitStack):
    """Starts processes on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.port = folder, free_port()

    def start(self, rank: int, *words: str) -> subprocess.Popen[bytes]:
        variables = MASTER | {"MASTER_PORT": str(self.port), "RANK": str(rank), "WORLD_SIZE": "3"}
        how = {"cwd": self.folder, "env": {**os.environ, **variables, "OMP_NUM_THREADS": "1"}}
        with self.log(rank).open("w") as log:
            process = subprocess.Popen(words or [sys.executable, "-c", JOIN], stdout=log, stderr=log, **how)  # type: ignore[call-overload]
        self.callback(process.kill)
        return process

    def log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"

    def peers(self, wait_seconds: float = 60.0) -> Peers:
        return self.enter_context(closing(Peers(0, 3, ("127.0.0.1", self.port), wait_seconds)))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(tmp_path) as made:
        yield made


def test_a_peer_that_dies_is_a_lost_node_and_one_without_rank_0_fails(launcher: Launcher, tmp_path: Path) -> None:
    first, second, peers = launcher.start(1), launcher.start(2), launcher.peers()
    said: list[str] = []
    nodes, needs = peers.place(None, 1, "cpu"), NodeRequirements("cpu")
    cluster = Cluster(nodes, peers, needs, tmp_path, print_line=said.append)
    with closing(cluster):
        assert cluster.reach().nodes == 3
        cluster.open(RankRequirements("cpu", 1))
        second.kill()
        wait_until(lambda: cluster.broken, "the node to be lost")
        second = launcher.start(2)
        cluster.reconnect()
        assert said[0].startswith("node rank2: its agent, or the way to it, has ended")
        cluster.nodes[1].agent._end()  # as if rank 0 were killed
        assert first.wait(60) == 1
    assert second.wait(60) == 0
    assert launcher.log(1).read_text() == "autotune: the tuner of this agent is gone\n"


def test_a_peer_that_never_comes_ends_the_call(launcher: Launcher) -> None:
    peers = launcher.peers(wait_seconds=0.0)
    with pytest.raises(UserError, match=r"node rank1 did not connect to port \d+ in time"):
        peers.place(None, 1, "cpu")
    stranger = launcher.enter_context(socket.create_connection(("127.0.0.1", launcher.port)))
    stranger.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(UserError, match="node rank2 did not connect"):
        peers.connect("rank2", Path())
    with pytest.raises(UserError, match=r"rank 1: rank 0 does not answer at 127.0.0.1:\d+"):
        Peers(1, 3, ("127.0.0.1", 1), 0.1).join()


@pytest.mark.slow
def test_the_same_command_in_each_process_tunes_all_nodes(launcher: Launcher) -> None:
    words = (
        "run --model tiny-llama --study peers --device cpu --gpus 1 --seq-len 32 --global-batch-size 3 --max-trials 1"
    )
    program = str(Path(sys.executable).with_name("autotune"))
    started = [launcher.start(rank, program, *words.split()) for rank in range(3)]
    assert not any(process.wait(300) for process in started)
    assert "on 3 nodes" in launcher.log(0).read_text()
