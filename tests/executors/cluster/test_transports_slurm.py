"""Slurm: what sbatch is told, what its answers become, and a real one of two nodes."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autotune.commands.request import Request
from autotune.commands.slurm_submit import _follow, batch_script, limit_seconds, options_of
from autotune.errors import UserError
from autotune.executors.cluster import transports
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.rpc import NoGreeting
from autotune.executors.cluster.transports import (
    PACKAGE,
    Srun,
    allocated_hosts,
    check_time_left,
    in_allocation,
    preamble,
)
from autotune.executors.machine import RankRequirements
from autotune.problem.outcome import OutcomeKind, Source
from autotune.workers.failure_classifier import classify_failure
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.memory_monitor import Meter
from tests.cli_call import call
from tests.conftest import wait_until
from tests.executors.cluster.hosts import only_tests
from tests.executors.cluster.slurm_cluster import WHY_NOT, Slurm, made_slurm

HOUR = 3600.0
SENT = NodeRequirements(
    "cpu", preamble=preamble(PACKAGE, Path("/nowhere/autotune"))
)  # to nodes that have not the package


def test_what_sbatch_is_told() -> None:
    more = ["gres=gpu:8", "--exclusive"]
    found = options_of(Request(nodes=4, gpus=8, partition="long", account="me", time="2:00:00", slurm=more))
    assert found[:2] == ["--nodes=4", "--ntasks-per-node=1"]
    assert {
        "--gpus-per-node=8",
        "--partition=long",
        "--account=me",
        "--time=2:00:00",
        "--gres=gpu:8",
        "--exclusive",
    } < set(found)
    assert "--gpus-per-node=2" not in options_of(Request(gpus=2, device="cpu"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes=3", "autotune sets this option"),
        ("wrap=reboot", "autotune sets this option"),
        ("export=NONE", "autotune sets this option"),
        ("a b", "expected KEY=VALUE"),
        ("=", "expected"),
    ],
)
def test_options_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        options_of(Request(slurm=[text]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 180),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-2:3:4", 93784),
        ("0", 0),
        *((none, None) for none in ("soon", "", "1:2:3:4", "-1", "1-", "infinite")),
    ],
)
def test_time_limits_are_slurms(text: str, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize("limit", ["1", "2", "1:30", "0-0:2"])
def test_a_time_limit_in_which_nothing_can_be_done(limit: str) -> None:
    with pytest.raises(
        UserError, match=f"--time {limit}: Slurm warns 90 s before the end, .*: give at least 3 minutes"
    ):
        options_of(Request(time=limit))


def test_a_job_that_was_ended_before_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.write_text("143\n")
    with pytest.raises(UserError, match=r"job 7 was stopped before it began\. Give it a longer --time"):
        _follow("7", tmp_path / "log", code, pytest.fail)


def test_the_batch_script_passes_the_warning_on_and_keeps_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that ends by itself some time after SIGTERM, as `run` does."""
    stand_in, code, up = tmp_path / "python", tmp_path / "a code", tmp_path / "up"
    stand_in.write_text(
        "#!/usr/bin/env python3\nimport signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.5)\n    sys.exit(130)\n"
        f"signal.signal(signal.SIGTERM, end)\nopen({str(up)!r}, 'w').write(' '.join(sys.argv[2:]))\ntime.sleep(60)\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").write_text(batch_script(["run", "--study", "it's"], code))
    job = subprocess.Popen(["bash", str(tmp_path / "job")])
    wait_until(up.exists, "the command")
    wait_until(lambda: up.read_text() == "run --study it's", "its words")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 130
    assert code.read_text() == "130\n"


def test_a_job_without_the_storage_that_it_was_promised_ends_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "job").write_text(batch_script(["run"], tmp_path / "code", ["AUTOTUNE_STORAGE"]))
    bare = {key: value for key, value in os.environ.items() if key != "AUTOTUNE_STORAGE"}
    job = subprocess.run(["bash", str(tmp_path / "job")], env=bare, capture_output=True, text=True, check=False)
    assert (job.returncode, (tmp_path / "code").read_text()) == (2, "2\n")
    assert job.stderr.startswith("autotune: Slurm has not handed AUTOTUNE_STORAGE on")
    assert job.stderr.count("\n") == 1


