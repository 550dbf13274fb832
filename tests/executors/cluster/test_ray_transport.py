"""Ray: which nodes it is asked for, what is said where it has them not, and a real one of two raylets."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors.cluster import ray_transport
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.ray_transport import RayNodes, bundle_of, described, names_of, ray_address
from autotune.executors.machine import RankRequirements
from tests.conftest import wait_until
from tests.executors.cluster.hosts import group_of, is_lost
from tests.executors.cluster.ray_cluster import WHY_NOT, Ray, made_ray, with_ray


def has(*nodes: tuple[float, float]) -> list[dict]:
    """Nodes of (GPUs, CPUs) each."""
    return [{"Resources": {what: n for what, n in zip(("GPU", "CPU"), node, strict=True) if n}} for node in nodes]


@pytest.mark.parametrize(
    ("nodes", "asked", "bundle"),
    [
        (has((8, 96), (8, 96)), (2, None, "auto"), {"GPU": 8, "CPU": 96}),
        # half of the first one's, all of the second's
        (has((8, 96), (4, 32)), (2, None, "auto"), {"GPU": 4, "CPU": 32}),
        (has((8, 96), (4, 32)), (1, None, "auto"), {"GPU": 8, "CPU": 96}),
        (has((8, 96), (8, 64), (0, 128)), (2, 2, "cuda"), {"GPU": 2, "CPU": 16}),
        (has((0, 4), (0, 2), (0, 0)), (2, 1, "cpu"), {"CPU": 2}),
        (has((0, 4), (0, 2)), (2, 1, "auto"), {"CPU": 2}),
        (has((1, 0), (1, 0)), (2, 1, "cuda"), {"GPU": 1}),
    ],
)
def test_what_is_reserved(nodes: list[dict], asked: tuple, bundle: dict) -> None:
    assert bundle_of(nodes, *asked) == bundle


@pytest.mark.parametrize(
    ("nodes", "asked", "said"),
    [
        (
            has((8, 96), (8, 96)),
            (3, None, "auto"),
            "3 nodes with 1 GPU cannot be had: the cluster has 2 nodes with 8 GPU and 96 CPU",
        ),
        (
            has((8, 96), (4, 48)),
            (2, 8, "cuda"),
            "2 nodes with 8 GPU cannot be had: .* 1 node with 8 GPU and 96 CPU, 1 node with 4",
        ),
        (has((0, 4)), (1, 1, "cuda"), "1 nodes with 1 GPU cannot be had: the cluster has 1 node with 4 CPU"),
        (has((0, 4), (0, 0)), (2, 1, "cpu"), "2 nodes with 1 CPU cannot be had: .* 1 node with neither GPU nor CPU"),
        ([], (1, None, "auto"), "the cluster has no node"),
    ],
)
def test_what_no_cluster_of_these_has(nodes: list[dict], asked: tuple, said: str) -> None:
    with pytest.raises(UserError, match=said):
        bundle_of(nodes, *asked)


def test_a_cluster_of_many_nodes_is_described_in_short() -> None:
    assert described(has(*[(8, 96)] * 40, (0, 16))) == "40 nodes with 8 GPU and 96 CPU, 1 node with 16 CPU"


def test_nodes_go_by_their_name_or_by_their_id() -> None:
    nodes = [{"NodeID": number * 56, "NodeName": name} for number, name in (("1", "a"), ("2", "b"), ("3", "b"))]
    assert list(names_of(nodes).values()) == ["a", "2" * 12, "3" * 12]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("ray://head:10001", "Ray's client has no nodes of its own: call autotune on a machine of the cluster"),
        ("head", "expected HOST:PORT, like 10.0.0.1:6379, or auto"),
        ("head:0", "expected HOST:PORT"),
        (":x", "expected HOST:PORT"),
    ],
)
def test_addresses_that_are_none(typed: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ray_address({"RAY_ADDRESS": typed})


def test_where_the_address_comes_from_and_a_python_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_transport.importlib.util, "find_spec", lambda name: name)
    assert ray_address({"RAY_ADDRESS": "b:2"}) == "b:2"
    assert ray_address({}) == "auto"
    monkeypatch.setattr(ray_transport.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no package ray in .*Install the cluster's version of it there"):
        ray_address({})


# -- a real one --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _ray_of_this_module() -> Iterator[Ray]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with made_ray() as made:
        yield made


@pytest.fixture
def real(_ray_of_this_module: Ray, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """A test leaves nothing running on it. The packages come last, so that they replace none of the tests' own."""
    monkeypatch.setenv("PYTHONPATH", with_ray())
    monkeypatch.setattr(sys, "path", [*sys.path, *with_ray().split(os.pathsep)])
    yield _ray_of_this_module
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    wait_until(lambda: not _ray_of_this_module.agents(), "the end of all that was started")


