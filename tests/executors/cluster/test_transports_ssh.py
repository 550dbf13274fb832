"""Real hosts over real ssh: what is said of those that cannot be used, and what becomes of a group when one is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from autotune.errors import UserError
from autotune.executors.base import RESUME, MeasureSpec
from autotune.executors.cluster import transports
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.transports import Host, Ssh, read_hostfile
from autotune.executors.local import LocalExecutor
from autotune.executors.machine import RankRequirements
from autotune.problem.outcome import OutcomeKind, Phase, Source
from autotune.util.units import MIB
from autotune.workers.group import WatchEnd, WorkerGroup
from tests.cli_call import call as call_here
from tests.conftest import SCRIPTS, make_candidate, make_job, pid_lives, wait_until
from tests.executors.cluster.hosts import Hosts, group_of, is_lost
from tests.tiny_training import TINY_RUN, trainer_words, write_trainers_config

QUICK = MeasureSpec(min_seconds=0.0, min_steps=2)


def running_on(hosts: Hosts) -> set[int]:
    return {process.pid for host in hosts.hosts for process in host.processes()}


@contextmanager
def left_as_found(hosts: Hosts) -> Iterator[None]:
    """Whatever is started on the hosts meanwhile ends; what ran there before, as another test's agents, may go on."""
    before = running_on(hosts)
    yield
    wait_until(lambda: not running_on(hosts) - before, "the end of all that was started on the hosts")


