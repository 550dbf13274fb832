"""Commands of one machine as those of several, and the batch script for Slurm."""

import dataclasses
import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from autotune.problem.job import Script, ScriptProfile
from autotune.results.console import train_with
from autotune.results.export import sbatch_script, write_export
from tests.conftest import make_candidate, make_job


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("node1 slots=4\nnode2 slots=4\n")
    return path


def test_what_is_printed_for_a_script(tmp_path: Path, hostfile: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": False, "flags": [], "through_arguments": True}
    script = Script(
        ("train.py", "--deepspeed", str(tmp_path / "ds.json")), str(tmp_path), profile=ScriptProfile.from_json(profile)
    )
    job = dataclasses.replace(make_job(8), script=script)
    config = tmp_path / "study.json"
    named = dict(train_with(make_candidate(1), job, "study", config, 2, nodes=2, hostfile=hostfile).commands)
    watched = f"autotune launch study --hostfile {hostfile} -- train.py"
    assert [text.startswith(watched) for text in named.values()] == [True], "a launcher's own command is of one node"
    alone = train_with(make_candidate(1), dataclasses.replace(job, ranks=4), "study", config, 2).commands
    assert not any("hostfile" in text or "nnodes" in text for _, text in alone)


def test_a_batch_script_runs_one_torchrun_a_node(tmp_path: Path) -> None:
    """By a shell, with stand-ins for Slurm's commands that say how they were called."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    text = sbatch_script(
        ["train.py", "--name", "it's $HOME"],
        name="study",
        nodes=2,
        per_node=4,
        device="cuda",
        cwd=str(folder),
        variables={"OMP_NUM_THREADS": "3"},
    )
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == "--job-name=study --nodes=2 --ntasks-per-node=1 --gpus-per-node=4".split()
    (tmp_path / "job.sbatch").write_text(text)
    programs = {
        "scontrol": 'printf "n7\\nn8\\n"',
        "srun": 'pwd; echo "$OMP_NUM_THREADS"; for w in "$@"; do echo "$w"; done',
    }
    for name, does in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_ID": "5",
    }
    done = subprocess.run(["bash", str(tmp_path / "job.sbatch")], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(folder),
        "3",
        *"torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id 5 --rdzv-backend c10d --rdzv-endpoint n7:20005".split(),
        "train.py",
        "--name",
        "it's $HOME",
    ]


def test_a_batch_script_of_one_node_meets_nobody_elses_ranks() -> None:
    """Two jobs may share a node."""
    about = {"name": "s", "per_node": 4, "device": "cuda", "cwd": ".", "variables": {"DATA": "pg://u:pw5@h"}}
    text = sbatch_script(["train.py", "--a", "1"], nodes=1, **about)
    assert "pw5" not in text
    assert text.splitlines()[-1] == "srun torchrun --standalone --nproc-per-node 4 train.py --a 1"
    assert "29500" not in sbatch_script(["train.py"], nodes=2, **about)


def test_exports_of_a_study_of_several_nodes(tmp_path: Path) -> None:
    job, about = make_job(8), {"study": "s", "environment": {"OMP_NUM_THREADS": "1"}}
    write_export(make_candidate(3), job, tmp_path / "s.sbatch", about, style="sbatch", device="cpu", nodes=2)
    text = (tmp_path / "s.sbatch").read_text()
    assert "--nnodes 2 --nproc-per-node 4 --rdzv-id" in text
    assert f'"$@" --deepspeed {tmp_path / "s.sbatch.deepspeed.json"}' in text
    assert "gpus" not in text
    write_export(make_candidate(3), job, tmp_path / "s.yaml", about, style="accelerate", device="cpu", nodes=2)
    config = yaml.safe_load((tmp_path / "s.yaml").read_text())
    assert (config["num_machines"], config["num_processes"]) == (2, 8)
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


def test_a_batch_script_of_any_name_is_one_that_a_shell_and_slurm_read(tmp_path: Path) -> None:
    about = {"study": "lr #2; rm x", "environment": {}}
    write_export(make_candidate(3), make_job(), tmp_path / "s.sbatch", about, style="sbatch")
    (line,) = [line for line in (tmp_path / "s.sbatch").read_text().splitlines() if "--job-name" in line]
    assert shlex.split(line.removeprefix("#SBATCH ")) == ["--job-name=lr #2; rm x"]
