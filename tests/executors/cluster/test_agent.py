"""Agents on this machine at the other end of a pipe: the protocol, a group spread over them, and every way for one to end."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from autotune.errors import MachineError, Stopped, UserError
from autotune.executors.cluster import agent as agents
from autotune.executors.cluster import cluster as clusters
from autotune.executors.cluster import rpc as wires
from autotune.executors.cluster.cluster import Cluster, NodeRequirements, sent_variables
from autotune.executors.cluster.rpc import CommandAgent, NodeDown
from autotune.executors.cluster.transports import CommandTransport, Host, agent_words
from autotune.executors.machine import RankRequirements
from autotune.problem.outcome import OutcomeKind, Source
from autotune.search.fingerprint import _WATCHED, _WATCHED_PREFIXES
from autotune.workers.failure_classifier import classify_failure
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.memory_monitor import Meter
from autotune.workers.memory_peaks import MemoryPeaks, merged
from tests.conftest import pid_lives, wait_until

FAKE = "tests.workers.fake_rank"
HOUR = 3600.0


class Pipe(CommandTransport):
    """A transport that goes no further than this machine."""

    def __init__(self, *before: str) -> None:
        self.before = before

    def command(self, node: str) -> list[str]:
        return [*self.before, *agent_words()]


class Spread:
    """Two nodes of one machine, with groups of fake ranks on them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, patch
        self.said: list[str] = []
        self.ready: set[int] = set()
        self.heard: dict[int, list[dict]] = {}
        self.group: WorkerGroup | None = None

    def open(
        self, plan: dict[str, object] | None = None, slots: int = 1, names: tuple[str, ...] = ("n1", "n2")
    ) -> Cluster:
        self._patch.setenv("FAKE_RANK", json.dumps(plan or {}))
        wishes = NodeRequirements("cpu", variables=("FAKE_RANK",))
        hosts = [Host(name, tuple(range(slots))) for name in names]
        self.cluster = Cluster(hosts, Pipe(), wishes, self.folder / "nodes", print_line=self.said.append)
        self.hardware = self.cluster.reach()
        self.cluster.open(RankRequirements("cpu", 1))
        self.agents = [psutil.Process(node.agent.greeting["pid"]) for node in self.cluster.nodes]
        return self.cluster

    def run(self, silent: float = HOUR) -> tuple[WorkerGroup, WatchEnd]:
        def take(rank: int, message: dict) -> None:
            self.heard.setdefault(rank, []).append(message)
            if message.get("phase") == "ready":
                self.ready.add(rank)

        policy = GroupPolicy(HOUR, lambda phase: silent, settle_seconds=0.2, may_exit=False)
        self.group = WorkerGroup(
            self.cluster.launcher, self.hardware, Meter(), policy, on_message=take, print_line=self.said.append
        )
        world = self.hardware.count
        stop = self.group.start(FAKE, world, {}, logs=self.folder)
        return self.group, self.group.watch(lambda: len(self.ready) == world) if stop is WatchEnd.ARRIVED else stop

    def started(self) -> list[psutil.Process]:
        return [process for agent in self.agents for process in (agent, *agent.children(recursive=True))]

    def close(self) -> None:
        if self.group is not None:
            self.group.end()
        self.cluster.close()


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spread]:
    made = Spread(tmp_path, monkeypatch)
    with closing(made):
        yield made


def gone(processes: list[psutil.Process]) -> bool:
    return not any(pid_lives(process.pid) for process in processes)