@pytest.mark.slow
def test_nodes_that_are_lost_come_back(real: Ray, tmp_path: Path) -> None:
    """A raylet that is killed is the machine's, and the next group has all nodes."""
    said: list[str] = []
    with closing(RayNodes(real.address)) as nodes:
        hosts = nodes.place(2, 1, "cpu")
        cluster = Cluster(hosts, nodes, NodeRequirements("cpu"), tmp_path / "nodes", print_line=said.append)
        with closing(cluster):
            hardware = cluster.reach()
            assert (hardware.count, hardware.nodes) == (2, 2)
            cluster.open(RankRequirements("cpu", 1))
            group = group_of(cluster)
            lost = cluster.nodes[1].name
            real.kill(2)
            is_lost(cluster, group, lost)
            group.end()
            real.start(2)
            real.wait(2)
            cluster.reconnect()
            group_of(cluster).end()
            assert said[-1] == f"node {lost} is back"


@pytest.mark.slow
def test_what_a_cluster_has_not_is_said_in_one_line(real: Ray, tmp_path: Path) -> None:
    with closing(RayNodes(real.address)) as first, closing(RayNodes(real.address)) as second:
        for asked, said in (
            ((3, 1, "cpu"), "--executor ray: 3 nodes with 1 CPU cannot be had: the cluster has .*2 nodes with 1 CPU"),
            ((1, 1, "cuda"), "--executor ray: 1 nodes with 1 GPU cannot be had: the cluster has"),
            ((2, None, "auto"), "--device cpu --gpus N says how many CPU ranks each node has"),
        ):
            with pytest.raises(UserError, match=said):
                first.place(*asked)
        assert len(first.place(1, 1, "cpu")) == 1
        second.place_seconds = 1.0
        with pytest.raises(
            UserError,
            match=r"2 x \(1 CPU\) cannot be had within 1 s: others hold them; .* of which 1 CPU in all are free",
        ):
            second.place(2, 1, "cpu")
        first.close()
        second.place_seconds = 60.0
        assert len(second.place(2, 1, "cpu")) == 2


# What a driver does whose cluster says that it is of another version, in Ray's own words.
OTHER_VERSION = """
import ray
from ray._private.utils import check_version_info
from autotune.errors import UserError
from autotune.executors.cluster.ray_transport import joined_ray
ray.init = lambda **_: check_version_info({"ray_version": "2.9.0", "python_version": "3.9.1"}, "node 10.0.0.1")
try:
    joined_ray("auto", False)
except UserError as why:
    print(why)
"""


@pytest.mark.slow
def test_another_version_and_nobody_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("PYTHONPATH", with_ray())
    told = subprocess.run([sys.executable, "-c", OTHER_VERSION], capture_output=True, text=True, timeout=120)
    assert told.stdout.startswith(
        "--executor ray: Ray at auto cannot be joined (Version mismatch: The cluster was started with: Ray: 2.9.0 Python: 3.9.1"
    ), told.stderr
    assert len(told.stdout.splitlines()) == 1
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        done = call(["run", "--model", "tiny-llama", "--executor", "ray", "--device", "cpu"], tmp_path)
    assert done.returncode == 2
    said = f"autotune: --executor ray: no Ray at {address} (Connection refused)"
    assert done.stderr.strip().splitlines()[-1].startswith(said)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_killed_tuner_leaves_nothing_at_ray(real: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--executor ray --nodes 2 --gpus 1 --device cpu --budget 240s"
    words = ["run", "--model", "tiny-llama", "--seq-len", "32", "--global-batch-size", "4", *options.split()]
    monkeypatch.setenv("RAY_ADDRESS", real.address)
    with (tmp_path / "log").open("wb") as log:
        tuner = subprocess.Popen(
            [sys.executable, "-m", "autotune", *words], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(
            lambda: len(real.agents()) > 1 or tuner.poll() is not None, "fork servers of the agents", seconds=120
        )
    finally:
        tuner.kill()
    assert tuner.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()


def call(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words], cwd=cwd, capture_output=True, text=True, timeout=600, env=env
    )
