"""Slurm: nodes and time of an allocation, and a real Slurm of two nodes."""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from autotune.errors import UserError
from autotune.executors.cluster import transports
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.transports import PACKAGE, Srun, allocated_hosts, check_time_left, in_allocation
from autotune.executors.machine import RankRequirements
from tests.conftest import wait_until
from tests.executors.cluster.hosts import group_of, is_lost, only_tests
from tests.executors.cluster.slurm_cluster import WHY_NOT, Slurm, made_slurm

EXAMPLE = str(PACKAGE.parent / "examples" / "slurm" / "nodes.sbatch")


def test_which_nodes_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "scontrol": "n1\nn2\n",
        "squeue": time.strftime("%Y-%m-%dT%H:%M:%S\n", time.localtime(time.time() + 200)),
    }
    monkeypatch.setattr(transports, "slurm_output", lambda *words: answers[words[0]])
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert in_allocation(allocation)
    assert not in_allocation({"SLURM_JOB_ID": "7"})
    assert [(host.name, len(host.slots)) for host in allocated_hosts(3, allocation)] == [("n1", 3), ("n2", 3)]
    assert len(allocated_hosts(None, {**allocation, "SLURM_GPUS_ON_NODE": "8"})[0].slots) == 8
    with pytest.raises(UserError, match="--device cpu --gpus N"):
        allocated_hosts(None, allocation)
    check_time_left(100, allocation)
    with pytest.raises(UserError, match=r"the allocation ends in .*, before a budget of .*: give a smaller --budget"):
        check_time_left(300, allocation)
    answers["squeue"] = "N/A\n"
    check_time_left(10**9, allocation)


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="--executor slurm: no sbatch on this machine"):
        transports.slurm_output("sbatch")


# -- a real one --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _slurm_of_this_worker(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with made_slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def real(_slurm_of_this_worker: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name, value in _slurm_of_this_worker.environment.items():
        monkeypatch.setenv(name, value)
    return _slurm_of_this_worker


@pytest.mark.slow
def test_agents_of_an_allocation(real: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is killed is a lost node, which comes back; at the end nothing is left."""
    monkeypatch.setenv("PYTHONPATH", only_tests(tmp_path))
    with real.allocation() as job:
        hosts = allocated_hosts(1, job)
        assert [host.name for host in hosts] == ["n1", "n2"]
        said: list[str] = []
        needs = NodeRequirements("cpu", variables=("PYTHONPATH",))
        cluster = Cluster(hosts, Srun(job["SLURM_JOB_ID"]), needs, tmp_path, print_line=said.append)
        with closing(cluster):
            hardware = cluster.reach()
            assert (hardware.count, hardware.nodes) == (2, 2)
            cluster.open(RankRequirements("cpu", 1))
            group = group_of(cluster)
            agent = psutil.Process(int(cluster.nodes[1].agent.greeting["pid"]))
            step = agent.parent()
            assert step.name() == "slurmstepd"
            step.kill()
            is_lost(cluster, group, "n2")
            group.end()
            cluster.reconnect()
            assert not cluster.broken
        wait_until(lambda: not real.processes(), "the end of all that was started")


@pytest.mark.slow
def test_the_example_tunes_all_nodes_of_its_job(real: Slurm, tmp_path: Path) -> None:
    """Submitted with options that fit this Slurm; a second job that is shorter than the budget is refused."""
    (tmp_path / "autotune").symlink_to(Path(sys.executable).parent / "autotune")
    options = "--device cpu --gpus 1 --seq-len 32 --global-batch-size 4 --max-trials 1"
    variables = {"MODEL": "tiny-llama", "STUDY": "slurmed", "BUDGET": "200s", "AUTOTUNE_OPTIONS": options}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def submit(limit: str) -> tuple[int, str]:
        words = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", f"--time={limit}", "--output=job.log", EXAMPLE]
        done = subprocess.run(
            ["sbatch", "--wait", *words], cwd=tmp_path, env={**os.environ, **variables}, timeout=600, check=False
        )
        return done.returncode, (tmp_path / "job.log").read_text()

    code, log = submit("10")
    assert code == 0, log
    assert "on 2 nodes" in log
    assert (tmp_path / "runs" / "slurmed" / "slurmed.json").exists()
    wait_until(lambda: not real.processes(), "the end of all that was started")
    code, log = submit("3")
    assert code == 2, log
    assert "before a budget of" in log