@pytest.fixture
def left_hosts(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts, for a test that leaves nothing running on them."""
    with left_as_found(hosts):
        yield hosts


@contextmanager
def reached(hosts: Hosts, folder: Path, **wishes: object) -> Iterator[Cluster]:
    cluster = Cluster(
        read_hostfile(hosts.hostfile()),
        Ssh(),
        NodeRequirements("cpu", **wishes),
        folder / "nodes",  # type: ignore[arg-type]
    )
    with left_as_found(hosts), closing(cluster):
        cluster.reach()
        yield cluster


def test_two_hosts_are_reached_and_left_as_they_were(hosts: Hosts, tmp_path: Path) -> None:
    with reached(hosts, tmp_path) as cluster:
        assert all(host.processes() for host in hosts.hosts)
        spread = cluster.launcher
        assert spread.store_host == (hosts[0].address if hosts.own_links else "127.0.0.1")
        assert cluster.is_shared_path(tmp_path)
        assert not cluster.is_shared_path(tmp_path / "none")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wants-password", "Permission denied"),
        ("unknown-key", "Host key verification failed.); `ssh -o BatchMode=yes unknown-key true`"),
        ("no-sshd", "Connection refused); `ssh -o BatchMode=yes no-sshd true`"),
        ("no-such-host.invalid", "Could not resolve hostname no-such-host.invalid"),
        ("prints-banner", "node prints-banner prints 'Welcome to the cluster' into the stream"),
    ],
)
def test_a_host_that_cannot_be_used_is_said_in_one_line(
    left_hosts: Hosts, tmp_path: Path, name: str, said: str
) -> None:
    cluster = Cluster([Host("node1", (0,)), Host(name, (0,))], Ssh(), NodeRequirements("cpu"), tmp_path)
    with pytest.raises(UserError) as caught:
        cluster.reach()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_without_this_package_or_python(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        ([sys.executable, "/opt/nowhere/autotune"], "node node1: .*/opt/nowhere/autotune.*No such file"),
        (["/opt/no/python"], "node node1: .*/opt/no/python: No such file"),
    ):
        monkeypatch.setattr(transports, "agent_words", lambda words=words: words)
        with pytest.raises(UserError, match=said):
            Cluster([Host("node1", (0,))], Ssh(), NodeRequirements("cpu"), tmp_path).reach()


def test_the_command_line_says_it_with_exit_code_2(
    left_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nunknown-key slots=1\n")
    words = ["run", "--model", "tiny-llama", "--device", "cpu", "--hostfile", str(hostfile)]
    code, _, err = call_here(monkeypatch, capsys, *words)
    assert code == 2, err
    assert err.strip().splitlines()[-1].startswith("autotune: node unknown-key: its agent, or the way to it, has ended")
    assert not (tmp_path / "runs").exists()


# -- groups of ranks that train nothing ------------------------------------------------------------------------------------


@contextmanager
def running(hosts: Hosts, folder: Path, said: list[str]) -> Iterator[tuple[Cluster, WorkerGroup]]:
    """A group of fake ranks, one on each host, that is ready."""
    with reached(hosts, folder) as cluster:
        cluster.print_line = said.append
        cluster.open(RankRequirements("cpu", 1))
        group = group_of(cluster)
        try:
            yield cluster, group
        finally:
            group.end()


def session_of(host: object) -> psutil.Process:
    """The sshd that carries the latest agent's stream: another test's may be there, too."""
    found = psutil.Process(host.process.pid).children(recursive=True)  # type: ignore[attr-defined]
    sessions = [process for process in found if process.name().startswith("sshd") and process.children()]
    return max(sessions, key=psutil.Process.create_time)


@pytest.mark.slow
def test_sshd_that_is_killed_is_a_lost_node_and_the_next_group_has_it_again(hosts: Hosts, tmp_path: Path) -> None:
    said: list[str] = []
    with running(hosts, tmp_path, said) as (cluster, group):
        session_of(hosts[1]).kill()
        is_lost(cluster, group, "node2")
        group.end()
        cluster.reconnect()
        assert said[-1] == "node node2 is back"
        assert not cluster.broken


@pytest.mark.slow
def test_a_link_that_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    """For five seconds nobody notices; for longer the node is lost, and ends by itself what runs there."""
    if not hosts.own_links:
        pytest.skip("no network namespaces here: a link cannot be cut")
    said: list[str] = []
    with running(hosts, tmp_path, said) as (cluster, group):
        hosts[1].cut()
        try:
            assert group.watch(lambda: False, time.monotonic() + 5.0) is WatchEnd.DEADLINE
        finally:
            hosts[1].mend()
        assert group.watch(lambda: False, time.monotonic() + 8.0) is WatchEnd.DEADLINE
        assert len(group.peaks().used) == 2
        hosts[1].cut()
        try:
            is_lost(cluster, group, "node2")
            wait_until(lambda: not hosts[1].processes(), "the agent to end what runs on a host that is cut off")
        finally:
            hosts[1].mend()
        group.end()
        cluster.reconnect()
        assert not cluster.broken


@pytest.mark.main_path
@pytest.mark.slow
def test_a_killed_tuner_leaves_nothing_on_the_hosts(left_hosts: Hosts, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.executors.cluster.test_transports_ssh import *\n"
        "cluster = Cluster(read_hostfile(Path(sys.argv[1])), Ssh(), NodeRequirements('cpu'), Path(sys.argv[2]))\n"
        "cluster.reach(); cluster.open(RankRequirements('cpu', 1))\n"
        "group = group_of(cluster); print('up', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", program, str(left_hosts.hostfile()), str(tmp_path)]
    tuner = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert tuner.stdout.readline() == b"up\n"
    assert all(len(host.processes()) >= 2 for host in left_hosts.hosts)
    tuner.kill()
    tuner.wait()


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _spread_bench(_hosts_of_this_worker: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """An executor on two hosts, with a fork server on each."""
    folder = tmp_path_factory.mktemp("spread")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", _hosts_of_this_worker.path)
        cluster = Cluster(
            read_hostfile(_hosts_of_this_worker.hostfile()),
            Ssh(),
            NodeRequirements("cpu", memory_cap_bytes=2000 * MIB),
            folder / "nodes",
        )
        with closing(cluster):
            hardware = cluster.reach()
            executor = LocalExecutor(make_job(2), hardware, folder, [make_candidate()], target=cluster)
            executor.open(lambda text: None)
            yield executor


def run(executor: LocalExecutor, stage: int, name: str, measure_spec: MeasureSpec = QUICK):  # type: ignore[no-untyped-def]
    with closing(executor.session(make_candidate(stage, 2), name)) as session:
        return session.measure(make_candidate(stage, 2), measure_spec, 240.0)


@pytest.fixture
def spread_bench(_spread_bench: LocalExecutor) -> LocalExecutor:
    """The same for all; a host that another test has cut off is reached again."""
    _spread_bench.ensure_launcher()
    return _spread_bench


@pytest.mark.slow
def test_the_machines_own_test_spans_the_hosts(spread_bench: LocalExecutor) -> None:
    spread_bench.check(pytest.fail)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_measured_across_two_hosts(spread_bench: LocalExecutor, stage: int) -> None:
    outcome = run(spread_bench, stage, f"stage{stage}")
    assert outcome.ok, outcome
    assert 100 * MIB < outcome.measurement.peak_bytes < 2000 * MIB
    assert outcome.log is not None
    assert (Path(outcome.log) / "rank1.log").exists(), "logs come back"


@pytest.mark.main_path
@pytest.mark.slow
def test_out_of_memory_on_one_of_them(spread_bench: LocalExecutor) -> None:
    """A real one, under the rank's cap."""
    spread_bench.fault = lambda name: {"rank": 1, "where": "init", "what": "exhaust"}
    try:
        outcome = run(spread_bench, 2, "oom")
    finally:
        spread_bench.fault = lambda name: None
    assert (outcome.kind, outcome.phase, outcome.rank) == (OutcomeKind.OOM_DEVICE, Phase.INIT, 1), outcome
    assert outcome.source is Source.EXCEPTION
    assert outcome.missing_bytes
    assert outcome.peak_bytes is not None
    assert outcome.peak_bytes > 1000 * MIB, "the worst rank's"
    assert run(spread_bench, 2, "after").ok


@pytest.mark.slow
def test_a_candidate_goes_on_from_a_checkpoint_that_both_hosts_see(spread_bench: LocalExecutor) -> None:
    assert spread_bench.resumes
    assert run(spread_bench, 1, "resume", RESUME).ok


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a rank", "the agent"])
def test_whoever_is_killed_in_a_trial_the_next_one_measures(
    spread_bench: LocalExecutor, hosts: Hosts, who: str
) -> None:
    ground = spread_bench.target
    assert isinstance(ground, Cluster)

    def kill(phase: str) -> None:
        if phase == "forward":
            agent = int(ground.nodes[1].agent.greeting["pid"])
            pid = session._group._rank_pids[1] if who == "a rank" else agent  # type: ignore[union-attr]
            os.kill(pid, signal.SIGKILL)

    spread_bench.on_phase = kill
    session = spread_bench.session(make_candidate(1, 2), f"killed {who}")
    try:
        with closing(session):
            outcome = session.measure(make_candidate(1, 2), QUICK, 240.0)
    finally:
        spread_bench.on_phase = lambda phase: None
    assert outcome.kind is (OutcomeKind.CRASH if who == "a rank" else OutcomeKind.INFRASTRUCTURE), outcome
    if who == "the agent":
        assert outcome.reason.startswith("node node2: ")
        assert not pid_lives(session._group._rank_pids[1])  # type: ignore[union-attr]
    assert run(spread_bench, 1, f"after {who}").ok


# -- the command line --------------------------------------------------------------------------------------------------------


@pytest.mark.main_path
@pytest.mark.slow
def test_a_named_model_is_tuned_and_exported(left_hosts: Hosts, tmp_path: Path) -> None:
    words = [*TINY_RUN, "--hostfile", str(left_hosts.hostfile())]
    words += ["--global-batch-size", "4", "--budget", "8m", "--max-trials", "2", "--study", "spread"]
    words += ["--no-references"]
    done = call(words, tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "on 2 nodes" in done.stdout
    assert (tmp_path / "runs" / "spread" / "spread.json").exists()


@pytest.mark.slow
def test_a_script_is_tuned_and_trained(left_hosts: Hosts, tmp_path: Path) -> None:
    write_trainers_config(tmp_path / "ds.json", 1)
    script = trainer_words(SCRIPTS / "trainer.py", "ds.json", 20)
    words = ["--device", "cpu", "--hostfile", str(left_hosts.hostfile()), "--budget", "8m", "--max-trials", "1"]
    done = call(["run", *words, "--study", "mine", "--", *script], tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    trained = call(["launch", "mine", "--hostfile", str(left_hosts.hostfile()), "--", *script], tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "training ended with exit code 0 after 20 DeepSpeed steps" in trained.stderr
    assert "'train_runtime'" in trained.stderr, "what ranks write is shown"
    alone = call(["launch", "mine", "--", *script], tmp_path)
    assert alone.returncode == 2
    assert "the study was tuned on 2 nodes with 1 devices each. Add --hostfile FILE" in alone.stderr


def call(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words], cwd=cwd, capture_output=True, text=True, timeout=600
    )