def test_ranks_of_two_nodes_are_one_group(spread: Spread) -> None:
    spread.open({"note": ["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]}, slots=2)
    assert (spread.hardware.count, spread.hardware.nodes, spread.hardware.threads) == (4, 2, 1)
    group, stop = spread.run()
    assert stop is WatchEnd.ARRIVED
    notes = [next(one for one in spread.heard[rank] if one["type"] == "note") for rank in range(4)]
    specs = [note["spec"] for note in notes]
    assert [(one["rank"], one["local_rank"], one["node"]) for one in specs] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert {(one["world"], one["local_world"], one["nodes"]) for one in specs} == {(4, 2, 2)}
    assert [one["store"]["port"] for one in specs] == [None, None, 1, 1], "as the first rank has told it"
    assert [one["port"] for one in specs[2:]] == [2, 2]
    assert len({one["store"]["token"] for one in specs}) == 1
    assert notes[0]["env"] == {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    assert len(group.peaks().used) == 4
    assert min(group.peaks().used) > 0, "each node gauges its own"
    ranks = list(group.pids)
    group.end()
    assert not any(pid_lives(pid) for pid in ranks)
    assert all(pid_lives(agent.pid) for agent in spread.agents), "they stay for the next group"
    _, stop = spread.run()
    assert stop is WatchEnd.ARRIVED
    spread.close()
    assert gone(spread.agents)


def test_a_cluster_of_one_machine_meets_in_a_file(spread: Spread) -> None:
    spread.open({"note": []}, slots=2, names=("n1",))
    _, stop = spread.run()
    assert stop is WatchEnd.ARRIVED
    spec = next(one for one in spread.heard[1] if one["type"] == "note")["spec"]
    assert isinstance(spec["store"], str)
    assert (spec["local_rank"], spec["nodes"]) == (1, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("error CUDA out of memory. Tried to allocate 2.00 GiB.", OutcomeKind.OOM_DEVICE),
        ("SIGKILL", OutcomeKind.CRASH),
        ("exit 3", OutcomeKind.CRASH),
    ],
)
def test_what_happens_to_a_rank_of_the_second_node_is_everybodys(spread: Spread, what: str, kind: OutcomeKind) -> None:
    spread.open({"rank": 1, "where": "forward", "what": what})
    group, stop = spread.run()
    assert stop is WatchEnd.FAILED
    verdict = classify_failure(group.evidence())
    assert (verdict.kind, verdict.rank) == (kind, 1)
    ranks = list(group.pids)
    group.end()
    assert not any(pid_lives(pid) for pid in ranks)


@pytest.mark.slow
def test_a_hang_on_two_nodes(spread: Spread) -> None:
    spread.open({"rank": 1, "where": "forward", "what": "hang"})
    group, stop = spread.run(silent=1.0)
    assert stop is WatchEnd.SILENT
    assert classify_failure(group.evidence()).kind is OutcomeKind.TIMEOUT


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGSTOP))]
)
def test_a_node_that_is_lost_is_the_machines_with_its_name(
    spread: Spread, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    spread.open()
    first = spread.agents[0]
    kept = {first.pid, *(process.pid for process in first.children(recursive=True))}  # with its fork server
    group, stop = spread.run()
    assert stop is WatchEnd.ARRIVED
    ended = [process for process in spread.started() if process.pid not in kept]
    spread.agents[1].send_signal(how)
    with monkeypatch.context() as soon:
        if how is signal.SIGSTOP:
            soon.setattr(wires, "SILENT_SECONDS", 4.0)
        assert group.watch(lambda: False) is WatchEnd.FAILED
    verdict = classify_failure(group.evidence())
    assert (verdict.kind, verdict.source) == (OutcomeKind.INFRASTRUCTURE, Source.NODE)
    assert verdict.reason.startswith("node n2: ")
    assert group.failed_at is not None
    group.end()
    assert spread.cluster.broken
    if how is signal.SIGSTOP:
        spread.agents[1].send_signal(signal.SIGCONT)
    spread.cluster.reconnect()
    assert not spread.cluster.broken
    assert spread.said[-1] == "node n2 is back"
    wait_until(lambda: gone(ended), "the end of all ranks and of the lost node's server")
    spread.ready.clear()
    group, stop = spread.run()
    assert stop is WatchEnd.ARRIVED, "the next group has a whole cluster"


@pytest.mark.slow
def test_a_node_that_does_not_come_back_is_the_machines_trouble(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "_BACK_SECONDS", 0.5)
    monkeypatch.setattr(clusters, "_RETRY_SECONDS", 0.1)
    cluster = spread.open()
    spread.agents[1].kill()
    wait_until(lambda: cluster.broken, "the node to be lost")
    assert not cluster.is_shared_path(Path("/"))
    cluster.transport = Pipe("sh", "-c", "echo down for maintenance >&2; exit 1")
    with pytest.raises(MachineError, match=r"n2: .*down for maintenance.*; the study goes on with the same command"):
        cluster.reconnect()
    cluster.transport = Pipe()
    cluster.cancelled = lambda: True
    with pytest.raises(Stopped):
        cluster.reconnect()
    cluster.cancelled = lambda: False
    cluster.reconnect()
    assert not cluster.broken


def test_a_node_without_a_place_to_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"env": {}, "python": None, "cwd": ".", "path": ""}
    asked |= {"device": "cpu", "count": 1, "headroom": 0.05, "memory_cap_bytes": None}
    with closing(agents.NodeAgent()) as agent:
        assert agent.survey(**asked)["hardware"]["count"] == 1  # type: ignore[arg-type]
        monkeypatch.setattr(agents, "LEAST_FREE_BYTES", 2**62)
        with pytest.raises(UserError, match="is full: its disk has less than"):
            agent.survey(**asked)  # type: ignore[arg-type]
        monkeypatch.setenv("AUTOTUNE_CACHE", "/proc/no/such/place")
        monkeypatch.setattr(agents, "LEAST_FREE_BYTES", 0)
        with pytest.raises(UserError, match="/proc/no/such/place/autotune cannot be written"):
            agent.survey(**asked)  # type: ignore[arg-type]