@pytest.mark.parametrize("typed", [[], ["--storage", "postgresql://joe:typed@host/db"]])
def test_the_storage_goes_with_the_job_and_not_into_its_file(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However it was said: the job would tune alone without it."""
    seen: list[tuple[str, ...]] = []

    def sbatch(*words: str) -> str:
        if words[0] != "sbatch":
            return ""
        seen.append(words)
        environments.append(os.environ.get("AUTOTUNE_STORAGE"))
        Path(words[-1]).with_suffix(".code").write_text("0\n")
        return "7\n"

    environments: list[str | None] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.commands.slurm_submit.slurm_output", sbatch)
    monkeypatch.setenv("AUTOTUNE_STORAGE", "postgresql://joe:exported@host/db")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, _, err = call(
        monkeypatch, capsys, "run", "--model", "tiny-gemma-2", "--executor", "slurm", "--gpus", "1", *typed
    )
    assert code == 0, err
    assert environments == [typed[-1] if typed else "postgresql://joe:exported@host/db"]
    assert "--export=ALL" in seen[0]
    script = Path(seen[0][-1]).read_text()
    assert "AUTOTUNE_STORAGE" in script, "it looks whether it is there"
    assert "joe" not in script


def test_which_nodes_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"scontrol": "n1\nn2\n", "squeue": "1-02:03:04\n"}
    monkeypatch.setattr(transports, "slurm_output", lambda *words: answers[words[0]])
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert in_allocation(allocation)
    assert not in_allocation({"SLURM_JOB_ID": "7"})
    assert [(host.name, len(host.slots)) for host in allocated_hosts(3, allocation)] == [("n1", 3), ("n2", 3)]
    assert len(allocated_hosts(None, {**allocation, "SLURM_GPUS_ON_NODE": "8"})[0].slots) == 8
    with pytest.raises(UserError, match="--device cpu --gpus N"):
        allocated_hosts(None, allocation)
    check_time_left(93_000, allocation)
    with pytest.raises(UserError, match=r"the allocation ends in .*, before a budget of .*: give a smaller --budget"):
        check_time_left(94_000, allocation)
    check_time_left(100, {**allocation, "SLURM_JOB_END_TIME": str(int(time.time()) + 200)})
    with pytest.raises(UserError):
        check_time_left(300, {**allocation, "SLURM_JOB_END_TIME": str(int(time.time()) + 200)})
    answers["squeue"] = "UNLIMITED\n"
    check_time_left(10**9, allocation)


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="--executor slurm: no sbatch on this machine"):
        transports.slurm_output("sbatch")


def test_what_srun_says() -> None:
    said = "srun: error: Unable to create step for job 5: Invalid node name specified"
    text = Srun("5").complaint("n9", NoGreeting("n9", "ended", "", said, 1))
    assert (
        text
        == "node n9: Slurm starts no agent there (error: Unable to create step for job 5: Invalid node name specified)"
    )


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
    """A step that is killed is a lost node, which comes back; at the end nothing is left. The package is sent (`--sync`)."""
    monkeypatch.setenv("PYTHONPATH", only_tests(tmp_path))
    with real.allocation() as job:
        hosts = allocated_hosts(1, job)
        assert [host.name for host in hosts] == ["n1", "n2"]
        said: list[str] = []
        sent = replace(SENT, variables=("PYTHONPATH",))
        cluster = Cluster(hosts, Srun(job["SLURM_JOB_ID"], sync=True), sent, tmp_path, print_line=said.append)
        with closing(cluster):
            hardware = cluster.reach()
            assert (hardware.count, hardware.nodes) == (2, 2)
            cluster.open(RankRequirements("cpu", 1))
            group = WorkerGroup(
                cluster.launcher,
                hardware,
                Meter(),
                GroupPolicy(HOUR, lambda phase: HOUR, settle_seconds=0.2, may_exit=False),
            )
            assert group.start("tests.workers.fake_rank", 2, {}) is WatchEnd.ARRIVED
            agent = psutil.Process(int(cluster.nodes[1].connection.greeting["pid"]))
            step = agent.parent()
            assert step is not None
            assert step.name() == "slurmstepd"
            step.kill()
            assert group.watch(lambda: False, time.monotonic() + 120) is WatchEnd.FAILED
            verdict = classify_failure(group.evidence())
            assert (verdict.kind, verdict.source) == (OutcomeKind.INFRASTRUCTURE, Source.NODE)
            assert verdict.reason.startswith("node n2: ")
            group.end()
            cluster.reconnect()
            assert not cluster.broken
        wait_until(lambda: not real.processes(), "the end of all that was started")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "none"], "--executor slurm: error: .*partition"),
        (["--nodes", "5"], r"--executor slurm: the job can never start \(PartitionConfig\). Request fewer nodes"),
        (["--time", "soon"], "--executor slurm: error: .*time"),
    ],
)
def test_a_job_that_slurm_refuses(real: Slurm, tmp_path: Path, options: list[str], said: str) -> None:
    words = ["run", "--model", "tiny-llama", "--device", "cpu", "--executor", "slurm", *options]
    done = autotune(words, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(said, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not real.call("squeue", "-h").stdout


@pytest.mark.slow
def test_one_allocation_for_the_whole_call(real: Slurm, tmp_path: Path) -> None:
    words = ["run", "--model", "tiny-llama", "--device", "cpu", "--gpus", "1", "--executor", "slurm", "--nodes", "2"]
    words += [
        "--seq-len",
        "32",
        "--global-batch-size",
        "4",
        "--budget",
        "200s",
        "--max-trials",
        "1",
        "--study",
        "slurmed",
    ]
    words += ["--yes"]
    done = autotune(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 nodes" in done.stdout
    assert (tmp_path / "runs" / "slurmed" / "slurmed.json").exists()
    wait_until(lambda: not real.processes(), "the end of all that was started")
    # longer than Slurm's warning before the limit, which else comes with the start
    short = autotune([*words, "--time", "3"], tmp_path)
    assert short.returncode == 2, short.stdout + short.stderr
    assert "before a budget of" in short.stdout + short.stderr


def autotune(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words], cwd=cwd, capture_output=True, text=True, timeout=600, env=env
    )