def test_the_end_of_the_stream_ends_all_that_an_agent_has_started(spread: Spread) -> None:
    spread.open({"rank": 1, "where": "step", "what": "worker"})
    _, stop = spread.run()
    assert stop is WatchEnd.ARRIVED
    started = spread.started()
    assert len(started) > 4, "two agents, two ranks, and what one of these has started"
    for node in spread.cluster.nodes:
        assert isinstance(node.agent, CommandAgent)
        node.agent._process.kill() if node.name == "n1" else node.agent._link.shutdown(socket.SHUT_WR)
    wait_until(lambda: gone(started), "the end of all")


@pytest.mark.slow
def test_an_agent_ends_whose_tuner_falls_silent(tmp_path: Path) -> None:
    """A cut link is no end of a stream."""
    text = "import autotune.executors.cluster.agent as a; a.GREETING_SECONDS = 1.0; a.main()"
    python = agent_words()[0]
    process = subprocess.Popen([python, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.wait(timeout=60) == 1
    process.stdin.close()


def test_nothing_that_is_printed_gets_into_the_stream(tmp_path: Path) -> None:
    text = (
        "import os; from autotune.workers.protocol import Stream; s = Stream.of_this_process(15.0); "
        "print('printed', flush=True); os.system('echo from a child; cat'); s.send('agent', said=1)"
    )
    done = subprocess.run([agent_words()[0], "-c", text], input=b"x", capture_output=True, timeout=60)
    assert json.loads(done.stdout) == {"type": "agent", "said": 1}
    assert done.stderr.decode().split("\n")[:2] == ["printed", "from a child"]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (("sh", "-c", 'echo "Welcome to n1"; exec "$@"', "-"), "Welcome to n1"),
        (
            ("sh", "-c", "echo no such thing >&2; exit 3"),
            r"its agent, or the way to it, has ended with exit status 3 \(no such thing\); autotune and the",
        ),
    ],
)
def test_a_stream_that_does_not_begin_with_an_agent(tmp_path: Path, before: tuple[str, ...], said: str) -> None:
    cluster = Cluster([Host("n1", (0,))], Pipe(*before), NodeRequirements("cpu"), tmp_path)
    with pytest.raises(UserError, match=said):
        cluster.reach()


def test_another_version_of_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "__version__", "9.9")
    cluster = Cluster([Host("n1", (0,))], Pipe(), NodeRequirements("cpu"), tmp_path)
    with pytest.raises(UserError, match=r"node n1 has autotune .*, and this machine 9\.9: install the same"):
        cluster.reach()


def test_bad_wishes_come_back_with_the_nodes_name_and_leave_nothing(tmp_path: Path) -> None:
    cluster = Cluster([Host("n1", tuple(range(500)))], Pipe(), NodeRequirements("cpu"), tmp_path)
    with pytest.raises(UserError, match=r"node n1: --gpus 500: \d+ CPU cores run at most"):
        cluster.reach()
    assert all(node.agent._process.poll() is not None for node in cluster.nodes)  # type: ignore[attr-defined]
    cluster = Cluster([Host("n1", (0,))], Pipe(), NodeRequirements("cpu", path="/no/such/folder"), tmp_path)
    with pytest.raises(
        UserError, match="node n1: no /no/such/folder there; expected what is trained in the same place"
    ):
        cluster.reach()


def test_a_request_can_be_stopped_and_an_agent_that_fails_says_how(tmp_path: Path) -> None:
    agent = CommandAgent("n1", agent_words(), tmp_path / "n1.log")
    with closing(agent):
        agent.greet(60)
        with pytest.raises(OSError, match="node n1: "):
            agent.call("peaks", 60)
        with pytest.raises(Stopped):
            agent.finish(Future(), 60, cancelled=lambda: True)
        call = agent.begin("survey", env={}, python=None, cwd="/")  # arguments are missing
        with pytest.raises(NodeDown, match="n1: its agent failed: TypeError"):
            agent.finish(call, 60)
    silent = CommandAgent("n1", ["sleep", "600"], tmp_path / "n1.log")
    with closing(silent), pytest.raises(NodeDown, match=r"no answer within 0 s"):
        silent.greet(0.2)


def test_only_listed_variables_are_sent() -> None:
    here = {"HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "AWS_SECRET": "x", "PATH": "/bin", "MINE": "1", "HOME": "/root"}
    assert sent_variables(here) == {"HF_HOME": "/hf", "NCCL_DEBUG": "INFO"}
    assert sent_variables(here, ["MINE"])["MINE"] == "1"
    with pytest.raises(UserError, match="--export YOURS: no such variable"):
        sent_variables(here, ["YOURS"])


def test_what_a_study_says_that_it_was_measured_under_is_sent() -> None:
    watched = dict.fromkeys((*_WATCHED, *(f"{prefix}X" for prefix in _WATCHED_PREFIXES)), "1")
    assert sent_variables(watched) == watched


def test_peaks_of_several_machines_are_in_the_ranks_order() -> None:
    first = MemoryPeaks([1, 2], {1: 20}, host_low=9, oom_kills=2)
    second = MemoryPeaks([7, 4], {0: 70}, foreign=3, neighbours="b", host_low=5, oom_kills=1, lost="x")
    whole = merged([first, second])
    assert (whole.used, whole.grown, whole.worst) == ([1, 2, 7, 4], {1: 20, 2: 70}, 7)
    assert (whole.foreign, whole.neighbours, whole.host_low, whole.oom_kills, whole.lost) == (3, "b", 5, 3, "x")
    assert merged([first]) is first


@pytest.mark.slow
def test_a_wire_does_not_hang_where_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "SILENT_SECONDS", 1.0)
    python = agent_words()[0]
    deaf = (
        "import json, sys, time; call = json.loads(sys.stdin.readline()); "
        "print(json.dumps({'type': 'answer', 'number': call['number'], 'value': {}}), flush=True); time.sleep(600)"
    )
    agent = CommandAgent("n1", [python, "-c", deaf], tmp_path / "log")
    agent.greet(60)
    agent.begin("much", text="x" * 2**21)
    assert agent._process.poll() is None, "what nobody has read was not waited for"
    wait_until(lambda: agent.failure, "the silence to be noticed")
    assert agent.failure.startswith("n1: ")
    monkeypatch.setattr(wires, "LEAVE_SECONDS", 0.2)
    agent.close()
    assert agent._process.poll() is not None
